"""Maps the number n of a draw to its row and its tasks, as pure functions of (seed, n).

Sources are mixed in exact proportion: over any sequence of blocks of draws each source has its share, up to one row per source.
A finite source is drawn in epochs, each a full permutation of its rows; an endless one gives row n. Tasks are drawn by weight,
and the weights may change with n (a curriculum).

Where rows of a source are read by whole groups (`windows`), the row also depends on the number of packers P, of which packer l
makes the draws l + P k: each mixes the sources of its own draws, and draw number m of a source there is the source's draw
l + P m. Epochs and shares are as exact as without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni.errors import UserError
from omni.tasks import find_task
from train.data.seeding import dice, shuffled

if TYPE_CHECKING:
    from train.data.sources.base import Source
    from train.data.sources.windows import GroupDraw, GroupWindows

BLOCK = 1024
"""Number of draws in a block, within which the order of the sources is shuffled."""


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
    """A draw: number `number`, which is row `index` of source `source`.

    Attributes:
        group: the row group that the row is read with; None where rows are read one by one.
    """

    number: int
    source: int
    index: int
    group: GroupDraw | None = None


class Mixture:
    """Mixes sources by weights; see the module.

    Args:
        windows: by the number of a source, the order of its rows where they are read by whole groups.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        seed: int = 0,
        windows: Mapping[int, GroupWindows] | None = None,
    ) -> None:
        if len(sources) != len(weights) or not sources:
            raise UserError(f"a mixture of {len(sources)} sources has {len(weights)} weights; give one each, for at least one")
        check_weights("sources", {f"{i} ({s.name})": w for i, (s, w) in enumerate(zip(sources, weights, strict=True))})
        self.sources = list(sources)
        self.seed = seed
        self.windows = dict(windows or {})
        self._blocks: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # by packer, its last block and the draws of it
        total = sum(weights)
        shares = [weight / total for weight in weights]
        last = max(i for i, share in enumerate(shares) if share > 0)
        # Share of source i in the draws that the sources before it leave; the last takes all.
        self._takes = [share / sum(shares[i:]) if i < last else 1.0 for i, share in enumerate(shares[: last + 1])]

    def draw(self, number: int, packers: int = 1) -> Draw:
        """Source and row of draw `number`, counted from 0 over all processes.

        Args:
            packers: number of packers, which take draws in turn; it matters where rows are read by whole groups.
        """
        if not self.windows:
            block, place = divmod(number, BLOCK)
            source, count = self._share(block * BLOCK + shuffled(place, BLOCK, self.seed, "order", block))
            return Draw(number, source, self._index(source, number, count))
        packer, mine = number % packers, number // packers
        source, own = self._own(packer, *divmod(mine, BLOCK))
        count = packer + packers * own
        if source not in self.windows:
            return Draw(number, source, self._index(source, number, count))
        windows = self.windows[source]
        epoch, place = divmod(count, windows.rows)
        found = windows.find(place, packers, self.seed, "epoch", source, epoch)
        return Draw(number, source, found.row, found.drawn(packer, epoch))

    def _share(self, rest: int) -> tuple[int, int]:
        """Source of draw `rest` before draws are shuffled, and its number among the source's own."""
        for source, share in enumerate(self._takes):
            before = math.floor(rest * share)
            if math.floor((rest + 1) * share) > before:
                return source, before
            rest -= before
        raise AssertionError("the last source takes what the others leave")

    def _own(self, packer: int, block: int, place: int) -> tuple[int, int]:
        """Source of a draw in a block of a packer's draws, and its number among the source's own there, in their order."""
        if self._takes[0] == 1.0:
            return 0, block * BLOCK + place
        if self._blocks.get(packer, (-1,))[0] != block:
            shuffle = (shuffled(i, BLOCK, self.seed, "order", packer, block) for i in range(BLOCK))
            found = [self._share(block * BLOCK + i) for i in shuffle]
            counts = {source: iter(sorted(count for other, count in found if other == source)) for source, _ in found}
            self._blocks[packer] = block, [(source, next(counts[source])) for source, _ in found]
        return self._blocks[packer][1][place]

    def _index(self, source: int, number: int, count: int) -> int:
        """Index of a source's row for draw `number`, which is the source's own draw number `count`."""
        size = self.sources[source].size
        if size is None:
            return number
        epoch, place = divmod(count, size)
        return shuffled(place, size, self.seed, "epoch", source, epoch)
