"""Plans how the draws of a mixture are shared by sources whose weights follow a schedule, or whose rows are limited.

A weight is a number, or points (draw, weight) with straight lines between them; it is constant before the first point and after
the last. The draws are divided into spans with constant shares: each line is taken in steps of about `STEP` draws, or at most
`STEPS` steps, with the weights in the middle of each. A span also ends at the very draw at which a source has given its last
row; the others then share its weight.

Source k of a span takes the share `takes[k]` of the draws that the sources before it leave. Of the first r of these it has

    floor(parts[k] + r * takes[k])

where `parts[k]` is the share of a row that the spans before have left over, so that rounding does not add up over them. Any
draw is thus found without those before it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from omni.errors import UserError

BLOCK = 1024
"""Number of draws in a block, within which the order of the sources is shuffled."""
STEP, STEPS = 64, 1024
"""Draws of a step of a straight line of weights, and most steps of a line."""

Points = tuple[tuple[float, float], ...]
"""Points (place, weight) of a weight that changes, in increasing order of the places."""
Weight = float | Points


class UsedUp(UserError):
    """All sources have given all of their rows."""


@dataclass(frozen=True)
class DrawSpan:
    """Draws with constant shares.

    Attributes:
        start: the first draw.
        counts: rows that each source has given before.
        takes, parts: see the module; sources after the last that takes any are left out.
    """

    start: int
    counts: tuple[int, ...]
    takes: tuple[float, ...]
    parts: tuple[float, ...]

    def find(self, draw: int) -> tuple[int, int]:
        """Source of a draw of this span, and how many draws it had before."""
        rest = draw - self.start
        for source, (take, part) in enumerate(zip(self.takes, self.parts, strict=True)):
            before = math.floor(part + rest * take)
            if math.floor(part + (rest + 1) * take) > before:
                return source, self.counts[source] + before
            rest -= before
        raise AssertionError("the last source takes what the others leave")

    def after(self, draws: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rows of each source after so many draws of this span, and the shares of a row that are left over."""
        counts, parts, rest = list(self.counts), [0.0] * len(self.counts), draws
        for source, (take, part) in enumerate(zip(self.takes, self.parts, strict=True)):
            given = math.floor(part + rest * take)
            counts[source] += given
            parts[source] = part + rest * take - given
            rest -= given
        return tuple(counts), tuple(parts)


class Spans:
    """All spans of a mixture.

    Args:
        weights: of the sources.
        limits: most rows that each source gives; None for any number.

    Attributes:
        total: number of draws that there are; None where they do not end.
    """

    def __init__(self, weights: Sequence[Weight], limits: Sequence[int | None]) -> None:
        self.total: int | None = None
        self.spans: list[DrawSpan] = []
        self._limits = list(limits)
        self._plan(weights)
        self._starts = [span.start for span in self.spans]

    def check(self, draw: int) -> None:
        """Refuse a draw for which no source has rows left (UsedUp)."""
        if self.total is not None and draw >= self.total:
            raise UsedUp(
                f"the sources give no more than {self.total:,} draws: raise max_epochs or max_rows of data.sources, or give a "
                "source without them a weight above 0 to the end"
            )

    def block(self, draw: int) -> tuple[int, int, int]:
        """Number of the block of a draw, its first draw, and how many it has."""
        block = draw // BLOCK
        start = block * BLOCK
        return block, start, BLOCK if self.total is None else min(BLOCK, self.total - start)

    def find(self, draw: int) -> tuple[int, int]:
        """Source of a draw, and how many draws it had before."""
        return self.spans[bisect_right(self._starts, draw) - 1].find(draw)

    def _plan(self, weights: Sequence[Weight]) -> None:
        start, counts, parts = 0, (0,) * len(weights), (0.0,) * len(weights)
        for end, now in steps_of(weights):
            while end is None or start < end:
                left = [
                    weight if limit is None or count < limit else 0.0
                    for weight, limit, count in zip(now, self._limits, counts, strict=True)
                ]
                if not any(left):
                    self.total = start
                    return
                takes = takes_of(left)
                kept = [*parts[: len(takes) - 1], 0.0]  # the last one takes whole rows
                kept = [part if take else 0.0 for part, take in zip(kept, takes, strict=True)]
                span = DrawSpan(start, counts, takes, tuple(kept))
                self.spans.append(span)
                draws = self._until_limit(span, None if end is None else end - start)
                if draws is None:
                    return
                start += draws
                counts, parts = span.after(draws)

    def _until_limit(self, span: DrawSpan, most: int | None) -> int | None:
        """Number of draws until a source of the span has given its last row, or `most`; None where it has no end."""
        limited = [
            (source, limit)
            for source, (limit, take) in enumerate(zip(self._limits, span.takes, strict=False))
            if limit is not None and take > 0
        ]

        def full(draws: int) -> bool:
            counts, _ = span.after(draws)
            return any(counts[source] >= limit for source, limit in limited)

        if most is None and not limited:
            return None
        if most is None:
            most = 1
            while not full(most):
                most *= 2
        return most if not full(most) else bisect_right(range(most), False, key=full)


def takes_of(weights: Sequence[float]) -> tuple[float, ...]:
    """Share of each source in the draws that the sources before it leave; the last with a weight takes all."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    last = max(i for i, share in enumerate(shares) if share > 0)
    return tuple(share / sum(shares[i:]) if i < last else 1.0 for i, share in enumerate(shares[: last + 1]))


def steps_of(weights: Sequence[Weight]) -> list[tuple[int | None, list[float]]]:
    """Steps of constant weights, each with its end; the last one has none."""
    places = sorted({round(place) for weight in weights if not isinstance(weight, float | int) for place, _ in weight})
    found: list[tuple[int | None, list[float]]] = [(place, _at(weights, place)) for place in places[:1] if place > 0]
    for first, end in itertools.pairwise(places):
        moving = _at(weights, first) != _at(weights, end)
        count = min(STEPS, -(-(end - first) // STEP)) if moving else 1
        bounds = [first + (end - first) * i // count for i in range(count + 1)]
        found += [(b, _at(weights, (a + b) / 2)) for a, b in itertools.pairwise(bounds)]
    return [*found, (None, _at(weights, places[-1] if places else 0))]


def weight_at(weight: Weight, place: float) -> float:
    """The weight at a draw."""
    if isinstance(weight, float | int):
        return weight
    number = bisect_right(weight, place, key=lambda point: point[0])
    if number in (0, len(weight)):
        return weight[min(number, len(weight) - 1)][1]
    (a, low), (b, high) = weight[number - 1 : number + 1]
    return low + (high - low) * (place - a) / (b - a)


def least_shares(weights: Sequence[Weight]) -> list[float]:
    """The lowest share that each source has at any draw: between points, shares rise or fall throughout."""
    places = {0.0, *(place for weight in weights if not isinstance(weight, float | int) for place, _ in weight)}
    shares = [[weight / sum(now) for weight in now] for now in (_at(weights, place) for place in places)]
    return [min(of) for of in zip(*shares, strict=True)]


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
