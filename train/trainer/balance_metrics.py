"""Figures of a balance between two rows of its table."""

from __future__ import annotations

from collections.abc import Mapping


class Tally:
    """Means of weights, norms and cosines, and how often each task was absent or its gradient zero, since the last row.

    Attributes:
        values: by figure: sum, and number of steps that had it; plain data, for a checkpoint.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Take in a step's `Report.figures`."""
        for name, value in figures.items():
            total = self.values.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += 1

    def figures(self) -> dict[str, float]:
        """The row, beginning anew."""
        found = {
            name: total if name.startswith(("absent/", "zero/")) else total / n for name, (total, n) in self.values.items()
        }
        self.values = {}
        return found
