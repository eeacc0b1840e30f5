"""Measures the cost of the graph guard: the same steps of a recipe, plain, watched and traced, in turn."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from omni.errors import UserError
from omni.profiling import seconds_of
from train.bench.runs import run_with_batches
from train.bench.timing import TimingRow
from train.config.parse import read_fit_config
from train.config.sections import BudgetConfig
from train.trainer.guard import StepGuard
from train.trainer.step import GuardedStep, Step

PHASES = {"aligning": 0.0, "all of the model": 0.5}
"""Used shares of the budget: at the first, where the recipe has `objective.align_first`, the decoder does not run."""


def guard(file: str, device: torch.device, steps: int = 4, rounds: int = 8, traced: int = 1) -> list[TimingRow]:
    """Times a recipe's steps under the guard, over plain ones, with batches made beforehand.

    Each batch is taken plain and watched (under the guard), one right after the other, in every other round in reverse order; a
    ratio is that of one such pair. A traced step is a watched one and its repetition under the trace.

    Args:
        rounds: passes through the steps, after one that is not counted; `traced`: those of them in which they are traced too.

    Raises:
        UserError: the guard found something in the recipe's own steps, so that they are no measure.
    """
    config = replace(read_fit_config([file])[0], budget=BudgetConfig(steps=2), guard=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        loop, given = run_with_batches(config, device, Path(folder), steps)
        guarded = StepGuard(loop.objective, loop.optimizer, loop.parts.idle)
        variants: dict[str, Step] = {
            "plain": loop.step,
            "watched": GuardedStep(loop.step, guarded),
            "traced": GuardedStep(loop.step, guarded, trace=True),
        }
        for phase, share in PHASES.items():
            if not share and not config.objective.align_first:
                continue
            plain, ratios = [], {"watched": list[float](), "traced": list[float]()}
            for turn in range(rounds + 1):
                pair = ["plain", "watched"] if turn % 2 else ["watched", "plain"]
                for step in given:
                    spent = {
                        name: seconds_of(partial(variants[name], step, share), device)
                        for name in pair + ["traced"] * (turn <= traced)
                    }
                    if turn:
                        plain.append(spent.pop("plain"))
                        for name, seconds in spent.items():
                            ratios[name].append(seconds / plain[-1])
            rows.append(TimingRow(f"plain step, {phase}", statistics.median(plain) * 1e3, "ms"))
            rows += [TimingRow(f"{name} / plain step, {phase}", statistics.median(r), "x") for name, r in ratios.items() if r]
        if loop.logs is not None:
            loop.logs.close()
    if guarded.guard.findings:
        raise UserError(f"the guard found something in the steps of {file}:\n{guarded.guard.report()}")
    return rows
