"""What a run reports to Weights & Biases, with a stand-in of its package, and with the package itself offline."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.soon import soon
from train.trainer.logs import BALANCE, METRICS, VALIDATION, Logs, run_id


class FakeRun:
    """Keeps what it is given, by step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def log(self, figures: dict[str, Any], step: int) -> None:
        assert not self.finished
        self.rows.append((step, figures))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(run=FakeRun(), given={}, Image=lambda pixels: pixels.shape)

    def init(**given: Any) -> FakeRun:
        made.given = given
        return made.run

    made.init = init
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def write(folder: Path, upto: int = 0) -> None:
    logs = Logs(folder, upto, "speech", {"seed": 3})
    logs.write(METRICS, 1, {"loss": 2.0, "lr": 0.1})
    logs.write(VALIDATION, 1, {"exact_match": 0.5})
    logs.write(BALANCE, 2, {"weight/A1T1": 0.25})
    Image.fromarray(np.zeros((3, 5, 3), np.uint8)).save(folder / "curves.png")
    logs.image("curves", folder / "curves.png", 2)
    logs.close()


def test_all_figures_go_to_it_under_their_steps_where_a_project_is_named(fake: Any, tmp_path: Path) -> None:
    Logs(tmp_path, 0).close()
    assert not fake.given
    write(tmp_path / "mine")
    assert fake.run.rows == [
        (1, {"train/loss": 2.0, "train/lr": 0.1}),
        (1, {"validation/exact_match": 0.5}),
        (2, {"balance/weight/A1T1": 0.25}),
        (2, {"curves": (3, 5, 3)}),
    ]
    assert fake.run.finished
    given = fake.given
    assert (given["project"], given["name"], given["config"]) == ("speech", "mine", {"seed": 3})
    assert (given["resume"], given["dir"], given["id"]) == ("allow", str(tmp_path / "mine"), run_id(tmp_path / "mine"))


@pytest.mark.long
def test_the_package_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path / "mine")
    [file] = (tmp_path / "mine" / "wandb").glob("offline-run-*/*.wandb")
    names = (b"train/loss", b"validation/exact_match", b"balance/weight/A1T1", b"curves")
    assert soon(lambda: all(name in file.read_bytes() for name in names), 60)  # its own process writes the end
