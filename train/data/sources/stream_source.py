"""A source of rows that are read from shards while training, see `streams` for their order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.utils.remote import find_address
from train.data.readers import Broken, ReaderOptions, check_options, recognise_record
from train.data.readers.files import Files
from train.data.readers.order import ROWS, check_order
from train.data.readers.record import Record
from train.data.readers.shards import find_shards, read_shard
from train.data.readers.source import RecordReader, row_of
from train.data.rows.row import Row, RowTurn, Sound, checked
from train.data.sources.streams import PackerStream, StreamDraw

if TYPE_CHECKING:
    from torch import Tensor

    from train.data.readers.source import MakeRow


@dataclass(frozen=True)
class CheckedSound(Sound):
    """A recording that no preparation has checked."""

    def load(self, sample_rate: int) -> Tensor:
        """As of any recording; UserError also where it holds no samples, or one that is not finite."""
        return checked(super().load(sample_rate))


class StreamSource:
    """A source of the rows of WebDataset shards or Parquet files, which are not prepared before.

    Args:
        path: see `find_shards`.
        options: how records become rows, as `data prepare` reads them.
        codec: name of the codec of answers; codes of others are dropped where there is their sound.
        block: rows that are read ahead and shuffled.
        seed: of the order.

    Raises:
        UserError: no shards, one that cannot be read, or records of no known format.
    """

    size, repeats = None, False

    def __init__(
        self, path: str, options: ReaderOptions | None = None, codec: str = "", block: int = 256, seed: int = 0
    ) -> None:  # fmt: skip
        options = options or ReaderOptions()
        check_options(options, "read")
        self.name, self.codec, self.block, self.seed = path, codec, block, seed
        self.shards = find_shards(path)
        self._start()
        first = next(self._all(), None)
        if first is None or first.error:
            raise UserError(f"{first.where} {first.error}" if first else f"data {path} has no rows: name others")
        reader = recognise_record(first.data, options, path)
        files = _files(path, options)
        if isinstance(reader, RecordReader):
            self._make: MakeRow = reader.maker(files, options)
            if reader.order and not options.order:
                items = (row_of(record, self._make) for record in self._all())
                check_order(itertools.islice(items, ROWS), reader.order, reader.name)
        else:
            self._make = reader.maker(files, options, first.data, path)
        self.format = reader.name

    def _start(self) -> None:
        self._process, self._streams = os.getpid(), dict[tuple[int, int], PackerStream]()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": {}}

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int, draw: StreamDraw | None = None) -> Row:
        """Read the row of a draw; row `index` of a single packer where there is none."""
        draw = draw or StreamDraw(0, 1, index)
        item = row_of(self._stream(draw.packer, draw.packers).record(draw.number), self._make)
        if isinstance(item, Broken):
            raise UserError(f"{item.where}: {item.why}")
        return replace(item, turns=tuple(map(self._turn, item.turns)))

    def sample(self, count: int) -> list[Row]:
        """The first rows of the first shard, without those that are broken."""
        items = (row_of(record, self._make) for record in itertools.islice(read_shard(self.shards[0]), count))
        return [item for item in items if isinstance(item, Row)]

    def marks(self, packer: int, packers: int, number: int | None) -> list[list[int]]:
        """Marks that reading a packer's rows from this one on needs, from the current one where it is None; plain data."""
        return [list(mark) for mark in self._stream(packer, packers).marks_from(number)]

    def restore(self, packer: int, packers: int, marks: Sequence[Sequence[int]]) -> None:
        """Take marks, so that rows after them are found at once."""
        self._stream(packer, packers).restore(marks)

    def _stream(self, packer: int, packers: int) -> PackerStream:
        if self._process != os.getpid():  # after a fork: open files are not shared
            self._start()
        if (packer, packers) not in self._streams:
            self._streams[packer, packers] = PackerStream(
                len(self.shards), self._open, self.block, ("stream", self.seed), packer, packers
            )
        return self._streams[packer, packers]

    def _open(self, shard: int, start: int) -> Iterator[Record]:
        return read_shard(self.shards[shard], start)

    def _all(self) -> Iterator[Record]:
        """All records, in the order of the shards' names."""
        return itertools.chain.from_iterable(map(read_shard, self.shards))

    def _turn(self, turn: RowTurn) -> RowTurn:
        codes = turn.answer_codes
        if codes is not None and turn.answer_audio is not None and codes.codec != self.codec:
            codes = None
        return replace(
            turn, question_audio=_checked(turn.question_audio), answer_audio=_checked(turn.answer_audio), answer_codes=codes
        )


def _checked(sound: Sound | None) -> Sound | None:
    return None if sound is None else CheckedSound(**{field.name: getattr(sound, field.name) for field in fields(sound)})


def _files(path: str, options: ReaderOptions) -> Files:
    """The files that records may name: of a folder here; in a store, records hold their sound."""
    if find_address(path) is not None and not options.folder:
        return Files(None, options.prefix, options.audio)
    place = Path(path)
    return Files.of(place if place.exists() else place.parent, options)
