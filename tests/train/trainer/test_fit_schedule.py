"""The learning rate over the budget, against closed forms, and when things are due."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.toys import toy_config, toy_fit, toy_parts
from train.config.sections import BudgetConfig, CheckpointConfig, ScheduleConfig, ValidationConfig
from train.console.progress import OPEN
from train.optim.optimizer import due, learning_rate, used

STEPS = BudgetConfig(steps=100)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_shapes_over_steps(name: str, final: float) -> None:
    schedule = ScheduleConfig(name=name, warmup_steps=10, final=final, decay=0.5)
    rates = [learning_rate(schedule, STEPS, step, 0.0) for step in range(100)]
    assert rates[:10] == [(i + 1) / 10 for i in range(10)]
    for step in range(10, 100):
        x = (step - 10) / 90
        shape = {"cosine": (1 + math.cos(math.pi * x)) / 2, "linear": 1 - x, "wsd": min(1, 2 - 2 * x), "constant": 1}[name]
        wanted = 1.0 if name == "constant" else final + (1 - final) * shape
        assert rates[step] == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_budget_in_minutes_follows_the_clock(name: str) -> None:
    schedule, budget = ScheduleConfig(name=name, warmup_steps=4), BudgetConfig(minutes=10)
    assert learning_rate(schedule, budget, 1, 0.0) == 0.5
    assert learning_rate(schedule, budget, 50, 0.0) == 1.0
    assert learning_rate(schedule, budget, 50, 300.0) == learning_rate(schedule, budget, 9000, 300.0)
    assert learning_rate(schedule, budget, 50, 599.9) < 0.01
    assert learning_rate(schedule, budget, 50, 700.0) == 0.0


def test_the_first_budget_that_is_spent_counts() -> None:
    both = BudgetConfig(steps=100, minutes=1)
    assert used(both, 50, 15.0) == 0.5
    assert used(both, 10, 45.0) == 0.75
    assert used(both, 10, 90.0) == 1.0


def test_an_open_ended_budget_ends_by_its_goal_or_by_its_minutes_alone() -> None:
    """Its steps are those that the schedule runs over; where the minutes run faster, it follows them to its end."""
    budget = BudgetConfig(expected=100, minutes=10, until=0.95)
    assert used(budget, 50, 60.0) == 0.5 and used(budget, 10, 450.0) == 0.75
    assert used(budget, 100, 60.0) == used(budget, 400, 599.0 * OPEN) == OPEN
    assert used(budget, 400, 600.0) == used(budget, 3, 1.0, reached=True) == 1.0
    assert used(replace(budget, steps=20), 20, 1.0) == 1.0
    schedule = ScheduleConfig(name="wsd", decay=0.5, final=0.1)
    assert learning_rate(schedule, budget, 50, 300.0) == 1.0
    assert learning_rate(schedule, budget, 400, 60.0) == pytest.approx(0.1, rel=0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "metric, until, value, ends", [("exact_match", 0.95, 0.95, True), ("exact_match", 0.95, 0.94, False),
                                   ("wer", 0.05, 0.04, True),
                                   ("wer", 0.05, 0.06, False), ("wer", None, 0.0, False)],
)  # fmt: skip
def test_a_validation_that_is_good_enough_ends_the_run(
    metric: str, until: float | None, value: float, ends: bool, tmp_path: Path
) -> None:
    """It ends by then, before or after its expected steps, and is finished for the next start too."""
    budget = BudgetConfig(steps=None if until else 8, expected=4, minutes=10, until=until)
    plan = ValidationConfig(every_steps=6)
    config = toy_config(tmp_path, budget=budget, validation=plan, checkpoint=CheckpointConfig(metric=metric, keep_best=0))
    asked: list[int] = []

    def validate(weights: object, step: int) -> dict[str, float]:
        asked.append(step)
        return {metric: value if step < 12 else float(metric != "wer")}  # perfect at last

    for _ in range(2):
        outcome, _ = toy_fit(config, toy_parts(validate=validate))
        assert (outcome.step, asked) == ((6, [6]) if ends else (12, [6, 12]) if until else (8, [6, 8]))


def test_due() -> None:
    assert [s for s in range(1, 13) if due(s, 0.0, s - 1, 0.0, 4, None)] == [4, 8, 12]
    assert due(13, 0.0, 7, 0.0, 4, None)  # a multiple was passed since
    assert due(1, 61.0, 0, 0.0, None, 1.0) and not due(1, 59.0, 0, 0.0, None, 1.0)
    assert not due(5, 1e9, 0, 0.0, None, None)
