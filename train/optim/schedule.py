"""The budget of a run and the learning rate over it, as pure functions of the step and of the time used."""

from __future__ import annotations

import math

from omni.errors import UserError
from train.config.sections import BudgetConfig, ScheduleConfig
from train.console.progress import OPEN


def used(budget: BudgetConfig, step: int, seconds: float, reached: bool = False) -> float:
    """Share of the budget, 0 to 1, that `step` steps in `seconds` have used; 1 where `budget.until` is reached."""
    by_steps = step / budget.steps if budget.steps is not None else 0.0
    by_time = seconds / (60 * budget.minutes) if budget.minutes is not None else 0.0
    expected = min(OPEN, step / budget.expected) if budget.expected is not None else 0.0
    return 1.0 if reached else min(1.0, max(by_steps, by_time, expected))


def learning_rate(schedule: ScheduleConfig, budget: BudgetConfig, step: int, seconds: float) -> float:
    """Factor of the learning rate for the optimizer step with index `step` (from 0).

    The warm-up rises linearly to 1 over its steps; the schedule then runs over the rest of a budget in steps, or over the
    whole of a budget in minutes (as the duration of the warm-up is not known in advance). WSD: Hu et al. 2024 (MiniCPM).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    start = min(1.0, schedule.warmup_steps / budget.steps) if budget.steps is not None else 0.0
    left = max(1e-9, 1.0 - start)
    x = min(1.0, max(0.0, used(budget, step, seconds) - start) / left)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "linear":
        shape = 1.0 - x
    elif schedule.name == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * x))
    else:
        shape = min(1.0, (1.0 - x) / schedule.decay)
    return schedule.final + (1.0 - schedule.final) * shape


def check_larger(old: BudgetConfig, new: BudgetConfig) -> None:
    """Refuse a budget that is smaller in any way than the one that a run was started with (UserError)."""
    for key in ("steps", "minutes"):
        before, now = getattr(old, key), getattr(new, key)
        if now is not None and (before is None or now < before):
            limit = "without such a limit" if before is None else f"with {before:g}"
            raise UserError(
                f"budget.{key} is {now:g}, but the run was started {limit}: --resume extend makes a budget larger; give more, "
                "or say --resume force"
            )


def extension(
    schedule: ScheduleConfig, old: BudgetConfig, new: BudgetConfig, step: int, seconds: float, rate: float
) -> str | None:
    """Describe in one line how the learning rate (of that peak) changes where the budget grows after `step` steps; None for
    the same budget."""
    if old == new:
        return None
    parts = [f"{new.steps} steps"] if new.steps is not None else []
    parts += [f"{new.minutes:g} minutes"] if new.minutes is not None else []
    before, now = (rate * learning_rate(schedule, budget, step, seconds) for budget in (old, new))
    change = f"stays {now:.3g}" if before == now else f"goes from {before:.3g} to {now:.3g}"
    return f"schedule {schedule.name} made again for {' or '.join(parts)}; at step {step} the learning rate {change}"


def due(
    step: int, seconds: float, last_step: int, last_seconds: float, every_steps: int | None, every_minutes: float | None
) -> bool:
    """True where an action that repeats every `every_steps` or `every_minutes` is due, given when it last happened."""
    if every_steps is not None and step // every_steps > last_step // every_steps:
        return True
    return every_minutes is not None and seconds - last_seconds >= 60 * every_minutes
