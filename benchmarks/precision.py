"""Measures what bf16 gains: the same steps of a recipe in `32-true` and in `bf16-mixed`, one right after the other."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from benchmarks.runs import run_with_batches, two_steps
from benchmarks.timing import TimingRow
from omni.profiling import in_turns, ratio


def precision(file: str, device: torch.device, steps: int = 4, rounds: int = 8) -> list[TimingRow]:
    """Times a recipe's steps in `bf16-mixed` over those in `32-true`, with batches made beforehand.

    Two runs of one configuration take each batch in turn, in every other round in reverse order; a ratio is that of one such
    pair. Muon's iteration is in the run's precision.

    Args:
        rounds: passes through the steps, after one that is not counted.
    """
    config, phases = two_steps(file)
    rows = []
    with ExitStack() as runs:
        loops = {}
        for name in ("32-true", "bf16-mixed"):
            own = replace(config, fabric=replace(config.fabric, precision=name))
            loops[name], given = runs.enter_context(run_with_batches(own, device, steps))
        for phase, share in phases.items():
            taken = {name: partial(loop.step, progress=share) for name, loop in loops.items()}
            whole, half = in_turns(taken, given, device, rounds).values()
            rows += [
                TimingRow(f"step in fp32, {phase}", statistics.median(whole) * 1e3, "ms"),
                TimingRow(f"step in bf16, {phase}", statistics.median(half) * 1e3, "ms"),
                TimingRow(f"bf16 / fp32, {phase}", ratio(half, whole), "x"),
            ]
    return rows
