"""Files of records, streamed: each record comes with the place where it stands.

What cannot be read is a record too, with its error in the place of its data, so that record i is always the same. No file is
ever held as a whole: text files are read from the nearest place that is known, Parquet from the start of a row group.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni.errors import UserError
from train.data.readers.record import Record, Records
from train.data.readers.text_records import JsonArray, JsonLines, TableRecords, open_binary

__all__ = ["JsonArray", "JsonLines", "ParquetRecords", "Record", "Records", "TableRecords", "open_records"]

_BUFFER = 1 << 20


def open_records(path: Path) -> Records:
    """The records of a file, by its ending (and, for .json, its first character). UserError for another ending."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return ParquetRecords(path)
    if name.endswith((".csv", ".tsv")):
        return TableRecords(path, "\t" if name.endswith(".tsv") else ",")
    if name.endswith(".jsonl"):
        return JsonLines(path)
    if name.endswith(".json"):
        return JsonArray(path) if _first_character(path) == "[" else JsonLines(path)
    raise UserError(f"data file {path} is none of .parquet, .json, .jsonl, .csv, .tsv (or one of the latter with .gz)")


def _first_character(path: Path) -> str:
    try:
        with open_binary(path) as file:
            return file.read(256).decode("utf-8-sig", "replace").lstrip()[:1]
    except (OSError, EOFError, zlib.error):
        return ""


class ParquetRecords(Records):
    """The rows of a Parquet file. A page that is damaged costs the rows from there to the end of its row group."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._ends: list[int] | None = None
        self._problem = ""

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        # Buffered, because otherwise a column of a row group is read whole; checksums are checked where they were written.
        return pq.ParquetFile(self.path, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)

    def _groups(self) -> list[int]:
        """Where each row group ends; a file that cannot be opened counts as one row."""
        import pyarrow as pa

        if self._ends is None:
            try:
                with self._open() as file:
                    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            except (pa.ArrowException, OSError) as error:
                self._problem = f"is no whole Parquet file ({_one_line(error)}): download it again"
                sizes = [1]
            self._ends = list(itertools.accumulate(sizes))
        return self._ends

    def __len__(self) -> int:
        ends = self._groups()
        return ends[-1] if ends else 0

    def columns(self) -> list[str]:
        """The names of the columns; empty where the file cannot be opened."""
        import pyarrow as pa

        try:
            with self._open() as file:
                return list(file.schema_arrow.names)
        except (pa.ArrowException, OSError):
            return []

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Rows `start` to `stop`; rows of the same group before `start` are decoded and passed over."""
        ends = self._groups()
        stop = len(self) if stop is None else min(stop, len(self))
        if self._problem:
            if start < stop:
                yield Record(str(self.path), {}, self._problem)
            return
        if start >= stop:
            return
        with self._open() as file:
            while start < stop:
                group = bisect.bisect_right(ends, start)
                end = min(stop, ends[group])
                yield from self._group(file, group, ends[group - 1] if group else 0, start, end)
                start = end

    def _group(self, file: Any, group: int, first: int, start: int, end: int) -> Iterator[Record]:
        """Rows `start` to `end` of one group, whose own rows start at `first`."""
        import pyarrow as pa

        at = first
        try:
            for batch in file.iter_batches(batch_size=16, row_groups=[group]):
                begin = max(0, start - at)
                if begin < batch.num_rows:
                    for row in batch.slice(begin, end - at - begin).to_pylist():
                        yield Record(f"{self.path} row {start}", row)
                        start += 1
                at += batch.num_rows
                if at >= end:
                    return
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            problem = f"lies in or behind a damaged page of row group {group} ({_one_line(error)}): download the file again"
        else:
            problem = f"is missing from row group {group}, which promises more rows than it holds: download the file again"
        for row in range(start, end):
            yield Record(f"{self.path} row {row}", {}, problem)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
