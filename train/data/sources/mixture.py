"""Maps the number n of a draw to its row and its tasks, as pure functions of (seed, n).

Sources are mixed in exact proportion: over any sequence of blocks of draws each source has its share, up to one row per source.
The shares may change with n, and a source may end after a number of rows. A finite source is drawn in epochs, each a full
permutation of its rows; an endless one gives row n. Tasks are drawn by weight, which may change with n (a curriculum).

A source's weight is a number, or points (draw, weight) with straight lines between them; it is constant before the first point
and after the last. Draws are dealt in blocks, one after another, each by the weights in its middle: a source takes its share of
what those before it leave, in whole rows, and the rest of a row counts in the next block. What a source with no row left would
take, the others share. To find a draw, the blocks before it are dealt, once.

Where rows of a source are read in windows (`seeding.Windows`), the row also depends on the number of packers P, of which packer
l makes the draws l + P k: each mixes the sources of its own draws, and draw number m of a source there is the source's draw
l + P m. Epochs and limits are as exact as without; shares are, within the draws of each packer. So it is where a source is a
stream (`streams`), of which each packer has rows of its own, one after another.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.tasks import find_task
from omni.utils.configuration import configuration
from train.data.rows.row import Row
from train.data.seeding import WindowDraw, Windows, seeded_rng, shuffled, shuffled_all
from train.data.sources.streams import StreamDraw, StreamSource

if TYPE_CHECKING:
    from train.data.sources import Source


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


def _points(weight: Weight) -> Points:
    return ((0.0, weight),) if isinstance(weight, float | int) else weight


def weight_at(weight: Weight, position: float) -> float:
    """The weight at a draw."""
    points = _points(weight)
    number = bisect_right(points, position, key=lambda point: point[0])
    if number in (0, len(points)):
        return points[min(number, len(points) - 1)][1]
    (a, low), (b, high) = points[number - 1 : number + 1]
    return low + (high - low) * (position - a) / (b - a)


def check_schedule(names: Sequence[str], weights: Sequence[Weight], most: float = math.inf) -> None:
    """Refuse weights that do not make a mixture at every draw (UserError).

    Args:
        names: of the weights, for errors.
        most: largest place of a point.
    """
    for name, weight in zip(names, weights, strict=True):
        points = _points(weight)
        if not points:
            raise UserError(f"{name} is an empty list: give a number, or points such as [[0, 1], [100000, 0.5]]")
        for position, value in points:
            at = "" if points is not weight else f" at {position:g}"
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} is {value:g}{at}; weights are numbers of at least 0")
            if not 0 <= position <= most or not math.isfinite(position):
                limit = "" if math.isinf(most) else f" and at most {most:g}"
                raise UserError(f"{name} has a point at {position:g}; places are numbers of at least 0{limit}")
        for (a, _), (b, _) in itertools.pairwise(points):
            if b <= a:
                raise UserError(f"{name} has a point at {b:g} after one at {a:g}; give the points in increasing order")
    positions = sorted({0.0, *(position for weight in weights for position, _ in _points(weight))})
    for position in positions:
        if not any(weight_at(weight, position) for weight in weights):
            at = "" if len(positions) == 1 else f" at {position:g}"
            raise UserError(f"no weight is above 0{at} among {', '.join(names)}: give at least one source a weight above 0{at}")


@configuration
class Stage:
    """Task weights that hold for draws below `until`."""

    until: int
    tasks: dict[str, float]


@dataclass(frozen=True)
class TaskMixture:
    """Weights of the tasks that a source is used for.

    Attributes:
        tasks: weights at the end, after the last stage.
        stages: weights before that, in order of `until` (draws over all sources and processes).
    """

    tasks: dict[str, float] = field(default_factory=lambda: {"A1A2": 1.0})
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        for weights in (self.tasks, *(stage.tasks for stage in self.stages)):
            for name in weights:
                find_task(name)
            check_weights("tasks", weights)
        ends = [stage.until for stage in self.stages]
        if ends != sorted(set(ends)) or (ends and ends[0] < 1):
            raise UserError(f"stages end at draws {ends}; give them in increasing order, from 1 upwards")

    def weights(self, draw: int) -> Mapping[str, float]:
        """The weights at that draw."""
        return next((stage.tasks for stage in self.stages if draw < stage.until), self.tasks)

    def task(self, draw: int, turn: int, seed: int) -> str:
        """Draw the task of a turn of that draw."""
        weights = self.weights(draw)
        return seeded_rng(seed, "task", draw, turn).choices(list(weights), list(weights.values()))[0]


def check_weights(noun: str, weights: Mapping[str, float]) -> None:
    """Refuse weights that do not make a mixture (UserError)."""
    bad = [name for name, weight in weights.items() if not (math.isfinite(weight) and weight >= 0)]
    if bad:
        raise UserError(f"{noun}: the weight of {bad[0]!r} is {weights[bad[0]]}; weights are numbers of at least 0")
    if not weights or sum(weights.values()) <= 0:
        raise UserError(f"{noun}: no weight is above 0; name at least one with its weight")


@dataclass(frozen=True)
class Draw:
    """A draw: number `number`, which is row `index` of source `source`. `source_draw`: the window that the row is read with, or
    the row's place in a stream; None where rows are read one by one."""

    number: int
    source: int
    index: int
    source_draw: WindowDraw | StreamDraw | None = None


class Mixture:
    """Mixes sources by weights; see the module.

    Args:
        weights: of the sources; places of points are numbers of draws.
        limits: most rows that each source gives, however often it is read to its end; None for any number.
        windows: by the number of a source, the order of its rows where they are read in pieces.

    Attributes:
        streams: the sources that are streams, by their numbers.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Weight],
        seed: int = 0,
        limits: Sequence[int | None] | None = None,
        windows: Mapping[int, Windows] | None = None,
    ) -> None:
        check_schedule([f"the weight of '{i} ({source.name})'" for i, source in enumerate(sources)], weights)
        self.sources = list(sources)
        self.seed = seed
        self.weights, self.limits = list(weights), [None] * len(sources) if limits is None else list(limits)
        self.windows = dict(windows or {})
        self.streams = {i: source for i, source in enumerate(sources) if isinstance(source, StreamSource)}
        self.by_packer = bool(self.windows or self.streams)
        self._shares: dict[tuple[int, int], Shares] = {}  # by packer and their number
        self._blocks: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = {}  # the last block of each, and its draws

    @property
    def total(self) -> int | None:
        """Number of draws that there are; None where they do not end."""
        return self._shares_of(0, 1).total

    def check(self, number: int, packers: int = 1) -> None:
        """Refuse a draw for which no source has rows left (UsedUp)."""
        packers = packers if self.by_packer else 1
        self._shares_of(number % packers, packers).check(number // packers)

    def draw(self, number: int, packers: int = 1) -> Draw:
        """Source and row of draw `number`, counted from 0 over all processes; UsedUp where no source has rows left. `packers`:
        number of packers, which take draws in turn; it matters where rows are read in pieces or streamed."""
        packers = packers if self.by_packer else 1
        packer, mine = number % packers, number // packers
        source, own = self._own(packer, packers, mine)
        count = packer + packers * own
        if source in self.streams:
            return Draw(number, source, count, StreamDraw(packer, packers, own))
        size = self.sources[source].size
        if size is None:
            return Draw(number, source, number)
        epoch, position = divmod(count, size)
        keys = (self.seed, "epoch", source, epoch)
        if source not in self.windows:
            return Draw(number, source, shuffled(position, size, *keys))
        row, start = self.windows[source].find(position, packers, *keys)
        return Draw(number, source, row, WindowDraw(packer, (epoch, start)))

    def row(self, draw: Draw) -> Row:
        """Read or make the row of a draw; UserError where it is broken."""
        source: Any = self.sources[draw.source]
        row: Row = source.row(draw.index) if draw.source_draw is None else source.row(draw.index, draw.source_draw)
        return row

    def _shares_of(self, packer: int, packers: int) -> Shares:
        """Shares of the draws of one packer, in which each source's row number m is row packer + packers * m."""
        if (packer, packers) not in self._shares:
            weights = [
                weight if isinstance(weight, float | int) else tuple((position / packers, value) for position, value in weight)
                for weight in self.weights
            ]
            limits = [None if limit is None else max(0, -(-(limit - packer) // packers)) for limit in self.limits]
            self._shares[packer, packers] = Shares(weights, limits, packers)
        return self._shares[packer, packers]

    def _own(self, packer: int, packers: int, mine: int) -> tuple[int, int]:
        """Source of a packer's draw `mine`, and its number among the source's own there; these ascend within a block."""
        if len(self.sources) == 1 and self.limits[0] is None:
            return 0, mine
        shares = self._shares_of(packer, packers)
        shares.check(mine)
        block, position = divmod(mine, shares.block)
        known, draws = self._blocks.get((packer, packers), (-1, []))
        if known != block:
            dealt = [range(*of) for of in shares.dealt(block)]
            sources = [source for source, numbers in enumerate(dealt) for _ in numbers]
            order = shuffled_all(len(sources), self.seed, "order", packer, block).tolist()
            ascending = [iter(numbers) for numbers in dealt]
            draws = [(source, next(ascending[source])) for source in (sources[i] for i in order)]
            self._blocks[packer, packers] = block, draws
        return draws[position]
