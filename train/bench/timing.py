"""Times work on a device; rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omni.profiling import seconds_of


@dataclass(frozen=True)
class TimingRow:
    """One line of a table: what was measured, the figure, its unit."""

    name: str
    value: float
    unit: str = ""


def timed(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median seconds of `work` after one warm-up."""
    return statistics.median([seconds_of(work, device) for _ in range(repeat + 1)][1:])
