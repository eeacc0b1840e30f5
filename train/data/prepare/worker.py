"""Makes blocks in one process: turns a range of the source's items into a table of rows and a list of broken items."""

from __future__ import annotations

import errno
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni.codec.registry import load_codec
from omni.errors import UserError
from omni.stores.pointers import check_cache
from omni.stores.tries import StoreError
from omni.utils.remote import shown
from train.data.prepare.config import PrepareConfig
from train.data.prepare.rows import PrepareTally, RowMaker
from train.data.readers import Broken, OpenedSource, data_path
from train.data.readers.files import Files
from train.data.rows.row import Row
from train.data.tts.contract import Voice
from train.data.tts.speaking import SpeakingVoice
from train.data.tts.voices import make_voice

if TYPE_CHECKING:
    import pyarrow as pa

    from omni.codec.base import AudioCodec

_BAD = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)  # a UserError is a ValueError
_FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True)
class BrokenItem:
    """An item that made no row: its number in the source, its file and row, and why."""

    item: int
    where: str
    why: str

    @classmethod
    def of(cls, item: int, where: str, why: str) -> BrokenItem:
        """Make one whose texts can be stored: characters that cannot, such as half a surrogate pair, become Python escapes."""
        return cls(item, *(part.encode("utf-8", "backslashreplace").decode() for part in (where, why)))


class _Made(NamedTuple):
    """An item that made a row, and the counts of the work for it."""

    item: int
    where: str
    plain: dict[str, Any]
    done: PrepareTally


@dataclass
class PreparedBlock:
    """Result of items `start` to `stop`: their rows, counts, and broken items."""

    start: int
    stop: int
    rows: pa.Table
    tally: PrepareTally = field(default_factory=PrepareTally)
    broken: list[BrokenItem] = field(default_factory=list)


class BlockMaker:
    """Makes blocks of a source; a process has one, with a codec and voices of its own.

    `schema` is that of the rows, passed because making it takes `datasets`, a second to import.
    """

    def __init__(self, source: OpenedSource, config: PrepareConfig, schema: pa.Schema) -> None:
        if source.brought is not None:
            _bring(*source.brought)
            check_cache(source.brought[0])
        self.source = source
        voices = {side: voice_of(config, side) for side in config.sides}
        self.maker = RowMaker(config, codec_of(config), voices, source.origin)
        self.schema = schema

    def _broken(self, item: int, where: str, why: str) -> BrokenItem:
        return BrokenItem.of(item, self.source.named(where), self.source.named(why))

    def make(self, items: range) -> PreparedBlock:
        """Make the block of some items; UserError where the source cannot be read at all."""
        block, made, before = PreparedBlock(items.start, items.stop, self.schema.empty_table()), list[_Made](), Files.left_out
        for index, item in zip(items, self._items(items.start, items.stop), strict=True):
            if isinstance(item, Broken):
                block.broken.append(self._broken(index, item.where, item.why))
            else:
                try:
                    plain, done = self.maker.make(item, f"{item.source or self.source.format}-{index:08d}")
                except StoreError:
                    raise
                except _BAD as error:
                    if isinstance(error, OSError) and error.errno in _FATAL:
                        raise
                    block.broken.append(self._broken(index, item.where, _one_line(error)))
                else:
                    made.append(_Made(index, item.where, plain, done))
        self._store(block, made)
        block.tally.left_out = Files.left_out - before
        return block

    def _store(self, block: PreparedBlock, made: list[_Made]) -> None:
        """Put rows into a block; rows with a value that a column cannot hold become broken items."""
        try:
            block.rows = self._table(made)
        except _BAD:
            made = [one for one in made if self._fits(one, block)]
            block.broken.sort(key=lambda broken: broken.item)
            block.rows = self._table(made)
        for one in made:
            block.tally.add(one.done)
        block.tally.items = block.stop - block.start
        block.tally.broken = len(block.broken)

    def _table(self, made: Iterable[_Made]) -> pa.Table:
        import pyarrow as pa

        return pa.Table.from_pylist([one.plain for one in made], schema=self.schema)

    def _fits(self, one: _Made, block: PreparedBlock) -> bool:
        """True where the columns can hold a row; otherwise it is added to the broken items."""
        try:
            self._table([one])
        except _BAD as error:
            why = f"holds a value that cannot be stored ({_one_line(error)}): fix or drop it"
            block.broken.append(self._broken(one.item, one.where, why))
            return False
        return True

    def _items(self, start: int, stop: int) -> Iterator[Row | Broken]:
        count = 0
        try:
            for count, item in enumerate(self.source.iterate(start, stop), 1):  # noqa: B007  (used after the loop)
                if not isinstance(item, (Row, Broken)):
                    raise TypeError(f"it gave {item!r:.80}, and items are Row or Broken")
                yield item
        except (UserError, OSError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            place = f"reader {self.source.format} failed at item {start + count}"
            raise UserError(f"{place} with {type(error).__name__}: {' '.join(str(error).split())}") from error
        if count != stop - start:
            raise UserError(
                f"the source ends at item {start + count} and had {len(self.source)}: it has changed while it was read; "
                "remove what is half made and start again"
            )


def block_maker(source: OpenedSource, config: PrepareConfig, schema: pa.Schema) -> Callable[[range], PreparedBlock]:
    """Begin a process that makes blocks, see `train.data.executor`."""
    return BlockMaker(source, config, schema).make


def _bring(path: Path, address: str) -> None:
    """Bring data of a store to this machine, where another one has opened them; UserError where its cache is another folder."""
    if not path.exists() and (here := data_path(address)) != path:
        raise UserError(
            f"{shown(address)} is at {here} in the cache of {platform.node()}, and at {path} where the command was started: "
            "set OMNI_CACHE to the same folder on all machines of the cluster"
        )


def codec_of(config: PrepareConfig) -> AudioCodec | None:
    """Load the codec that encodes answers, None where none is set; UserError where it cannot be loaded."""
    return load_codec(config.codec, config.codec_folder or None, config.device) if config.codec else None


def voice_of(config: PrepareConfig, side: str) -> Voice:
    """Make the voice that speaks a side; UserError where it cannot be made."""
    if side == "answer":
        return make_voice(config.answering)
    voice, speaking = make_voice(config.voice, config.speaking), config.speaking
    return SpeakingVoice(voice, speaking) if speaking.pause or speaking.hesitant or speaking.silence[1] else voice


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
