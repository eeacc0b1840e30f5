"""Sources of rows: stored ones and made ones, behind one small contract."""

from __future__ import annotations

import os
from typing import Protocol

from train.data.parquet import StoredRows
from train.data.row import Row


class Source(Protocol):
    """Rows by number. `row(index)` is a pure function of the index, so that any draw can be made again.

    Attributes:
        name: for logs and errors.
        size: number of rows, None for an endless source.
        repeats: rows come back so soon that what was computed of them is worth keeping.
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
        """Row `index`; UserError naming it where it is broken."""
        ...


class StoredSource:
    """The rows of Parquet files, see `StoredRows`."""

    repeats = False

    def __init__(self, path: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None) -> None:
        self.rows = StoredRows(path, cache)
        self.name = str(path)

    @property
    def size(self) -> int:
        return len(self.rows)

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int) -> Row:
        return self.rows[index]
