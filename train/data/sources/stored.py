"""Sources of rows with one small interface, and that of stored rows, also in windows, for slow disks and buckets.

Where rows that lie together are read together, their order is:

    piece     some rows that follow one another in a file, in whole row groups           M pieces, N rows
    epoch     the pieces in shuffled order
    run       each of P packers takes a run of N / P rows of an epoch, one row more or less
    window    so many pieces of a run that follow one another; their rows are shuffled

Draw d of an epoch is draw d // P of run d mod P. A row is a pure function of (key of the epoch, d, P): no draw needs those
before it. A piece is read by one packer alone, besides those of the P - 1 windows in which runs meet.
"""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omni.errors import UserError
from train.data.rows.parquet import PIECE, KeptGroup, Needed, StoredRows
from train.data.rows.row import Row
from train.data.seeding import shuffled, shuffled_all
from train.data.sources.streams import StreamDraw

if TYPE_CHECKING:
    import numpy as np


KEPT_EPOCHS = 2
"""Orders that are kept, those used last: packers may be in two epochs."""


class WindowDraw(NamedTuple):
    """The packer and window of a draw: what is read with its row is kept until the packer comes to another window. `window`:
    epoch, and the position in it where the window starts."""

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

    def find(self, position: int, packers: int, *epoch: int | str) -> tuple[int, int]:
        """The row of draw `position` of the epoch with this key, and where its window starts, for so many packers in turn."""
        run, mine = position % packers, position // packers
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


class Source(Protocol):
    """A source of rows by number. `row(index)` is a pure function of the index, so that any draw can be repeated.

    Attributes:
        size: number of rows, None for an endless source.
        repeats: rows are drawn again so soon that results computed from them are worth caching.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def repeats(self) -> bool: ...

    def identity(self, index: int) -> int:
        """A number that two draws share only where their rows are equal."""
        ...

    def row(self, index: int) -> Row:
        """Read or make row `index`; UserError naming it where it is broken."""
        ...


class MadeSource(Source, Protocol):
    """A source whose rows are made while training. Its `name` is that of its kind."""

    def held_out(self, count: int, seed: int) -> list[Row]:
        """Makes rows for validation; asked where `SourceOptions.has_held_out`."""
        ...


class StoredSource:
    """A source of the rows of Parquet files, see `StoredRows`; several paths are one after another.

    `windows`: the order of the rows where they are read in pieces, else None. UserError: no row would be left; see also
    `StoredRows`.

    Args:
        held_out: number of rows that are left out, evenly spaced, the first of as many equal parts: `held_out_indices`.
        needed: parts of the rows that are read; None for all.
        window: rows are read in pieces (`PIECE`), and each packer keeps about so many; None where they are read one by one.
    """

    repeats = False

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str],
        cache: str | os.PathLike[str] | None = None,
        held_out: int = 0,
        needed: Needed | None = None,
        window: int | None = None,
    ) -> None:
        self.rows = StoredRows(path, cache, needed)
        self.name = str(path) if isinstance(path, (str, os.PathLike)) else ", ".join(path)
        if held_out >= len(self.rows):
            raise UserError(
                f"held_out is {held_out}, but {self.name} has {len(self.rows)} rows: hold out fewer, none would be left"
            )
        self._held_out = range(held_out)
        self.size = len(self.rows) - held_out
        self.windows: Windows | None = None
        if window is not None:
            import numpy as np

            pieces, held = self.rows.pieces(), np.array([self._place(k) for k in self._held_out], np.int64)
            self.windows = Windows(pieces - held.searchsorted(pieces), -(-window // PIECE))
        self._read: dict[int, tuple[tuple[int, int], list[KeptGroup]]] = {}  # by packer: its window, and groups in it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": {}}

    def whole(self) -> StoredSource:
        """The same source, whose rows have all their parts."""
        out = copy.copy(self)
        out.rows, out._read = self.rows.whole(), {}
        return out

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int, draw: WindowDraw | None = None) -> Row:
        """Read row `index`; its group is kept until the window of the draw ends, where that is given."""
        # Held-out row k is at place(k), after place(k) - k other rows: the index skips all held-out rows before this one.
        number = index + bisect_right(self._held_out, index, key=lambda k: self._place(k) - k)
        if draw is None:
            return self.rows[number]
        if draw.packer not in self._read or self._read[draw.packer][0] != draw.window:
            self._read[draw.packer] = draw.window, []
        return self.rows.read(number, self._read[draw.packer][1])

    def held_out_indices(self, count: int) -> list[int]:
        """Numbers of `count` of the held-out rows, evenly spaced, or of all where there are fewer."""
        held = self._held_out
        asked = min(count, len(held))
        return [self._place(held[k * len(held) // asked]) for k in range(asked)]

    def _place(self, k: int) -> int:
        return k * len(self.rows) // len(self._held_out)


def drawn_row(source: Any, index: int, draw: WindowDraw | StreamDraw | None = None) -> Row:
    """Row `index` of a source; of a window, or from its place in a stream, where it has been drawn so."""
    row: Row = source.row(index) if draw is None else source.row(index, draw)
    return row
