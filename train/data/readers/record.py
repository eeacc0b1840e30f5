"""A record of a file, and what every kind of file of records offers."""

from __future__ import annotations

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
