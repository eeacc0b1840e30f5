"""What the graph guard costs: the same steps of a recipe, plain, watched and traced, one after another."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from omni.errors import UserError
from omni.profiling import seconds_of
from train.bench.runs import at_hand
from train.bench.timing import TimingRow
from train.config.parse import read_fit_config
from train.config.sections import BudgetConfig
from train.trainer.guard import StepGuard

PHASES = {"aligning": 0, "all of the model": 1}
"""Steps done of a budget of two: at the first, where the recipe has `objective.align_first`, the decoder does not run."""


def guard(file: str, device: torch.device, steps: int = 4, rounds: int = 8, traced: int = 1) -> list[TimingRow]:
    """A recipe's steps under the guard, over plain ones, with batches at hand.

    Each batch is taken plain and watched, one right after the other, in every other round the other way round; a ratio is
    that of one such pair. A traced step is a watched one and its repetition under the trace.

    Args:
        rounds: through the steps, after one that is not counted; `traced`: those of them in which they are traced too.

    Raises:
        UserError: the guard found something in the recipe's own steps, so that they are no measure.
    """
    config = replace(read_fit_config([file])[0], budget=BudgetConfig(steps=2), guard=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        loop, given = at_hand(config, device, Path(folder), steps)
        watch = StepGuard(loop.objective, loop.optimizer, loop.parts.idle)
        ways = {
            "plain": loop.train,
            "watched": lambda step: watch.step(1, step, loop._used(), loop.train),
            "traced": lambda step: watch.step(1, step, loop._used(), loop.train, trace=True),
        }
        for phase, done in PHASES.items():
            if not done and not config.objective.align_first:
                continue
            loop.position.step = done
            plain, ratios = [], {"watched": list[float](), "traced": list[float]()}
            for turn in range(rounds + 1):
                pair = ["plain", "watched"] if turn % 2 else ["watched", "plain"]
                for step in given:
                    spent = {
                        name: seconds_of(lambda name=name, step=step: ways[name](step), device)  # type: ignore[misc]
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
    if watch.guard.findings:
        raise UserError(f"the guard found something in the steps of {file}:\n{watch.guard.report()}")
    return rows
