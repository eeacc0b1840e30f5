"""What a run says on the screen: at its start, of its steps, and that nothing of it changes what is logged."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.toys import ALONE, OF_THE_MACHINE, toy_batch, toy_config, toy_fit, toy_parts
from train.config.sections import BudgetConfig, LogConfig
from train.console import progress as console
from train.console.progress import TrainProgress
from train.objective.objective import Losses
from train.trainer import screen
from train.trainer.logs import METRICS, read_table
from train.trainer.metrics import StepMetrics
from train.trainer.parts import StepBatches
from train.trainer.step import TimedStep

LINES = LogConfig(every=5, progress="lines")


@pytest.fixture(autouse=True)
def no_lines_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LINE_SECONDS", 1000.0)


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

    def mean(*each: Losses) -> Any:
        sums, counts = (sum(float(getattr(x, name)[:, 1].sum()) for x in each) for name in ("sums", "counts"))
        return pytest.approx(sums / counts)

    meter, again = (StepMetrics(("A1A2", "T1T2"), ("audio0", "text"), "cpu", ALONE) for _ in "ab")
    for each in losses:
        meter.add(each)
        assert meter.figures(shown=True)["loss/text"] == mean(each)
    again.restore(meter.state())
    again.add(losses[0])
    assert again.figures(shown=True)["loss/text"] == mean(losses[0])
    assert meter.figures()["loss/text"] == mean(*losses)
    meter.add(losses[1])
    assert meter.figures(shown=True)["loss/text"] == mean(losses[1])


class Machine:
    """A clock, and a number of compiled graphs."""

    def __init__(self) -> None:
        self.now, self.graphs = 0.0, 0
        self.said: list[str] = []
        self.take: Any = TimedStep(self.work, lambda progress: (), self.said.append, lambda: self.now, lambda: self.graphs)

    def work(self, step: StepBatches, progress: float) -> None:
        self.now += progress

    def step(self, seconds: float, compiled: int = 0, waited: float = 0.0, held_up: float = 0.0) -> str | None:
        """A step of `seconds` beside the others; what is said of it."""
        self.take.on_step_begin(7)
        self.graphs += compiled
        self.now += waited + held_up
        self.take(StepBatches([], torch.zeros(1), 0, 0, 0, 0, waited=waited, held_up=held_up), seconds)
        self.now += 30.0  # what comes between two steps
        self.take.on_step(7, {})
        return self.said.pop() if self.said else None


@pytest.fixture
def machine() -> Machine:
    """After ten steps of half a second."""
    machine = Machine()
    assert [machine.step(0.4, waited=0.1) for _ in range(10)] == [None] * 10
    return machine


def test_an_outlier_names_its_largest_part(machine: Machine) -> None:
    assert machine.step(0.4, waited=2.6, held_up=0.5) == "step 7 took 3.5 s, 0.5 s are usual: waiting for data took 2.6 s"
    line = machine.step(0.5, held_up=9.0, waited=0.1)
    assert line == "step 7 took 9.6 s, 0.5 s are usual: waiting for another process took 9.0 s"


def test_a_new_graph_is_the_cause_of_what_nothing_else_explains(machine: Machine) -> None:
    assert machine.step(20.0, compiled=2) == "step 7 took 20.0 s, 0.5 s are usual: compiling took 20.0 s"
    assert "nothing that is measured explains it" in str(machine.step(20.0))
    assert "waiting for data took 20.0 s" in str(machine.step(0.5, compiled=1, waited=20.0))
