"""Writes shards: Parquet files of rows in the source's order, each with a note of the items it covers.

    rows-00000.parquet      rows
    notes/00000.json        {"file", "rows", "bytes", "crc32", "items": [first, next], "tally", "broken"}

A shard is finished when it has a note, which is written last. An interrupted preparation goes on after the longest series of
notes without a gap, and writes the shards after it again. No shard holds items of two segments, so a segment's shards do not
depend on the items before it. A part of a preparation (`parts`) may begin or end within a segment: notes of such a segment
list its blocks too (`blocks`), from which `ShardWriter` makes the shards of the whole segment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import part_of, publish, read_json, write_json, writing
from train.data.prepare.rows import PrepareTally
from train.data.prepare.worker import BLOCK, BrokenItem, PreparedBlock
from train.data.rows.parquet import ROW_GROUP, written_as
from train.data.rows.parquet_files import readable
from train.data.rows.reference import checksum
from train.data.rows.row import features

if TYPE_CHECKING:
    import pyarrow as pa

AGAIN = "remove its folder and prepare the data again"
"""Advice in messages about a damaged file of a preparation."""
_GROUP_BYTES = 16 << 20

SHARD_GROUPS = 16
"""Largest number of row groups of a shard: to read any row of a file that is not open, its footer is read, which lists them."""

SEGMENT = SHARD_GROUPS * ROW_GROUP // BLOCK * BLOCK
"""Number of items of a segment. Another number makes other shards."""


class ShardWriter:
    """Writes blocks, given in order, into shards of about `size` bytes (before compression; one block at least), of
    `SHARD_GROUPS` groups at most, within a segment.

    Args:
        part: the items that are stored here, where these are not all of the source's.

    Attributes:
        next_item: first item of the source that no finished shard covers.
        last: first item of the source that was not added yet.
        done: counts of the finished shards.
    """

    def __init__(self, folder: Path, size: int, part: range | None = None) -> None:
        self.folder = folder
        self.size = size
        self.part = part
        self.done = PrepareTally()
        self.number, self.next_item = 0, 0 if part is None else part.start
        (folder / "notes").mkdir(exist_ok=True)
        for note in finished(folder, self.next_item):
            self._covered(note)
        for path in folder.glob("rows-*.parquet"):
            if int(path.stem.partition("-")[2]) >= self.number:
                path.unlink()
        for path in (*folder.glob(".*.part"), *folder.glob("notes/.*.part")):
            path.unlink()
        self._begin()

    def _begin(self) -> None:
        self._writer: Any = None
        self._group: list[pa.Table] = []
        self._group_rows = self._group_bytes = self._bytes = self._groups = 0
        self._tally = PrepareTally()
        self._broken: list[BrokenItem] = []
        self._blocks: list[dict[str, Any]] = []
        self.last = self.next_item

    @property
    def file(self) -> Path:
        """Path of the shard in progress."""
        return self.folder / f"rows-{self.number:05d}.parquet"

    def add(self, block: PreparedBlock) -> None:
        """Add the next block; UserError where there is no space left."""
        table = block.table()
        self.add_rows(block, table, table.nbytes)

    def add_rows(self, block: PreparedBlock, table: pa.Table, size: int) -> None:
        """Add the next block, whose rows are `table`, of `size` bytes when they were made; UserError as of `add`."""
        if self._bytes and (self._bytes + size > self.size or self._groups >= SHARD_GROUPS):
            self.finish()
        if block.start != self.last:
            raise RuntimeError(f"block {block.start} comes after item {self.last}")
        self._tally.add(block.tally)
        self._broken += block.broken
        self._blocks.append({"stop": block.stop, "rows": len(table), "bytes": size, "tally": asdict(block.tally)})
        self.last = block.stop
        if len(table):
            self._group.append(table)
            self._bytes += size
            self._group_bytes += size
            self._group_rows += len(table)
        if self._group_rows >= ROW_GROUP or self._group_bytes >= _GROUP_BYTES:
            self._write_group()
        if self.last % SEGMENT == 0:
            self.finish()

    def take(self, folder: Path, note: dict[str, Any]) -> None:
        """Add a finished shard of a part in `folder`, as a hard link or a copy; UserError where there is no space left."""
        self.finish()
        if note["items"][0] != self.next_item:
            raise RuntimeError(f"shard of items from {note['items'][0]} comes after item {self.next_item}")
        if note["file"]:
            with writing(self.file):
                try:
                    os.link(folder / note["file"], part_of(self.file))
                except OSError:  # another disk, or a file system without links
                    shutil.copyfile(folder / note["file"], part_of(self.file))
                publish(self.file)
        self._note(
            {name: value for name, value in note.items() if name != "blocks"} | {"file": note["file"] and self.file.name}
        )

    def _write_group(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._group:
            return
        with writing(self.file):
            if self._writer is None:
                self._writer = pq.ParquetWriter(str(part_of(self.file)), features().arrow_schema, **written_as())
            self._writer.write_table(pa.concat_tables(self._group).combine_chunks(), row_group_size=ROW_GROUP)
        self._groups += -(-self._group_rows // ROW_GROUP)
        self._group, self._group_rows, self._group_bytes = [], 0, 0

    def finish(self) -> None:
        """Finish the shard in progress, where it covers any item."""
        if self.last == self.next_item:
            return
        self._write_group()
        whole = self._writer is not None
        if whole:
            with writing(self.file):
                self._writer.close()
                publish(self.file)
        note = {
            "file": self.file.name if whole else None,
            "rows": self._tally.rows,
            "bytes": self.file.stat().st_size if whole else 0,
            "crc32": checksum(self.file) if whole else 0,
            "items": [self.next_item, self.last],
            "tally": self._tally.plain(),
            "broken": [asdict(item) for item in self._broken],
        }
        if self.part is not None and not in_part(note, self.part):
            note["blocks"] = self._blocks
        self._note(note)

    def _note(self, note: dict[str, Any]) -> None:
        write_json(self.folder / "notes" / f"{self.number:05d}.json", note)
        self._covered(note)
        self._begin()

    def abandon(self) -> None:
        """Delete the shard in progress."""
        if self._writer is not None:
            with suppress(OSError):  # the disk may be full
                self._writer.close()
        part_of(self.file).unlink(missing_ok=True)
        self._begin()

    def _covered(self, note: dict[str, Any]) -> None:
        self.done.add(PrepareTally.from_plain(note["tally"]))
        self.next_item = note["items"][1]
        self.number += 1


def in_part(note: dict[str, Any], part: range) -> bool:
    """True where a shard's whole segment lies in a part."""
    start = note["items"][0] // SEGMENT * SEGMENT
    return part.start <= start and start + SEGMENT <= part.stop


def notes(folder: Path) -> Iterator[dict[str, Any]]:
    """The notes of a folder's finished shards, in order."""
    for path in sorted((folder / "notes").glob("*.json")):
        yield read_json(path, AGAIN)


def stored(folder: Path) -> bool:
    """True where any shard is finished."""
    return next(notes(folder), None) is not None


def finished(folder: Path, first: int) -> Iterator[dict[str, Any]]:
    """Iterate over the notes that cover items from `first` on without a gap; UserError where a shard is not as its note."""
    expected = first
    for number, note in enumerate(notes(folder)):
        if note["items"][0] != expected:
            return
        if note["file"]:
            path = folder / f"rows-{number:05d}.parquet"
            size = path.stat().st_size if path.is_file() else None
            if size != note["bytes"]:
                raise UserError(
                    f"{path} has {size} bytes and its note says {note['bytes']}: something else has changed it; "
                    f"remove {folder} and prepare the data again"
                )
        expected = note["items"][1]
        yield note


def blocks_of(folder: Path, note: dict[str, Any]) -> Iterator[tuple[PreparedBlock, pa.Table, int]]:
    """The blocks of a shard in a segment that its part has not whole, as `ShardWriter.add_rows` takes them.

    UserError where the file is not the one that was written.
    """
    import pyarrow.parquet as pq

    if note["file"]:
        path = folder / note["file"]
        if checksum(path) != note["crc32"]:
            raise UserError(f"{path} is damaged, its CRC-32 is not that of its note: remove {folder} and make this part again")
        with readable(path), pq.ParquetFile(path) as file:
            table = file.read()
    else:
        table = features().arrow_schema.empty_table()
    start, row = note["items"][0], 0
    for plain in note["blocks"]:
        stop = plain["stop"]
        broken = [BrokenItem(**item) for item in note["broken"] if start <= item["item"] < stop]
        block = PreparedBlock(start, stop, tally=PrepareTally.from_plain(plain["tally"]), broken=broken)
        yield block, table.slice(row, plain["rows"]), plain["bytes"]
        start, row = stop, row + plain["rows"]
