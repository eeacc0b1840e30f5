"""Maps the number n of a draw to its row and its tasks, as pure functions of (seed, n).

Sources are mixed in exact proportion: over any sequence of blocks of draws each source has its share, up to one row per source.
The shares may change with n, and a source may end after a number of rows (`train.data.sources.shares`). A finite source is
drawn in epochs, each a full permutation of its rows; an endless one gives row n. Tasks are drawn by weight, and the weights may
change with n (a curriculum).

Where rows of a source are read in pieces (`windows`), the row also depends on the number of packers P, of which packer l
makes the draws l + P k: each mixes the sources of its own draws, and draw number m of a source there is the source's draw
l + P m. Epochs and limits are as exact as without; shares are, within the draws of each packer. So it is where a source is
a stream (`streams`), of which each packer has rows of its own, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni.errors import UserError
from omni.tasks import find_task
from train.data.seeding import seeded_rng, shuffled, shuffled_all
from train.data.sources.shares import Shares, Weight, check_schedule
from train.data.sources.streams import StreamDraw
from train.data.sources.windows import WindowDraw, Windows

if TYPE_CHECKING:
    from train.data.sources.base import Source


@dataclass(frozen=True)
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


def check_weights(what: str, weights: Mapping[str, float]) -> None:
    """Refuse weights that do not make a mixture (UserError)."""
    bad = [name for name, weight in weights.items() if not (math.isfinite(weight) and weight >= 0)]
    if bad:
        raise UserError(f"{what}: the weight of {bad[0]!r} is {weights[bad[0]]}; weights are numbers of at least 0")
    if not weights or sum(weights.values()) <= 0:
        raise UserError(f"{what}: no weight is above 0; name at least one with its weight")


@dataclass(frozen=True)
class Draw:
    """A draw: number `number`, which is row `index` of source `source`.

    Attributes:
        place: the window that the row is read with, or the row's place in a stream; None where rows are read one by one.
    """

    number: int
    source: int
    index: int
    place: WindowDraw | StreamDraw | None = None


class Mixture:
    """Mixes sources by weights; see the module.

    Args:
        weights: of the sources; places of points are numbers of draws.
        limits: most rows that each source gives, however often it is read to its end; None for any number.
        windows: by the number of a source, the order of its rows where they are read in pieces.
        streams: numbers of the sources that are streams.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Weight],
        seed: int = 0,
        limits: Sequence[int | None] | None = None,
        windows: Mapping[int, Windows] | None = None,
        streams: Collection[int] = (),
    ) -> None:
        if len(sources) != len(weights) or not sources:
            raise UserError(f"a mixture of {len(sources)} sources has {len(weights)} weights; give one each, for at least one")
        check_schedule([f"the weight of '{i} ({source.name})'" for i, source in enumerate(sources)], weights)
        self.sources = list(sources)
        self.seed = seed
        self.weights, self.limits = list(weights), [None] * len(sources) if limits is None else list(limits)
        self.windows, self.streams = dict(windows or {}), sorted(streams)
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
        """Source and row of draw `number`, counted from 0 over all processes; UsedUp where no source has rows left.

        Args:
            packers: number of packers, which take draws in turn; it matters where rows are read in pieces or streamed.
        """
        packers = packers if self.by_packer else 1
        packer, mine = number % packers, number // packers
        source, own = self._own(packer, packers, mine)
        count = packer + packers * own
        if source in self.streams:
            return Draw(number, source, count, StreamDraw(packer, packers, own))
        if source not in self.windows:
            return Draw(number, source, self._index(source, number, count))
        windows = self.windows[source]
        epoch, place = divmod(count, windows.rows)
        row, start = windows.find(place, packers, self.seed, "epoch", source, epoch)
        return Draw(number, source, row, WindowDraw(packer, (epoch, start)))

    def _shares_of(self, packer: int, packers: int) -> Shares:
        """Shares of the draws of one packer, in which each source's row number m is row packer + packers * m."""
        if (packer, packers) not in self._shares:
            weights = [
                weight if isinstance(weight, float | int) else tuple((place / packers, value) for place, value in weight)
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
        block, place = divmod(mine, shares.block)
        known, draws = self._blocks.get((packer, packers), (-1, []))
        if known != block:
            dealt = [range(*of) for of in shares.dealt(block)]
            sources = [source for source, numbers in enumerate(dealt) for _ in numbers]
            order = shuffled_all(len(sources), self.seed, "order", packer, block).tolist()
            ascending = [iter(numbers) for numbers in dealt]
            draws = [(source, next(ascending[source])) for source in (sources[i] for i in order)]
            self._blocks[packer, packers] = block, draws
        return draws[place]

    def _index(self, source: int, number: int, count: int) -> int:
        """Index of a source's row for draw `number`, which is the source's own draw number `count`."""
        size = self.sources[source].size
        if size is None:
            return number
        epoch, place = divmod(count, size)
        return shuffled(place, size, self.seed, "epoch", source, epoch)
