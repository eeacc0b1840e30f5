"""Where reading a file has come to: kept, so that the next stretch of records goes on there and not at the file's beginning.

It is for files that cannot be entered just anywhere: packed ones, and the row groups of Parquet. A process keeps one reading,
that of the stretch it has read last, so no more than one file stays open.
"""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator

from train.data.readers.record import Record, Records


class Reading(ABC):
    """The records of one file, read onwards.

    Attributes:
        at: number of the first record that can still be read.
    """

    def __init__(self, at: int) -> None:
        self.at = at

    @abstractmethod
    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """Records `start`, which is not before `at`, to `stop`."""


_kept: list[tuple[int, Records, Reading]] = []
"""At most one, with the process it belongs to: a fork shares the place in an open file, and must not read on there."""

atexit.register(_kept.clear)  # while the modules that close its file are still there


def take(records: Records, start: int) -> Reading | None:
    """The reading that was kept of these records, where it has not gone past `start`. Another one is let go."""
    try:
        process, owner, reading = _kept.pop()
    except IndexError:
        return None
    return reading if process == os.getpid() and owner is records and reading.at <= start else None


def keep(records: Records, reading: Reading) -> None:
    """Keep this one in place of the last."""
    _kept[:] = [(os.getpid(), records, reading)]
