"""A source of rows that are read from shards while training, from their start on; their number is not known before.

    epoch     the shards in shuffled order, those of packer l of P at the places l, l + P, ...                  S shards
    block     so many rows of a packer that follow one another, fewer where its epoch ends; they are shuffled

With more packers than shards, packer l reads the shard at place l mod S, of whose rows it takes every K-th, as one of the K
packers that read it. Row number m of a packer is thus a pure function of (key, l, P, m), which needs all before it. Marks of
where blocks start are part of a packer's state: from one, a row is found by reading from the start of its shard.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from omni.errors import UserError
from train.data.readers import Broken, ReaderOptions, check_options, recognise_record
from train.data.readers.codes import ROWS, check_order
from train.data.readers.containers import find_shards, read_shard
from train.data.readers.contract import RecordOptions
from train.data.readers.files import Files
from train.data.readers.records import Record
from train.data.rows.row import Row, RowTurn, Sound, checked
from train.data.seeding import shuffled

if TYPE_CHECKING:
    from torch import Tensor


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
    """The rows of one packer. `marks`: where known blocks start, ascending. `opened` reads a shard."""

    def __init__(self, shards: int, opened: Open, block: int, key: Sequence[int | str], packer: int, packers: int) -> None:
        self.shards, self.opened, self.size, self.key = shards, opened, block, tuple(key)
        self.packer, self.packers = packer, packers
        self._mine: Sequence[int] = range(packer, shards, packers)  # places of the packer's shards in an epoch
        self._part, self._parts = 0, 1  # which part of their rows it takes, of how many
        if packers > shards:
            self._mine = (packer % shards,)
            self._part, self._parts = packer // shards, -(-(packers - packer % shards) // shards)
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
        block, empty = list[Record](), 0
        while len(block) < self.size:
            if shard == len(self._mine):
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
                index = shuffled(self._mine[shard], self.shards, *self.key, "shards", epoch)
                self._records = self.opened(index, record)
            item = next(self._records, None)
            if item is not None and record % self._parts == self._part:
                block.append(item)
            record += 1
            if item is None:
                self._records, shard, record = None, shard + 1, 0
        return block, StreamMark(number + len(block), epoch, shard, record)


@dataclass(frozen=True)
class CheckedSound(Sound):
    """A recording that no preparation has checked."""

    def load(self, sample_rate: int) -> Tensor:
        """As of any recording; UserError also where it holds no samples, or one that is not finite."""
        return checked(super().load(sample_rate))


class StreamSource:
    """A source of the rows of WebDataset shards or Parquet files, which are not prepared before.

    UserError: no shards, one that cannot be read, or records of no known format.

    Args:
        read: how records become rows, as `data prepare` reads them.
        codec: name of the codec of answers; codes of others are dropped where there is their sound.
        block: rows that are read ahead and shuffled.
    """

    size, repeats = None, False

    def __init__(
        self, path: str, read: RecordOptions | None = None, codec: str = "", block: int = 256, seed: int = 0
    ) -> None:  # fmt: skip
        options = ReaderOptions() if read is None else ReaderOptions(**vars(read))
        check_options(options, "read")
        self.name, self.codec, self.block, self.seed = path, codec, block, seed
        self.shards = find_shards(path)
        self._streams = dict[tuple[int, int, int], PackerStream]()  # by process: a fork shares no open file
        records = itertools.chain.from_iterable(map(read_shard, self.shards))  # in the order of the shards' names
        first = next(records, None)
        if first is None or first.error:
            raise UserError(f"{first.where} {first.error}" if first else f"data {path} has no rows: name others")
        reader = recognise_record(first.data, options, path)
        self._make = reader.maker(Files.of(path, options), options, first.data.keys, path)
        if reader.order and not options.order:
            check_order(itertools.islice(map(self._make, itertools.chain([first], records)), ROWS), reader.order, reader.name)
        self.format = reader.name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": {}}

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int, draw: StreamDraw | None = None) -> Row:
        """Read the row of a draw; row `index` of a single packer where there is none."""
        draw = draw or StreamDraw(0, 1, index)
        item = self._make(self.packer(draw.packer, draw.packers).record(draw.number))
        if isinstance(item, Broken):
            raise UserError(f"{item.where}: {item.why}")
        turns = list[RowTurn]()
        for turn in item.turns:
            codes = turn.answer_codes
            if codes is not None and turn.answer_audio is not None and codes.codec != self.codec:
                codes = None
            question, answer = (s and CheckedSound(**vars(s)) for s in (turn.question_audio, turn.answer_audio))
            turns.append(replace(turn, answer_codes=codes, question_audio=question, answer_audio=answer))
        return replace(item, turns=tuple(turns))

    def sample(self, count: int) -> list[Row]:
        """The first rows of the first shard, without those that are broken."""
        items = map(self._make, itertools.islice(read_shard(self.shards[0]), count))
        return [item for item in items if isinstance(item, Row)]

    def packer(self, packer: int, packers: int) -> PackerStream:
        """The rows of one of so many packers, in this process."""
        place = os.getpid(), packer, packers
        if place not in self._streams:
            key, opened = ("stream", self.seed), lambda shard, start: read_shard(self.shards[shard], start)
            self._streams[place] = PackerStream(len(self.shards), opened, self.block, key, packer, packers)
        return self._streams[place]
