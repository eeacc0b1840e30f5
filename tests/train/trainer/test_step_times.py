"""Which steps are told of as outliers, and with which cause; on a clock that the test moves."""

from __future__ import annotations

import pytest

from train.trainer.usage import StepTimes


class Machine:
    """A clock, and a number of compiled graphs."""

    def __init__(self) -> None:
        self.now, self.graphs = 0.0, 0
        self.times = StepTimes(lambda: self.now, lambda: self.graphs)

    def step(self, seconds: float, compiled: int = 0, **parts: float) -> str | None:
        self.times.begin()
        self.graphs += compiled
        for name, part in parts.items():
            self.times.add(name.replace("_", " "), part)
        self.now += seconds + sum(parts.values())
        line = self.times.end(7)
        self.now += 30.0  # what comes between two steps
        return line


@pytest.fixture
def machine() -> Machine:
    """After ten steps of half a second."""
    machine = Machine()
    assert [machine.step(0.4, waiting_for_data=0.1) for _ in range(10)] == [None] * 10
    return machine


def test_an_outlier_names_its_largest_part(machine: Machine) -> None:
    line = machine.step(0.4, waiting_for_data=2.6, waiting_for_another_process=0.5)
    assert line == "step 7 took 3.5 s, 0.5 s are usual: waiting for data took 2.6 s"
    line = machine.step(0.5, waiting_for_another_process=9.0, waiting_for_data=0.1)
    assert line == "step 7 took 9.6 s, 0.5 s are usual: waiting for another process took 9.0 s"


def test_a_new_graph_is_the_cause_of_what_nothing_else_explains(machine: Machine) -> None:
    assert machine.step(20.0, compiled=2) == "step 7 took 20.0 s, 0.5 s are usual: compiling took 20.0 s"
    assert "nothing that is measured explains it" in str(machine.step(20.0))
    assert "waiting for data took 20.0 s" in str(machine.step(0.5, compiled=1, waiting_for_data=20.0))
