"""Reads records of text files: JSON lines, JSON arrays and tables, plain or compressed by gzip.

The offset of every 256th record is kept (found on first need), so that reading can start near any record.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import json
import re
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from omni.errors import UserError
from train.data.readers.record import Record, RecordReading, Records, keep, take

STRIDE = 256
"""Records between two offsets that are kept."""

_CHUNK = 1 << 20
_LONGEST = 64 << 20  # characters of one element of a JSON array; beyond it the array is taken to be damaged
_BETWEEN = re.compile(r"[ \t\r\n,]*")


def open_binary(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


class TextRecords(Records):
    """Records of a text file, each starting at a byte offset that can be sought."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._anchors: list[tuple[int, int]] = []
        self._count = -1

    @abstractmethod
    def _raw(self, file: IO[bytes], offset: int, number: int) -> Iterator[tuple[int, int, Any]]:
        """From a record's start on, yield offset, number (of the line, or of the element) and raw form of each record."""

    @abstractmethod
    def _record(self, raw: Any, number: int) -> Record:
        """Parse a raw form into a record."""

    def _from(self, offset: int, number: int) -> Iterator[tuple[int, int, Any]]:
        """Open the file and iterate as `_raw`; where the file is truncated, the last record is the error."""
        try:
            with open_binary(self.path) as file:
                if offset:
                    file.seek(offset)
                for item in self._raw(file, offset, number):
                    yield item
                    offset, number = item[:2]
        except (OSError, EOFError, zlib.error) as error:
            yield offset, number, UserError(f"the file cannot be read from here on ({error}): download or copy it again")

    def _index(self) -> None:
        if self._count < 0:
            count, anchors = 0, []
            for offset, number, _ in self._from(0, 0):
                if count % STRIDE == 0:
                    anchors.append((offset, number))
                count += 1
            self._count, self._anchors = count, anchors

    def __len__(self) -> int:
        self._index()
        return self._count

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Iterate over records `start` to `stop`, skipping fewer than 256 before `start`.

        In a .gz all records before `start` are skipped, unless the range starts at or after the end of the last one.
        """
        packed = self.path.name.lower().endswith(".gz")
        at, place = 0, (0, 0)
        if start >= STRIDE and not packed:
            self._index()
            if start >= self._count:
                return
            at, place = start - start % STRIDE, self._anchors[start // STRIDE]
        reading = (take(self, start) if packed else None) or _TextReading(self, at, self._from(*place))
        yield from reading.read(start, stop)
        if packed and stop is not None and not 0 <= self._count <= stop:
            keep(self, reading)

    def _made(self, raw: Any, number: int) -> Record:
        """Make the record of a raw form, or of the error in its place."""
        if isinstance(raw, UserError):
            return Record(f"{self.path} after line {number}", {}, str(raw))
        return self._record(raw, number)


class _TextReading(RecordReading):
    """Reads raw records one after another from number `at` on; skipped ones are not parsed."""

    def __init__(self, records: TextRecords, at: int, raw: Iterator[tuple[int, int, Any]]) -> None:
        super().__init__(at)
        self._records, self._raw = records, raw

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        skip = start - self.at
        wanted = None if stop is None else skip + max(0, stop - start)
        self.at = start if stop is None else max(start, stop)
        for _, number, raw in itertools.islice(self._raw, skip, wanted):
            yield self._records._made(raw, number)


class JsonLines(TextRecords):
    """Records of JSON lines, an object each; empty lines are skipped."""

    def _raw(self, file: IO[bytes], offset: int, number: int) -> Iterator[tuple[int, int, bytes]]:
        for line in file:
            if line.strip():
                yield offset, number, line
            offset += len(line)
            number += 1

    def _record(self, raw: bytes, number: int) -> Record:
        where = f"{self.path} line {number + 1}"
        try:
            return _object(where, json.loads(raw.removeprefix(codecs.BOM_UTF8)))
        except ValueError as error:
            return Record(where, {}, f"is no JSON ({error}): fix or drop the line")
        except RecursionError:
            return Record(where, {}, "is JSON nested too deeply: fix or drop the line")


def _object(where: str, data: Any) -> Record:
    if isinstance(data, dict):
        return Record(where, data)
    return Record(where, {}, f"is {type(data).__name__}, not an object with fields: fix or drop it")


class JsonArray(TextRecords):
    """Records of one JSON array, read element by element. An element that is no JSON is an error, and the last record."""

    def _raw(self, file: IO[bytes], offset: int, number: int) -> Iterator[tuple[int, int, Any]]:
        decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
        opened, ended = offset > 0, False
        text, at = "", 0  # the file's byte `offset` is character `at` of `text`
        while True:
            skipped = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            offset, at = offset + skipped - at, skipped
            problem = "the array is not closed"
            if at < len(text):
                if not opened:
                    opened, offset, at = True, offset + 1, at + 1
                    continue
                if text[at] == "]":
                    return
                try:
                    element, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    problem = str(error)
                else:
                    if end < len(text):  # complete only where text follows: a number may go on in the next chunk
                        yield offset, number, element
                        offset, at, number = offset + len(text[at:end].encode()), end, number + 1
                        continue
            if ended or len(text) - at > _LONGEST:
                yield offset, number, ValueError(problem)
                return
            chunk = file.read(max(_CHUNK, len(text) - at))
            ended = not chunk
            if offset == 0 and chunk.startswith(codecs.BOM_UTF8):
                chunk, offset = chunk[3:], 3
            try:
                text, at = text[at:] + utf8.decode(chunk, final=ended), 0
            except UnicodeDecodeError as error:
                yield offset, number, error
                return

    def _record(self, raw: Any, number: int) -> Record:
        where = f"{self.path} row {number}"
        if isinstance(raw, ValueError):
            return Record(where, {}, f"is no JSON, and what follows cannot be read either ({raw}): fix the file")
        return _object(where, raw)


class TableRecords(TextRecords):
    """Records of a table whose first line names its columns. Comma-separated values may be quoted, tab-separated ones not."""

    def __init__(self, path: Path, delimiter: str) -> None:
        super().__init__(path)
        self.delimiter = delimiter
        self._header: list[str] | None = None

    @property
    def header(self) -> list[str]:
        """Names of the columns; empty where they cannot be read."""
        if self._header is None:
            try:
                with open_binary(self.path) as file:
                    self._header = next(self._reader(_Lines(file, 0, 0)), [])
            except (OSError, EOFError, zlib.error, csv.Error):
                self._header = []
        return self._header

    def _reader(self, lines: Iterator[str]) -> Iterator[list[str]]:
        quoting: Literal[0, 3] = csv.QUOTE_NONE if self.delimiter == "\t" else csv.QUOTE_MINIMAL
        return csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=True)

    def _raw(self, file: IO[bytes], offset: int, number: int) -> Iterator[tuple[int, int, Any]]:
        lines = _Lines(file, offset, number)
        rows = self._reader(lines)
        if offset == 0:
            next(rows, None)
        while True:
            offset, number = lines.offset, lines.number
            try:
                row: list[str] | csv.Error = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                row = error
            if row:
                yield offset, number, row

    def _record(self, raw: list[str] | csv.Error, number: int) -> Record:
        where = f"{self.path} line {number + 1}"
        if isinstance(raw, csv.Error):
            return Record(where, {}, f"is no row of a table ({raw}): fix or drop it")
        if len(raw) != len(self.header):
            advice = "fix it (tabs part values, which are not quoted here)" if self.delimiter == "\t" else "quote or fix it"
            return Record(where, {}, f"has {len(raw)} values, the first line names {len(self.header)} columns: {advice}")
        if any("\udc80" <= character <= "\udcff" for value in raw for character in value):
            return Record(where, {}, "is not UTF-8: convert the file")
        return Record(where, dict(zip(self.header, raw, strict=True)))


class _Lines:
    """Iterates over the lines of a file as text, with the offset and number of the next one."""

    def __init__(self, file: IO[bytes], offset: int, number: int) -> None:
        self._file, self.offset, self.number = file, offset, number

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        first = self.offset == 0
        self.offset += len(line)
        self.number += 1
        return (line.removeprefix(codecs.BOM_UTF8) if first else line).decode("utf-8", "surrogateescape")
