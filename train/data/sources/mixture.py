"""Maps the number n of a draw to its row and its tasks, as pure functions of (seed, n).

Sources are mixed in exact proportion: over any sequence of blocks of draws each source has its share, up to one row per source.
The shares may change with n, and a source may end after a number of rows (`train.data.sources.spans`). A finite source is
drawn in epochs, each a full permutation of its rows; an endless one gives row n. Tasks are drawn by weight, and the weights may
change with n (a curriculum).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni.errors import UserError
from omni.tasks import find_task
from train.data.seeding import dice, shuffled
from train.data.sources.spans import BLOCK, Spans, Weight, check_schedule

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
        return dice(seed, "task", draw, turn).choices(list(weights), list(weights.values()))[0]


def check_weights(what: str, weights: Mapping[str, float]) -> None:
    """Refuse weights that do not make a mixture (UserError)."""
    bad = [name for name, weight in weights.items() if not (math.isfinite(weight) and weight >= 0)]
    if bad:
        raise UserError(f"{what}: the weight of {bad[0]!r} is {weights[bad[0]]}; weights are numbers of at least 0")
    if not weights or sum(weights.values()) <= 0:
        raise UserError(f"{what}: no weight is above 0; name at least one with its weight")


@dataclass(frozen=True)
class Draw:
    """A draw: number `number`, which is row `index` of source `source`."""

    number: int
    source: int
    index: int


class Mixture:
    """Mixes sources by weights; see the module.

    Args:
        weights: of the sources; places of points are numbers of draws.
        limits: most rows that each source gives, however often it is read to its end; None for any number.
    """

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[Weight], seed: int = 0, limits: Sequence[int | None] | None = None
    ) -> None:
        if len(sources) != len(weights) or not sources:
            raise UserError(f"a mixture of {len(sources)} sources has {len(weights)} weights; give one each, for at least one")
        check_schedule([f"the weight of '{i} ({source.name})'" for i, source in enumerate(sources)], weights)
        self.sources = list(sources)
        self.seed = seed
        self.spans = Spans(weights, [None] * len(sources) if limits is None else limits)

    @property
    def total(self) -> int | None:
        """Number of draws that there are; None where they do not end."""
        return self.spans.total

    def draw(self, number: int) -> Draw:
        """Source and row of draw `number`, counted from 0 over all processes; UsedUp where no source has rows left."""
        self.spans.check(number)
        block, place = divmod(number, BLOCK)
        size = BLOCK if self.total is None else min(BLOCK, self.total - block * BLOCK)
        source, count = self.spans.find(block * BLOCK + shuffled(place, size, self.seed, "order", block))
        return Draw(number, source, self._index(source, number, count))

    def _index(self, source: int, number: int, count: int) -> int:
        """Index of a source's row for draw `number`, which is the source's own draw number `count`."""
        size = self.sources[source].size
        if size is None:
            return number
        epoch, place = divmod(count, size)
        return shuffled(place, size, self.seed, "epoch", source, epoch)
