"""Sources of rows, stored or synthetic, with one small interface."""

from __future__ import annotations

import copy
import itertools
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from omni.errors import UserError
from train.data.rows.parquet import GroupTables, StoredRows
from train.data.rows.parts import Needed
from train.data.rows.row import Row
from train.data.sources.stream_source import StreamSource
from train.data.sources.streams import StreamDraw
from train.data.sources.windows import GroupDraw, GroupSizes, GroupWindows


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


class JoinedRows:
    """The rows of several folders or files, one after another, as one `StoredRows`."""

    def __init__(self, parts: Sequence[StoredRows]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, index: int) -> tuple[StoredRows, int]:
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)

    def __getitem__(self, index: int) -> Row:
        part, row = self._place(index)
        return part[row]

    def read(self, index: int, kept: GroupTables) -> Row:
        """As `self[index]`, with the row's group, see `StoredRows.read`."""
        part, row = self._place(index)
        return part.read(row, kept)

    def where(self, index: int) -> str:
        """File and row number within it, for errors."""
        part, row = self._place(index)
        return part.where(row)

    def group_sizes(self) -> np.ndarray:
        """Number of rows of each row group, in the order of the rows, [G]."""
        return np.concatenate([part.group_sizes() for part in self._parts])

    def whole(self) -> JoinedRows:
        """The same rows, with all their parts."""
        return JoinedRows([part.whole() for part in self._parts])


class StoredSource:
    """A source of the rows of Parquet files, see `StoredRows`; several paths are one after another.

    Args:
        held_out: number of rows that are left out, evenly spaced, the first of as many equal parts: `held_out_indices`.
        needed: parts of the rows that are read; None for all.
        window: rows are read by whole groups, so many of which are kept; None where they are read one by one.

    Attributes:
        windows: the order of the rows where they are read by whole groups, else None.

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
        paths = [path] if isinstance(path, (str, os.PathLike)) else path
        parts = [StoredRows(one, cache, needed, by_group=window is not None) for one in paths]
        self.rows = parts[0] if len(parts) == 1 else JoinedRows(parts)
        self.name = ", ".join(map(str, paths))
        if held_out >= len(self.rows):
            raise UserError(
                f"held_out is {held_out}, but {self.name} has {len(self.rows)} rows: hold out fewer, none would be left"
            )
        self._held_out = range(held_out)
        self.size = len(self.rows) - held_out
        self.windows: GroupWindows | None = None
        if window is not None:
            held = [self._place(k) for k in self._held_out]
            self.windows = GroupWindows(GroupSizes.of(self.rows.group_sizes()).without(held), window)
        self._read: dict[int, tuple[tuple[int, int], dict[int, GroupTables]]] = {}  # by packer: its window, and groups in it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": {}}

    def whole(self) -> StoredSource:
        """The same source, whose rows have all their parts."""
        out = copy.copy(self)
        out.rows, out._read = self.rows.whole(), {}
        return out

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int, group: GroupDraw | None = None) -> Row:
        """Read row `index`; with its group, which is kept until its packer's window ends, where that is given."""
        # Held-out row k is at place(k), after place(k) - k other rows: the index skips all held-out rows before this one.
        number = index + bisect_right(self._held_out, index, key=lambda k: self._place(k) - k)
        if group is None:
            return self.rows[number]
        window, kept = self._read.get(group.packer, (None, {}))
        if window != group.window:
            kept = {}
            self._read[group.packer] = group.window, kept
        return self.rows.read(number, kept.setdefault(group.group, {}))

    def held_out_indices(self, count: int) -> list[int]:
        """Numbers of `count` of the held-out rows, evenly spaced, or of all where there are fewer."""
        held = self._held_out
        asked = min(count, len(held))
        return [self._place(held[k * len(held) // asked]) for k in range(asked)]

    def _place(self, k: int) -> int:
        return k * len(self.rows) // len(self._held_out)


def drawn_row(source: Source, index: int, group: GroupDraw | StreamDraw | None = None) -> Row:
    """Row `index` of a source; with its row group, or from its place in a stream, where it has been drawn with one."""
    if group is None:
        return source.row(index)
    if isinstance(group, StreamDraw):
        assert isinstance(source, StreamSource)
        return source.row(index, group)
    assert isinstance(source, StoredSource)
    return source.row(index, group)
