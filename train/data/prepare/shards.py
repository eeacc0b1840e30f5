"""Writes shards: Parquet files of rows in the source's order, each with a note of the items it covers; and the report of all.

    rows-00000.parquet      rows
    notes/00000.json        {"file", "rows", "bytes", "crc32", "items": [first, next], "tally", "broken"}
    report.json, broken.csv counts of the whole, and the items that made no row

A shard is finished when it has a note, which is written last. An interrupted preparation goes on after the longest series of
notes without a gap, and writes the shards after it again.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import part_of, publish, read_json, write_json, writing
from train.console.progress import counted, duration
from train.data.prepare.rows import BrokenItem, PreparedBlock, PrepareTally
from train.data.readers.source import UNTAKEN
from train.data.rows.parquet import ROW_GROUP, WRITTEN_AS
from train.data.rows.reference import checksum
from train.data.rows.row import row_schema

AGAIN = "remove its folder and prepare the data again"
"""Advice in messages about a damaged file of a preparation."""
SHARD_GROUPS = 16
"""Largest number of row groups of a shard: to read any row of a file that is not open, its footer is read, which lists them."""


class ShardWriter:
    """Writes blocks, given in order, into shards of about `size` bytes (before compression; one block at least), of
    `SHARD_GROUPS` groups at most. Of a file, only the last group may have fewer than `ROW_GROUP` rows.

    `first`: the first item that is stored here.

    Attributes:
        next_item: first item of the source that no finished shard covers.
        last: first item of the source that was not added yet.
        done: counts of the finished shards.
    """

    def __init__(self, folder: Path, size: int, first: int = 0) -> None:
        self.folder = folder
        self.size = size
        self.done = PrepareTally()
        self.number, self.next_item = 0, first
        (folder / "notes").mkdir(exist_ok=True)
        for note in finished(folder, first):
            self._covered(note)
        for path in folder.glob("rows-*.parquet"):
            if int(path.stem.partition("-")[2]) >= self.number:
                path.unlink()
        for path in (*folder.glob(".*.part"), *folder.glob("notes/.*.part")):
            path.unlink()
        self._begin()

    def _begin(self) -> None:
        self._writer: Any = None
        self._held = row_schema().empty_table()
        self._bytes = 0
        self._tally = PrepareTally()
        self._broken: list[BrokenItem] = []
        self.last = self.next_item

    @property
    def file(self) -> Path:
        """Path of the shard in progress."""
        return self.folder / f"rows-{self.number:05d}.parquet"

    def add(self, block: PreparedBlock) -> None:
        """Add the next block; UserError where there is no space left."""
        import pyarrow as pa

        size = block.rows.nbytes
        rows = self._tally.rows + len(block.rows)
        full = self._bytes and (self._bytes + size > self.size or rows > SHARD_GROUPS * ROW_GROUP)
        if full or len(self._broken) >= SHARD_GROUPS * ROW_GROUP:
            self.finish()
        self._tally.add(block.tally)
        self._broken += block.broken
        self.last = block.stop
        self._bytes += size
        self._held = pa.concat_tables([self._held, block.rows])
        while len(self._held) >= ROW_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        """Write the first group of the rows that are held back, which has fewer at the end of a shard."""
        import pyarrow.parquet as pq

        with writing(self.file):
            if self._writer is None:
                self._writer = pq.ParquetWriter(str(part_of(self.file)), self._held.schema, **WRITTEN_AS)
            self._writer.write_table(self._held.slice(0, ROW_GROUP).combine_chunks())
        self._held = self._held.slice(ROW_GROUP)

    def finish(self) -> None:
        """Finish the shard in progress, where it covers any item."""
        if self.last == self.next_item:
            return
        if len(self._held):
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
        self.done.add(PrepareTally(**note["tally"]))
        self.next_item = note["items"][1]
        self.number += 1


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
                raise UserError(f"{path} has {size} bytes and its note says {note['bytes']}: it was changed; {AGAIN}")
        expected = note["items"][1]
        yield note


REPORT, BROKEN = "report.json", "broken.csv"
_KINDS = 20
_SHOWN = 3
MISSING = "recording (or another file that the row names) is missing"
_MISSING = re.compile(r"' is not there: |No such file or directory|is not in the data's folder|' is not on this machine")


def listed(folder: Path) -> list[dict[str, Any]]:
    """The report's entries, one for each file of rows."""
    return [
        {name: note[name] for name in ("file", "rows", "bytes", "crc32", "items")} for note in notes(folder) if note["file"]
    ]


def write_report(folder: Path, settings: dict[str, Any], note: str) -> None:
    """Write both files, from the notes of the shards; the report is written last. It holds no times, so that it depends on the
    source and the settings alone."""
    total, kinds, missing = PrepareTally(), Counter[str](), list[str]()
    with writing(folder / BROKEN):
        with open(part_of(folder / BROKEN), "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["item", "where", "why"])
            for shard in notes(folder):
                total.add(PrepareTally(**shard["tally"]))
                for item in shard["broken"]:
                    table.writerow([item["item"], item["where"], item["why"]])
                    reason = MISSING if _MISSING.search(item["why"]) else item["why"]
                    if reason in kinds or len(kinds) < 10_000:
                        kinds[reason] += 1
                    if reason == MISSING and len(missing) < _SHOWN:
                        missing.append(f"{item['where']}: {item['why']}")
        publish(folder / BROKEN)
    report = {
        "source": settings["source"],
        "source_format": settings["source_format"],
        "note": note,
        **total.plain(),
        "reasons": dict(kinds.most_common(_KINDS)),
        "missing": missing,
        "shards": listed(folder),
    }
    write_json(folder / REPORT, report)


def read_report(folder: Path) -> PrepareTally:
    """Read the counts of a finished output."""
    data = read_json(folder / REPORT, AGAIN)
    return PrepareTally(**{field.name: data[field.name] for field in fields(PrepareTally) if field.name in data})


def summary(tally: PrepareTally, folder: Path) -> str:
    """Summarise a preparation in a few lines, for the terminal."""
    made = [
        (tally.spoken_questions, "questions spoken"),
        (tally.spoken_answers, "answers spoken"),
        (tally.encoded, "answers encoded"),
        (tally.codes_taken, "answers with codes of the source"),
    ]
    out = [
        f"{counted(tally.rows, 'row')} of {counted(tally.items, 'item')} in {folder}",
        ", ".join(f"{count} {work}" for count, work in made if count) or "nothing was to be spoken or encoded",
        f"{duration(tally.question_seconds)} of spoken questions, {duration(tally.answer_seconds)} of spoken answers",
    ]
    if tally.left_out:
        out.append(f"{counted(tally.left_out, 'recording')} missing or damaged, and left out (--read.audio optional)")
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    if tally.broken:
        out.append(f"{counted(tally.broken, 'item')} made no row: see {folder / BROKEN}")
        for why, count in list(report["reasons"].items())[:5]:
            out.append(f"  {count:>6}  {why}")
            out += [f"          {line}" for line in report["missing"] if why == MISSING]
    return "\n".join([*out, untaken(report)]).rstrip()


def untaken(report: Mapping[str, Any]) -> str:
    """The report's line about columns that no row has; "" where there are none."""
    return "".join(str(report.get("note", "")).partition(UNTAKEN)[1:])
