"""Measures what bf16 gains: the same steps of a recipe in `32-true` and in `bf16-mixed`, one right after the other."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from omni.profiling import seconds_of
from train.bench.guard import PHASES
from train.bench.runs import run_with_batches
from train.bench.timing import TimingRow
from train.config.parse import read_fit_config
from train.config.sections import BudgetConfig


def precision(file: str, device: torch.device, steps: int = 4, rounds: int = 8) -> list[TimingRow]:
    """Times a recipe's steps in `bf16-mixed` over those in `32-true`, with batches made beforehand.

    Two runs of one configuration take each batch in turn, in every other round in reverse order; a ratio is that of one such
    pair. Muon's iteration is in the run's precision.

    Args:
        rounds: passes through the steps, after one that is not counted.
    """
    config = replace(read_fit_config([file])[0], budget=BudgetConfig(steps=2), guard=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        loops = {}
        for name in ("32-true", "bf16-mixed"):
            own = replace(config, fabric=replace(config.fabric, precision=name))
            loops[name], given = run_with_batches(own, device, Path(folder) / name, steps)
        for phase, share in PHASES.items():
            if not share and not config.objective.align_first:
                continue
            spent: dict[str, list[float]] = {name: [] for name in loops}
            for turn in range(rounds + 1):
                for step in given:
                    for name, loop in loops.items() if turn % 2 else reversed(loops.items()):
                        seconds = seconds_of(partial(loop.step, step, share), device)
                        if turn:
                            spent[name].append(seconds)
            whole, half = spent.values()
            rows.append(TimingRow(f"step in fp32, {phase}", statistics.median(whole) * 1e3, "ms"))
            rows.append(TimingRow(f"step in bf16, {phase}", statistics.median(half) * 1e3, "ms"))
            ratio = statistics.median(a / b for a, b in zip(half, whole, strict=True))
            rows.append(TimingRow(f"bf16 / fp32, {phase}", ratio, "x"))
        for loop in loops.values():
            if loop.logs is not None:
                loop.logs.close()
    return rows
