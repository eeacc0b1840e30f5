"""Timing of work on a device, and the rows of a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class TimingRow:
    """One line of a table: what was measured, the figure, its unit."""

    name: str
    value: float
    unit: str = ""


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """How long it takes, with all that it gives the device to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median seconds of `work` after one warm-up."""
    return statistics.median([seconds_of(work, device) for _ in range(repeat + 1)][1:])
