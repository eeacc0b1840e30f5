"""The work of one process: a block of the source's items to a table of rows, and the list of those that were broken."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from omni.audio.codec import AudioCodec, load_codec
from omni.errors import UserError
from train.data.prepare.config import PrepareConfig
from train.data.prepare.rows import RowMaker
from train.data.prepare.tally import Tally
from train.data.prepare.voices import make_voice
from train.data.readers import Broken, Source
from train.data.row import Row

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK = 32
"""Items of a block. Shards end between blocks, so another number makes other shards."""

Tick = Callable[[int, float], None]
"""Told now and then how many further items are done, and how many seconds of sound they hold."""

_TICK_SECONDS = 0.5
_FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True)
class BrokenItem:
    """An item that made no row: its number in the source, its file and row, and why."""

    item: int
    where: str
    why: str


@dataclass
class Block:
    """What became of items `start` to `stop`: rows as an Arrow stream, and the rest."""

    start: int
    stop: int
    stream: bytes = b""
    tally: Tally = field(default_factory=Tally)
    broken: list[BrokenItem] = field(default_factory=list)

    def table(self) -> pa.Table:
        """The rows, in memory shared with `stream`."""
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as reader:
            return reader.read_all()


class BlockMaker:
    """Makes blocks of a source; a process has one, with a codec and voices of its own.

    `schema` is that of the rows, handed over because finding it out takes `datasets`, a second to import; `codec` that of the
    configuration, where it has been loaded already.
    """

    def __init__(
        self, source: Source, config: PrepareConfig, schema: pa.Schema, codec: AudioCodec | None = None
    ) -> None:  # fmt: skip
        torch.set_num_threads(config.threads)
        codec = codec or codec_of(config)
        specs = {"question": config.voice, "answer": config.answering}
        self.source = source
        self.maker = RowMaker(config, codec, {side: make_voice(specs[side]) for side in config.sides})
        self.schema = schema

    def make(self, start: int, stop: int, tick: Tick) -> Block:
        """Items `start` to `stop`; UserError where the source cannot be read at all."""
        import pyarrow as pa

        block, plain = Block(start, stop), []
        told, since, heard = start, time.monotonic(), 0.0
        for index, item in zip(range(start, stop), self._items(start, stop), strict=True):
            if isinstance(item, Broken):
                block.broken.append(BrokenItem(index, item.where, item.why))
            else:
                try:
                    made, done = self.maker.make(item, f"{item.source or self.source.format}-{index:08d}")
                except (UserError, OSError, RuntimeError, ArithmeticError) as error:
                    if isinstance(error, OSError) and error.errno in _FATAL:
                        raise
                    block.broken.append(BrokenItem(index, item.where, _one_line(error)))
                else:
                    plain.append(made)
                    block.tally.add(done)
            now = time.monotonic()
            if now - since >= _TICK_SECONDS:
                tick(index + 1 - told, block.tally.seconds - heard)
                told, since, heard = index + 1, now, block.tally.seconds
        block.tally.items = stop - start
        block.tally.broken = len(block.broken)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(pa.Table.from_pylist(plain, schema=self.schema))
        block.stream = sink.getvalue().to_pybytes()
        tick(stop - told, block.tally.seconds - heard)
        return block

    def _items(self, start: int, stop: int) -> Iterator[Row | Broken]:
        count = 0
        for count, item in enumerate(self.source.iterate(start, stop), 1):  # noqa: B007  (used after the loop)
            yield item
        if count != stop - start:
            raise UserError(
                f"the source ends at item {start + count} and had {len(self.source)}: it has changed while it was read; "
                "remove what is half made and start anew"
            )


def codec_of(config: PrepareConfig) -> AudioCodec | None:
    """The codec that answers are encoded by; UserError where it cannot be had."""
    return load_codec(config.codec, config.codec_folder or None, config.device) if config.codec else None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
