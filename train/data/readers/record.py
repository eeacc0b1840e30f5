"""A record of a file, what every kind of file of records offers, and where reading one has come to.

The place is kept, so that the next stretch of records goes on there and not at the file's beginning. It is for files that
cannot be entered just anywhere: packed ones, and the row groups of Parquet. A process keeps one reading, that of the stretch it
has read last, so no more than one file stays open.
"""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """One record: its fields, or why there are none."""

    where: str
    data: Mapping[str, Any]
    error: str = ""


class Records(ABC):
    """The records of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]: ...

    def first(self) -> Mapping[str, Any]:
        """The fields of the first record; empty where it cannot be read, or there is none."""
        return next((record.data for record in self.iterate(0, 1)), {})


class RecordReading(ABC):
    """The records of one file, read onwards.

    Attributes:
        at: number of the first record that can still be read.
    """

    def __init__(self, at: int) -> None:
        self.at = at

    @abstractmethod
    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """Records `start`, which is not before `at`, to `stop`."""


_kept: list[tuple[int, Records, RecordReading]] = []
"""At most one, with the process it belongs to: a fork shares the place in an open file, and must not read on there."""

atexit.register(_kept.clear)  # while the modules that close its file are still there


def take(records: Records, start: int) -> RecordReading | None:
    """The reading that was kept of these records, where it has not gone past `start`. Another one is let go."""
    try:
        process, owner, reading = _kept.pop()
    except IndexError:
        return None
    return reading if process == os.getpid() and owner is records and reading.at <= start else None


def keep(records: Records, reading: RecordReading) -> None:
    """Keep this one in place of the last."""
    _kept[:] = [(os.getpid(), records, reading)]
