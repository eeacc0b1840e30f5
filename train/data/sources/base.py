"""Sources of rows, stored or synthetic, with one small interface."""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

from omni.errors import UserError
from train.data.rows.parquet import PIECE, KeptGroup, StoredRows
from train.data.rows.parts import Needed
from train.data.rows.row import Row
from train.data.sources.stream_source import StreamSource
from train.data.sources.streams import StreamDraw
from train.data.sources.windows import WindowDraw, Windows


class Source(Protocol):
    """A source of rows by number. `row(index)` is a pure function of the index, so that any draw can be repeated.

    Attributes:
        name: for logs and errors.
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

    Args:
        held_out: number of rows that are left out, evenly spaced, the first of as many equal parts: `held_out_indices`.
        needed: parts of the rows that are read; None for all.
        window: rows are read in pieces (`PIECE`), and each packer keeps about so many; None where they are read one by one.

    Attributes:
        windows: the order of the rows where they are read in pieces, else None.

    Raises:
        UserError: no row would be left; see also `StoredRows`.
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


def drawn_row(source: Source, index: int, place: WindowDraw | StreamDraw | None = None) -> Row:
    """Row `index` of a source; of a window, or from its place in a stream, where it has been drawn so."""
    if place is None:
        return source.row(index)
    if isinstance(place, StreamDraw):
        assert isinstance(source, StreamSource)
        return source.row(index, place)
    assert isinstance(source, StoredSource)
    return source.row(index, place)
