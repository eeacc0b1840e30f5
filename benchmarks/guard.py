"""Measures the cost of the graph guard: the same steps of a recipe, plain, watched and traced, in turn."""

from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks.runs import run_with_batches, two_steps
from benchmarks.timing import TimingRow
from omni.errors import UserError
from omni.profiling import in_turns, ratio
from train.trainer.guard import StepGuard
from train.trainer.step import GuardedStep


def guard(file: str, device: torch.device, steps: int = 4, rounds: int = 8, traced: int = 1) -> list[TimingRow]:
    """Times a recipe's steps under the guard, over plain ones, with batches made beforehand.

    Each batch is taken plain and watched (under the guard), one right after the other, in every other round in reverse order; a
    ratio is that of one such pair. A traced step is a watched one and its repetition under the trace.

    Args:
        rounds: passes through the steps, after one that is not counted; `traced`: those in which they are traced.

    Raises:
        UserError: the guard found something in the recipe's own steps, so that they are no measure.
    """
    config, phases = two_steps(file)
    rows = []
    with run_with_batches(config, device, steps) as (loop, given):
        guarded = StepGuard(loop.objective, loop.optimizer, loop.parts.idle)
        for phase, share in phases.items():
            plain, watched, traces = (
                partial(step, progress=share)
                for step in (loop.step, GuardedStep(loop.step, guarded), GuardedStep(loop.step, guarded, trace=True))
            )
            spent = in_turns({"plain": plain, "watched": watched}, given, device, rounds)
            trace = in_turns({"plain": plain, "traced": traces}, given, device, traced)
            rows += [
                TimingRow(f"plain step, {phase}", statistics.median(spent["plain"]) * 1e3, "ms"),
                TimingRow(f"watched / plain step, {phase}", ratio(spent["watched"], spent["plain"]), "x"),
                TimingRow(f"traced / plain step, {phase}", ratio(trace["traced"], trace["plain"]), "x"),
            ]
    if guarded.guard.findings:
        raise UserError(f"the guard found something in the steps of {file}:\n{guarded.guard.report()}")
    return rows
