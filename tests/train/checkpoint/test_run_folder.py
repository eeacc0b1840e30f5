"""A run writes into a new folder or its own, overwrites and deletes nothing else, and has its folder to itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni.errors import UserError
from omni.files import LOCK, locked
from tests.golden.toys import RECIPE, inside, place
from train.checkpoint.retention import CONFIG, RESULTS, RUN_FILES
from train.cli import main

FAST: dict[str, Any] = {**RECIPE, "run_folder": "run", "budget": {"steps": 1}, "validation": {"questions": 0}}


@pytest.fixture
def here(tmp_path: Path):
    """A folder with the recipe of a run of one step, `run.yaml`, and the model and rows that it needs."""
    with inside(tmp_path):
        place(tmp_path, "model", "rows")
        Path("run.yaml").write_text(yaml.safe_dump(FAST))
        yield tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.sampled(2)
@pytest.mark.untrained("*")
@pytest.mark.parametrize("resume", ["auto", "force", "restart"])
@pytest.mark.parametrize("name", [*RUN_FILES, CONFIG, *RESULTS, "model.safetensors", "checkpoints/step-00000007"])
def test_what_is_not_of_a_run_stays(here: Path, name: str, resume: str, capsys: pytest.CaptureFixture[str]) -> None:
    mine = here / "run" / name / ("mine.txt" if "." not in name else "")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine: 1")
    before = files(here / "run")
    assert main(["fit", "run.yaml", "--resume", resume]) == 2
    said = capsys.readouterr().err
    assert f"run_folder run holds {name.partition('/')[0]!r}, but not of a run: name a new or empty folder" in said
    assert files(here / "run") == before


@pytest.mark.long
@pytest.mark.untrained("*")
def test_a_run_goes_into_a_folder_with_other_things_and_leaves_them(here: Path) -> None:
    """A job's output, for one, which Slurm writes before the run starts."""
    (here / "run").mkdir()
    (here / "run" / "slurm-1.out").write_text("started")
    for resume in ("auto", "restart"):
        assert main(["fit", "run.yaml", "--resume", resume]) == 0
        assert (here / "run" / "slurm-1.out").read_text() == "started" and not (here / "run" / LOCK).exists()


@pytest.mark.long
@pytest.mark.untrained("*")
def test_a_finished_run_without_checkpoints_is_trained_again_only_if_asked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "run.yaml"]) == 0
    shutil.rmtree("run/checkpoints")
    model = files(here / "run")
    assert main(["fit", "run.yaml", "--seed", "5"]) == 2
    assert "has the model of a finished run, but no checkpoint to resume from: give --resume restart" in capsys.readouterr().err
    assert files(here / "run") == model
    assert main(["fit", "run.yaml", "--seed", "5", "--resume", "restart"]) == 0
    shutil.rmtree("run/checkpoints")
    shutil.rmtree("run/model")  # as a run that was killed before its first checkpoint
    assert main(["fit", "run.yaml", "--seed", "5"]) == 0


def test_two_runs_do_not_write_into_one_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(here / "run"):
        assert main(["fit", "run.yaml"]) == 2
    assert "run is in use: process" in capsys.readouterr().err and files(here / "run") == {}
    with pytest.raises(UserError), locked(here / "run"):
        raise UserError("a run that fails")
    assert files(here / "run") == {}
