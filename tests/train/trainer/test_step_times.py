"""Which steps are told of as outliers, and with which cause; on a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from train.trainer.step import StepBatches, TimedStep


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
