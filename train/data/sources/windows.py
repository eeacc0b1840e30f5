"""The order of a source's rows where those that lie together are read together, for slow disks and buckets.

    piece     some rows that follow one another in a file, in whole row groups           M pieces, N rows
    epoch     the pieces in shuffled order
    run       each of P packers takes a run of N / P rows of an epoch, one row more or less
    window    so many pieces of a run that follow one another; their rows are shuffled

Draw d of an epoch is draw d // P of run d mod P. A row is a pure function of (key of the epoch, d, P): no draw needs those
before it. A piece is read by one packer alone, besides those of the P - 1 windows in which runs meet.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from train.data.seeding import shuffled, shuffled_all

if TYPE_CHECKING:
    import numpy as np

KEPT_EPOCHS = 2
"""Orders that are kept, those used last: packers may be in two epochs."""


class WindowDraw(NamedTuple):
    """How long what is read with a row is needed: until its packer comes to another window.

    Attributes:
        packer: number of the packer among all.
        window: epoch, and the place in it where the window starts.
    """

    packer: int
    window: tuple[int, int]


class Windows:
    """The order of rows; see the module.

    Args:
        starts: first row of each piece, ascending, and the number of all rows, int64 [M + 1].
        width: pieces of a window.
    """

    def __init__(self, starts: np.ndarray, width: int) -> None:
        self.starts, self.width = starts, width
        self.rows, self.pieces = int(starts[-1]), len(starts) - 1
        self._orders: OrderedDict[tuple[int | str, ...], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def find(self, place: int, packers: int, *epoch: int | str) -> tuple[int, int]:
        """The row of draw `place` of the epoch with this key, and where its window starts, for so many packers in turn."""
        run, mine = place % packers, place // packers
        length, longer = divmod(self.rows, packers)
        first = run * length + min(run, longer)
        order, ends = self._order(epoch)
        before = int(ends.searchsorted(first + mine, "right")) // self.width * self.width
        after = min(before + self.width, self.pieces)
        start = max(first, int(ends[before - 1]) if before else 0)
        size = min(first + length + (run < longer), int(ends[after - 1])) - start
        drawn = start + shuffled(first + mine - start, size, *epoch, "window", start)
        slot = ends.searchsorted(drawn, "right")
        return int(self.starts[order[slot] + 1] - (ends[slot] - drawn)), start

    def _order(self, epoch: tuple[int | str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The pieces in an epoch's order, and the place in the epoch after each, int64 [M]."""
        if epoch not in self._orders:
            order = shuffled_all(self.pieces, *epoch, "pieces")
            self._orders[epoch] = order, (self.starts[order + 1] - self.starts[order]).cumsum()
            if len(self._orders) > KEPT_EPOCHS:
                self._orders.popitem(last=False)
        return self._orders[epoch]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_orders": OrderedDict()}
