"""Sources of rows, stored or synthetic, with one small interface."""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from typing import Protocol

from omni.errors import UserError
from train.data.rows.parquet import StoredRows
from train.data.rows.parts import Needed
from train.data.rows.row import Row


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


class StoredSource:
    """A source of the rows of Parquet files, see `StoredRows`.

    Args:
        held_out: number of rows that are left out, evenly spaced, the first of as many equal parts: `held_out_indices`.
        needed: parts of the rows that are read; None for all.

    Raises:
        UserError: no row would be left; see also `StoredRows`.
    """

    repeats = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache: str | os.PathLike[str] | None = None,
        held_out: int = 0,
        needed: Needed | None = None,
    ) -> None:
        self.rows = StoredRows(path, cache, needed)
        self.name = str(path)
        if held_out >= len(self.rows):
            raise UserError(f"held_out is {held_out}, but {path} has {len(self.rows)} rows: hold out fewer, none would be left")
        self._held_out = range(held_out)
        self.size = len(self.rows) - held_out

    def whole(self) -> StoredSource:
        """The same source, whose rows have all their parts."""
        out = copy.copy(self)
        out.rows = self.rows.whole()
        return out

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int) -> Row:
        # Held-out row k is at place(k), after place(k) - k other rows: the index skips all held-out rows before this one.
        return self.rows[index + bisect_right(self._held_out, index, key=lambda k: self._place(k) - k)]

    def held_out_indices(self, count: int) -> list[int]:
        """Numbers of `count` of the held-out rows, evenly spaced, or of all where there are fewer."""
        held = self._held_out
        asked = min(count, len(held))
        return [self._place(held[k * len(held) // asked]) for k in range(asked)]

    def _place(self, k: int) -> int:
        return k * len(self.rows) // len(self._held_out)
