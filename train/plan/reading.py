"""Measures how long rows of stored data take to read, in random order and with their row groups, and advises on the order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from omni.errors import UserError
from train.data.config import DataConfig, SourceConfig
from train.data.rows.parquet import KeptGroup, StoredRows
from train.data.rows.parts import Needed

SECONDS = 2.0
"""Time for the measurements of all sources, besides opening them and the reads that are begun."""
MOST = 200
"""Most reads of a source in either order: a disk's cache has less influence on the first."""

SLOW_MS = 2.5
"""Milliseconds that making an example of a short row takes: reading that is quicker does not hold a run up."""
WORTH = 2.0
"""Times by which whole groups must be quicker for a row, to be worth a lesser shuffle."""


@dataclass(frozen=True)
class ReadingTimes:
    """Milliseconds of a row that is read alone, and of one that is read with its group, and rows of a group; means."""

    alone: float
    grouped: float
    rows: float

    @property
    def advised(self) -> str:
        """The advised `order`."""
        return "sequential" if self.alone > max(SLOW_MS, WORTH * self.grouped) else "random"

    def line(self, source: str, order: str) -> str:
        """What was measured and what is advised, where the source's order is `order`."""
        if self.advised == "sequential":
            why = f"whole groups spare {self.alone - self.grouped:.3g} ms a row"
        elif self.alone <= SLOW_MS:
            why = f"rows are read quicker than their examples are made, in about {SLOW_MS} ms"
        else:
            why = "whole groups would not be much quicker"
        now = "as it is set" if order == self.advised else f"{order} is set"
        return (
            f"{source}: a row is read in {self.alone:.3g} ms alone, in {self.grouped:.3g} ms with its row group of "
            f"{self.rows:.3g}: order {self.advised} is advised ({now}), since {why}"
        )


def advise(data: DataConfig, heard_only: bool = False) -> list[str]:
    """A line for each stored source whose rows can be read here, and are not copied to Arrow."""
    stored = [(f"data.sources.{i}", source) for i, source in enumerate(data.sources) if source.kind == "stored"]
    lines = []
    for name, source in stored:
        needed = Needed(frozenset(source.drawn), data.cut > 0, heard_only)
        found = measure(source, needed, data.cache, SECONDS / len(stored))
        if found is not None:
            lines.append(found.line(f"{name} ({source.folders[0]})", source.order))
    return lines


def measure(source: SourceConfig, needed: Needed | None, cache: str | None, seconds: float) -> ReadingTimes | None:
    """Read rows and groups in turn for about so many seconds; None where none can be read."""
    try:
        rows = StoredRows(source.folders[0], cache, needed)
    except (UserError, OSError):
        return None
    if rows.copied:
        return None
    dice, alone, grouped = random.Random(0), list[float](), list[tuple[float, int]]()
    _timed(lambda: rows[dice.randrange(len(rows))])  # imports
    end = time.perf_counter() + seconds
    while len(alone) < MOST and (time.perf_counter() < end or not (alone and grouped)):
        first = _timed(lambda: rows[dice.randrange(len(rows))])
        kept: list[KeptGroup] = []
        second = _timed(partial(_read_group, rows, dice.randrange(len(rows)), kept))
        if first is None or second is None:  # a broken row
            if time.perf_counter() >= end:
                break
            continue
        alone.append(first)
        grouped.append((second, len(kept[0].table)))
    if not alone:
        return None
    count = sum(n for _, n in grouped)
    per_row = sum(taken for taken, _ in grouped) / count
    return ReadingTimes(1e3 * sum(alone) / len(alone), 1e3 * per_row, count / len(grouped))


def _read_group(rows: StoredRows, index: int, kept: list[KeptGroup]) -> None:
    """Read a row and all others of its group."""
    rows.read(index, kept)
    first = index - rows.place(index)[1] + kept[0].first
    for other in range(first, first + len(kept[0].table)):
        if other != index:
            rows.read(other, kept)


def _timed(work: Callable[[], object]) -> float | None:
    """Seconds that `work` takes; None where it fails."""
    start = time.perf_counter()
    try:
        work()
    except (UserError, OSError):
        return None
    return time.perf_counter() - start
