"""What a run says on the screen: at its start, of its steps, and that nothing of it changes what is logged."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.train.eval.toys import save_model
from tests.train.toys import ALONE, OF_THE_MACHINE, toy_batch, toy_config, toy_fit, toy_parts
from train.config.sections import BudgetConfig, LogConfig
from train.console import progress as console
from train.console.progress import TrainProgress
from train.trainer import build, screen
from train.trainer.logs import METRICS, read_table
from train.trainer.metrics import StepMetrics
from train.trainer.step import TimedStep

LINES = LogConfig(every=5, progress="lines")


@pytest.fixture(autouse=True)
def no_lines_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LINE_SECONDS", 1000.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What step times are measured by: one number, in seconds."""
    now = [0.0]
    monkeypatch.setattr("train.trainer.step.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(build, "TimedStep", partial(TimedStep, clock=lambda: now[0]))
    return now


def steps_said(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("step ") and " took " not in line]


class Terminal(io.StringIO):
    """A terminal of this size."""

    def __init__(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(console, "columns", lambda stream: columns)

    def isatty(self) -> bool:
        return True


def test_what_is_said_after_a_bar_comes_below_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar stays as it was, without the time that was left."""
    bar = TrainProgress("auto", stream=(terminal := Terminal(100, monkeypatch)))
    bar.row(10, 0.1, 5.0, {"loss": 1.5, "lr": 1e-3})
    before = len(terminal.getvalue())
    bar.close()
    bar.say("stopped")
    bar.close()
    after = terminal.getvalue()[before:]
    assert after.endswith("\nstopped\n") and after.count("step 10") == 1 and "left" not in after


def test_the_first_three_steps_of_every_start_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = toy_config(tmp_path, budget=BudgetConfig(steps=12), log=LINES)
    toy_fit(config)
    assert steps_said(capfd.readouterr().err) == [1, 2, 3, 5, 10, 12]
    toy_fit(replace(config, budget=BudgetConfig(steps=20), resume="force"))
    assert steps_said(capfd.readouterr().err) == [13, 14, 15, 20]


def test_lines_take_nothing_from_the_rows_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LINE_SECONDS", 0.0)
    for name in ("lines", "off"):
        toy_fit(toy_config(tmp_path / name, log=replace(LINES, progress=name)))
    said, silent = (read_table(tmp_path / name / METRICS) for name in ("lines", "off"))
    for row in (*said, *silent):
        for of_the_clock in OF_THE_MACHINE:
            del row[of_the_clock]
    assert said == silent and [row["step"] for row in said] == [5, 8]


def test_a_line_is_of_the_steps_since_the_last_one(tmp_path: Path) -> None:
    """Also after a start that goes on within a row of the log."""
    objective = toy_parts().objective
    losses = [objective(toy_batch(shard, 0), torch.ones(3)) for shard in range(3)]
    meter = StepMetrics(("A1A2", "T1T2"), ("audio0", "text"), "cpu", ALONE)
    for each in losses:
        meter.add(each)
        assert meter.look()["loss/text"] == pytest.approx(float(each.sums[:, 1].sum() / each.counts[:, 1].sum()))
    again = StepMetrics(("A1A2", "T1T2"), ("audio0", "text"), "cpu", ALONE)
    again.restore(meter.state())
    again.add(losses[0])
    assert again.look()["loss/text"] == pytest.approx(float(losses[0].sums[:, 1].sum() / losses[0].counts[:, 1].sum()))
    sums, counts = (sum(float(getattr(x, kind)[:, 1].sum()) for x in losses) for kind in ("sums", "counts"))
    assert meter.figures()["loss/text"] == pytest.approx(sums / counts)
    meter.add(losses[1])
    assert meter.look()["loss/text"] == pytest.approx(float(losses[1].sums[:, 1].sum() / losses[1].counts[:, 1].sum()))


# --- the start of a whole run -----------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    digits = {"arithmetic": 1.0, "rare": 0.0, "answer_rate": 400, "rate": [400, 400]}
    config = {
        "run_folder": str(tmp_path / "run"), "budget": {"steps": 1}, "model": {"init_from": str(tmp_path / "model")},
        "data": {"packing": {"rows": 1, "length": 256, "buffer": 2}, "sources": [{"kind": "spoken-digits", "options": digits}]},
        "fabric": {"accelerator": "cpu", "devices": 1}, "trainable": ["decoder.*"],
        "validation": {"questions": 2, "max_seconds": 0.2},
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
