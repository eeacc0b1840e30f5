"""The order of a stream: rows of shards that are read from their start on, whose number is not known before they are read.

    epoch     the shards in shuffled order, those of packer l of P at the places l, l + P, ...                  S shards
    block     so many rows of a packer that follow one another, fewer where its epoch ends; they are shuffled

With more packers than shards, packer l reads the shard at place l mod S, of whose rows it takes every K-th, as one of the K
packers that read it. Row number m of a packer is thus a pure function of (key, l, P, m), which needs all before it. Marks of
where blocks start are part of a packer's state: from one, a row is found by reading from the start of its shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from omni.errors import UserError
from train.data.readers.record import Record
from train.data.seeding import shuffled

EMPTY_EPOCHS = 8
"""Epochs without a row after which a packer gives up."""

Open = Callable[[int, int], Iterator[Record]]
"""Reads the records of a shard, by its number, from a record on."""


class StreamDraw(NamedTuple):
    """Row `number` of packer `packer` of `packers`, counted from 0."""

    packer: int
    packers: int
    number: int


class StreamMark(NamedTuple):
    """Where a block starts: the packer's number of its first row, the epoch, which of the packer's shards, and which record."""

    number: int
    epoch: int
    shard: int
    record: int


BEGIN = StreamMark(0, 0, 0, 0)


class PackerStream:
    """The rows of one packer.

    Args:
        shards: number of shards.
        opened: reads one; a record with an error is its last.
        block: rows of a block.
        key: of the order.

    Attributes:
        marks: where known blocks start, ascending.
    """

    def __init__(self, shards: int, opened: Open, block: int, key: Sequence[int | str], packer: int, packers: int) -> None:
        self.shards, self.opened, self.size, self.key = shards, opened, block, tuple(key)
        self.packer, self.packers = packer, packers
        self.marks = [BEGIN]
        self._start = self._end = BEGIN
        self._block: list[Record] = []
        self._records: Iterator[Record] | None = None  # from `_end` on

    def record(self, number: int) -> Record:
        """Row `number`, as its record. Of rows in ascending order none is read twice."""
        mark = self.marks[self._known(number)]
        if mark.number > number:  # it was dropped
            mark = BEGIN
        if number < self._start.number or mark.number > self._end.number:
            self._start = self._end = mark
            self._block, self._records = [], None
        while number >= self._end.number:
            self._read()
        first, count = self._start.number, len(self._block)
        return self._block[shuffled(number - first, count, *self.key, "rows", self.packer, self.packers, first)]

    def marks_from(self, number: int | None) -> list[StreamMark]:
        """The marks that are needed from this row on, or from the last block that was read where it is None; drops others."""
        self.marks = self.marks[self._known(self._start.number if number is None else number) :]
        return self.marks

    def restore(self, marks: Iterable[Sequence[int]]) -> None:
        """Take the marks of a state."""
        self.marks = sorted({BEGIN, *(StreamMark(*map(int, mark)) for mark in marks)})

    def _known(self, number: int) -> int:
        """Index of the last known mark at or before a row; the first where there is none."""
        return max(0, bisect_right(self.marks, number, key=lambda mark: mark.number) - 1)

    def _read(self) -> None:
        """Read the next block."""
        if self._end.number > self.marks[-1].number:
            self.marks.append(self._end)
        self._start = self._end
        try:
            self._block, self._end = self._after(self._end)
        except BaseException:
            self._block, self._records = [], None
            raise

    def _after(self, mark: StreamMark) -> tuple[list[Record], StreamMark]:
        """The block that starts at a mark, and the next mark."""
        number, epoch, shard, record = mark
        mine, (part, parts) = self._mine()
        block, empty = list[Record](), 0
        while len(block) < self.size:
            if shard == len(mine):
                epoch, shard, empty = epoch + 1, 0, empty + 1
                if block:
                    break
                if empty == EMPTY_EPOCHS:
                    raise UserError(
                        f"{self.packers} packers (micro-batches of a step x data workers) read a stream of {self.shards} "
                        f"shards, and packer {self.packer} finds no row: give more rows, or fewer data.workers or "
                        "data.micro_batches"
                    )
            if self._records is None:
                place = shuffled(mine[shard], self.shards, *self.key, "shards", epoch)
                self._records = self.opened(place, record)
            found = next(self._records, None)
            if found is not None and record % parts == part:
                block.append(found)
            record += 1
            if found is None or found.error:
                self._records, shard, record = None, shard + 1, 0
        return block, StreamMark(number + len(block), epoch, shard, record)

    def _mine(self) -> tuple[Sequence[int], tuple[int, int]]:
        """Places of the packer's shards in an epoch, and which part of their rows it takes, of how many."""
        if self.packers <= self.shards:
            return range(self.packer, self.shards, self.packers), (0, 1)
        place = self.packer % self.shards
        return (place,), (self.packer // self.shards, -(-(self.packers - place) // self.shards))
