"""Streams files of records: each record comes with its place in the file.

A record that cannot be read is a record too, with its error in the place of its data, so that record i is always the same. No
file is ever in memory as a whole: text files are read from the nearest known offset, Parquet from the start of a row group.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omni.errors import UserError
from omni.files import refuse_pointer
from omni.stores.pointers import pointed_at
from omni.stores.reading import PIECE, ObjectReader
from train.data.readers.record import Record, RecordReading, Records, finite, keep, take
from train.data.readers.shards import TAR, read_shard
from train.data.readers.text_records import JsonArray, JsonLines, TableRecords, open_binary

__all__ = ["JsonArray", "JsonLines", "ParquetRecords", "Record", "Records", "TableRecords", "open_binary", "open_records"]

_BUFFER = 1 << 20
_BATCH = 16  # rows decoded at once


def open_records(path: Path) -> Records:
    """Open the records of a file by its suffix (and, for JSON, its first character); UserError for another suffix."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return ParquetRecords(path)
    if name.endswith((".csv", ".tsv")):
        return TableRecords(path)
    if name.endswith(TAR):
        return TarRecords(path)
    if name.endswith((".json", ".jsonl")):
        return JsonArray(path) if _first_character(path) == "[" else JsonLines(path)
    raise UserError(f"data file {path} is none of .parquet, .tar, .json, .jsonl, .csv, .tsv (or one of the latter with .gz)")


def _first_character(path: Path) -> str:
    try:
        with open_binary(path) as file:
            return file.read(256).decode("utf-8-sig", "replace").lstrip()[:1]
    except (OSError, EOFError, zlib.error):
        return ""


class TarRecords(Records):
    """The records of a WebDataset shard. Where it is damaged, the last one is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._count: int | None = None

    def __len__(self) -> int:
        if self._count is None:
            self._count = sum(1 for _ in read_shard(self.path))
        return self._count

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Iterate over records `start` to `stop`; a range that starts where the last one ended goes on there."""
        reading = take(self, start) or _TarReading(self.path)
        yield from reading.read(start, stop)
        if stop is not None:
            keep(self, reading)


class _TarReading(RecordReading):
    """Reads a shard's records from its start on."""

    def __init__(self, path: Path) -> None:
        super().__init__(0)
        self._records = read_shard(path)

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        while stop is None or self.at < stop:
            record = next(self._records, None)
            if record is None:
                return
            self.at += 1
            if self.at > start:
                yield record


class ParquetRecords(Records):
    """The rows of a Parquet file.

    A damaged page makes the rows from there to the end of its row group broken, a value that cannot be read its own row.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._ends: list[int] | None = None
        self._problem = ""

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        # Buffered, as otherwise a column of a row group is read whole; checksums are verified where the file has them.
        one = pointed_at(self.path)
        if one is None:
            refuse_pointer(self.path)
        file, buffer = (self.path, _BUFFER) if one is None else (ObjectReader(one), PIECE)
        return pq.ParquetFile(file, buffer_size=buffer, pre_buffer=False, page_checksum_verification=True)

    def _groups(self) -> list[int]:
        """Row numbers at which the row groups end; a file that cannot be opened counts as one row."""
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
        """Names of the columns; empty where the file cannot be opened."""
        import pyarrow as pa

        try:
            with self._open() as file:
                return list(file.schema_arrow.names)
        except (pa.ArrowException, OSError):
            return []

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Iterate over rows `start` to `stop`; rows of the same group before `start` are decoded and skipped.

        A range that starts where the last one ended goes on there.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        if start >= stop:
            return
        if self._problem:
            yield Record(str(self.path), {}, self._problem)
            return
        reading = take(self, start) or _Rows(self._open(), self.path, self._groups())
        yield from reading.read(start, stop)
        if stop < len(self):
            keep(self, reading)


class _Batch(NamedTuple):
    """Rows `first` to `stop` of a file: as they are stored, or why they cannot be read."""

    first: int
    stop: int
    stored: Any
    problem: str = ""

    def records(self, path: Path, start: int, stop: int) -> Iterator[Record]:
        """Records of rows `start` to `stop`."""
        if self.problem:
            found: Iterable[tuple[dict[str, Any], str]] = itertools.repeat(({}, self.problem), stop - start)
        else:
            found = plain_rows(self.stored.slice(start - self.first, stop - start))
        for row, (data, problem) in enumerate(found, start):
            yield Record(f"{path} row {row}", finite(data), problem)


class _Rows(RecordReading):
    """Reads the rows of an open Parquet file, decoded a few at a time from the start of a row group on.

    Args:
        ends: row numbers at which the row groups end.
    """

    def __init__(self, file: Any, path: Path, ends: Sequence[int]) -> None:
        super().__init__(0)
        self._file, self._path, self._ends = file, path, ends
        self._group = -1
        self._batches: Iterator[_Batch] = iter(())
        self._batch = _Batch(0, 0, None)

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        end = self._ends[-1] if stop is None else stop
        while start < end:
            if start >= self._batch.stop:
                self._batch = self._with(start)
            upto = min(end, self._batch.stop)
            yield from self._batch.records(self._path, start, upto)
            start = self.at = upto

    def _with(self, row: int) -> _Batch:
        """The next batch that holds a row."""
        group = bisect.bisect_right(self._ends, row)
        if group != self._group:
            self._group, self._batches = group, self._decoded(group)
        return next(batch for batch in self._batches if row < batch.stop)

    def _decoded(self, group: int) -> Iterator[_Batch]:
        """Decode all rows of one group; a damaged part is a batch too, up to the group's end."""
        import pyarrow as pa

        at, end = self._ends[group - 1] if group else 0, self._ends[group]
        try:
            for stored in self._file.iter_batches(batch_size=_BATCH, row_groups=[group]):
                upto = min(at + stored.num_rows, end)
                yield _Batch(at, upto, stored)
                at = upto
        except (pa.ArrowException, OSError) as error:
            problem = f"lies in or behind a damaged page of row group {group} ({_one_line(error)}): download the file again"
        else:
            problem = f"is missing from row group {group}, which promises more rows than it holds: download the file again"
        yield _Batch(at, end, None, problem)


def plain_rows(batch: Any) -> list[tuple[dict[str, Any], str]]:
    """Rows of a batch as plain data, each with an error or "": a value that Python cannot represent breaks its own row only."""
    unfit = _unfit()
    try:
        return [(data, "") for data in batch.to_pylist()]
    except unfit:
        return [_plain_row(batch.slice(row, 1), unfit) for row in range(len(batch))]


def _plain_row(batch: Any, unfit: tuple[type[Exception], ...]) -> tuple[dict[str, Any], str]:
    """The fields of a batch's one row, or none and the error."""
    data: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            data[name] = column[0].as_py()
        except unfit as error:
            what = "holds a text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
            return {}, f"its column {name!r} {what} ({_one_line(error)}): fix or drop it"
    return data, ""


def _unfit() -> tuple[type[Exception], ...]:
    """Exceptions of stored values that Python cannot represent: no UTF-8, times out of range, unknown time zones."""
    import pyarrow as pa

    return (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
