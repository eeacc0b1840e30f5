"""Rows of a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimingRow:
    """One line of a table: what was measured, the figure, its unit."""

    name: str
    value: float
    unit: str = ""
