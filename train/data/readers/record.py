"""A record of a file, the interface of files of records, and a cache of the place where the last reading ended.

The next range of records goes on at that place and not at the file's start. This serves files that cannot be entered anywhere:
compressed ones, and the row groups of Parquet. A process keeps one reading, that of the range it has read last, so no more than
one file stays open.
"""

from __future__ import annotations

import atexit
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """One record: where it is, its fields, or the error in their place."""

    where: str
    data: Mapping[str, Any]
    error: str = ""


def finite(value: Any) -> Any:
    """Plain data without the fields and entries that are NaN or infinite, which JSON and pandas write for what is missing.

    Numbers of a list, such as samples, stay as they are.
    """
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items() if not _lacks(one)}
    if isinstance(value, list) and (not value or not isinstance(value[0], int | float) or all(map(_lacks, value))):
        return [finite(one) for one in value if not _lacks(one)]
    return value


def _lacks(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Records(ABC):
    """The records of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]: ...

    def first(self) -> Mapping[str, Any]:
        """Fields of the first record; empty where it cannot be read, or there is none."""
        return next((record.data for record in self.iterate(0, 1)), {})


class RecordReading(ABC):
    """An open reading of one file's records, which only goes forwards.

    Attributes:
        at: number of the first record that can still be read.
    """

    def __init__(self, at: int) -> None:
        self.at = at

    @abstractmethod
    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """Read records `start`, which is not before `at`, to `stop`."""


_kept: list[tuple[int, Records, RecordReading]] = []
"""At most one reading, with its process: a forked process shares the place in an open file, and must not read on there."""

atexit.register(_kept.clear)  # before the modules that close its file are torn down


def take(records: Records, start: int) -> RecordReading | None:
    """Take the kept reading of these records, where it has not gone past `start`; any other is dropped."""
    try:
        process, owner, reading = _kept.pop()
    except IndexError:
        return None
    return reading if process == os.getpid() and owner is records and reading.at <= start else None


def keep(records: Records, reading: RecordReading) -> None:
    """Keep this reading in place of the last."""
    _kept[:] = [(os.getpid(), records, reading)]
