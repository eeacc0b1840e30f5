"""Shares the draws of a mixture out to sources whose weights follow a schedule, or whose rows are limited.

A weight is a number, or points (draw, weight) with straight lines between them; it is constant before the first point and after
the last. Draws are dealt in blocks, one after another, each by the weights in its middle: a source takes its share of what
those before it leave, in whole rows, and the rest of a row counts in the next block. What a source with no row left would take,
the others share. To find a draw, the blocks before it are dealt, once.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from omni.errors import UserError

BLOCK, LEAST = 1024, 64
"""Draws of a block, within which the order of the sources is shuffled; and of one under a schedule, or of many packers."""

Points = tuple[tuple[float, float], ...]
"""Points (place, weight) of a weight that changes, in increasing order of the places."""
Weight = float | Points


class UsedUp(UserError):
    """All sources have given all of their rows."""


class Shares:
    """The draws of each source.

    Args:
        weights: of the sources.
        limits: most rows that each source gives; None for any number.
        packers: number of packers that draw each for itself, of which these are the draws of one.
    """

    def __init__(self, weights: Sequence[Weight], limits: Sequence[int | None], packers: int = 1) -> None:
        self.weights = list(weights)
        self.block = LEAST if any(isinstance(weight, tuple) for weight in weights) else max(LEAST, BLOCK // packers)
        self._limits = [math.inf if limit is None else limit for limit in limits]
        self._counts = array("q", [0] * len(weights))  # rows that each source has given, before each block and after the last
        self._carried = [0.0] * len(weights)
        self._end: int | None = None

    @property
    def total(self) -> int | None:
        """Number of draws that there are; None where they do not end."""
        last = max((weight[-1][0] for weight in self.weights if isinstance(weight, tuple)), default=0.0)
        going_on = any(
            weight_at(w, math.inf) > 0 and limit == math.inf for w, limit in zip(self.weights, self._limits, strict=True)
        )
        while self._end is None and (not going_on or self.blocks * self.block < last):
            self._deal()
        return self._end

    @property
    def blocks(self) -> int:
        """Number of blocks that have been dealt."""
        return len(self._counts) // len(self.weights) - 1

    def check(self, draw: int) -> None:
        """Refuse a draw for which no source has rows left (UsedUp)."""
        while self._end is None and self.blocks * self.block <= draw:
            self._deal()
        if self._end is not None and draw >= self._end:
            raise UsedUp(
                f"the sources give no more than {self._end:,} draws: raise max_epochs or max_rows of data.sources, or give a "
                "source without them a weight above 0 to the end"
            )

    def dealt(self, number: int) -> list[tuple[int, int]]:
        """For each source, how many draws it had before a block that has been checked, and after it."""
        size = len(self.weights)
        before, after = (self._counts[size * i : size * (i + 1)] for i in (number, number + 1))
        return list(zip(before, after, strict=True))

    def _deal(self) -> None:
        """Deal the next block."""
        counts, start, rest = list(self._counts[-len(self.weights) :]), self.blocks * self.block, self.block
        now = [weight_at(weight, start + self.block / 2) for weight in self.weights]
        while rest and any(left := [w * (n < most) for w, n, most in zip(now, counts, self._limits, strict=True)]):
            last = max(source for source, weight in enumerate(left) if weight)
            for source, weight in enumerate(left):
                due = self._carried[source] + rest * weight / sum(left[source:]) if weight else 0.0
                rows = min(rest if source == last else math.floor(due), self._limits[source] - counts[source])
                self._carried[source] = max(0.0, due - rows) % 1
                counts[source] += int(rows)
                rest -= int(rows)
        self._counts.extend(counts)
        if rest:
            self._end = start + self.block - rest


def weight_at(weight: Weight, place: float) -> float:
    """The weight at a draw."""
    if isinstance(weight, float | int):
        return weight
    number = bisect_right(weight, place, key=lambda point: point[0])
    if number in (0, len(weight)):
        return weight[min(number, len(weight) - 1)][1]
    (a, low), (b, high) = weight[number - 1 : number + 1]
    return low + (high - low) * (place - a) / (b - a)


def _at(weights: Sequence[Weight], place: float) -> list[float]:
    return [weight_at(weight, place) for weight in weights]


def check_schedule(names: Sequence[str], weights: Sequence[Weight], most: float = math.inf) -> None:
    """Refuse weights that do not make a mixture at every draw (UserError).

    Args:
        names: of the weights, for errors.
        most: largest place of a point.
    """
    for name, weight in zip(names, weights, strict=True):
        points = ((0.0, weight),) if isinstance(weight, float | int) else weight
        if not points:
            raise UserError(f"{name} is an empty list: give a number, or points such as [[0, 1], [100000, 0.5]]")
        for place, value in points:
            at = "" if points is not weight else f" at {place:g}"
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} is {value:g}{at}; weights are numbers of at least 0")
            if not 0 <= place <= most or not math.isfinite(place):
                limit = "" if math.isinf(most) else f" and at most {most:g}"
                raise UserError(f"{name} has a point at {place:g}; places are numbers of at least 0{limit}")
        for (a, _), (b, _) in itertools.pairwise(points):
            if b <= a:
                raise UserError(f"{name} has a point at {b:g} after one at {a:g}; give the points in increasing order")
    places = sorted({0.0, *(place for weight in weights if not isinstance(weight, float | int) for place, _ in weight)})
    for place in places:
        if not any(_at(weights, place)):
            at = "" if len(places) == 1 else f" at {place:g}"
            raise UserError(f"no weight is above 0{at} among {', '.join(names)}: give at least one source a weight above 0{at}")
