"""Reads records of text files: JSON lines, JSON arrays and tables, plain or compressed by gzip.

A file is read from its start; a range that follows the last one goes on there (see `record`), and skipped records are not
parsed.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
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

_CHUNK = 1 << 20
_LONGEST = 64 << 20  # characters of one element of a JSON array; beyond it the array is taken to be damaged
_BETWEEN = re.compile(r"[ \t\r\n,]*")


def open_binary(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


class TextRecords(Records):
    """Records of a text file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._count = -1

    @abstractmethod
    def _raw(self, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
        """Yield number (of the line, or of the element) and raw form of each record."""

    @abstractmethod
    def _record(self, raw: Any, number: int) -> Record:
        """Parse a raw form into a record."""

    def _all(self) -> Iterator[tuple[int, Any]]:
        """Open the file and iterate as `_raw`; where the file is truncated, the last record is the error."""
        number = 0
        try:
            with open_binary(self.path) as file:
                for number, raw in self._raw(file):
                    yield number, raw
        except (OSError, EOFError, zlib.error) as error:
            yield number, UserError(f"the file cannot be read from here on ({error}): download or copy it again")

    def __len__(self) -> int:
        if self._count < 0:
            self._count = sum(1 for _ in self._all())
        return self._count

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Iterate over records `start` to `stop`; all before `start` are skipped, unless the last range ended before it."""
        reading = take(self, start) or _TextReading(self)
        yield from reading.read(start, stop)
        if stop is not None and not 0 <= self._count <= stop:
            keep(self, reading)

    def _made(self, raw: Any, number: int) -> Record:
        """Make the record of a raw form, or of the error in its place."""
        if isinstance(raw, UserError):
            return Record(f"{self.path} after line {number}", {}, str(raw))
        return self._record(raw, number)


class _TextReading(RecordReading):
    """Reads raw records one after another; skipped ones are not parsed."""

    def __init__(self, records: TextRecords) -> None:
        super().__init__(0)
        self._records, self._raw = records, records._all()

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        skip = start - self.at
        wanted = None if stop is None else skip + max(0, stop - start)
        self.at = start if stop is None else max(start, stop)
        for number, raw in itertools.islice(self._raw, skip, wanted):
            yield self._records._made(raw, number)


class JsonLines(TextRecords):
    """Records of JSON lines, an object each; empty lines are skipped."""

    def _raw(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        return ((number, line) for number, line in enumerate(file) if line.strip())

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

    def _raw(self, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
        decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
        opened, ended = False, False
        text, at, number = "", 0, 0
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            problem = "the array is not closed"
            if at < len(text):
                if not opened:
                    opened, at = True, at + 1
                    continue
                if text[at] == "]":
                    return
                try:
                    element, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    problem = str(error)
                else:
                    if end < len(text):  # complete only where text follows: a number may go on in the next chunk
                        yield number, element
                        at, number = end, number + 1
                        continue
            if ended or len(text) - at > _LONGEST:
                yield number, ValueError(problem)
                return
            chunk = file.read(max(_CHUNK, len(text) - at))
            ended = not chunk
            try:
                text, at = text[at:] + utf8.decode(chunk, final=ended), 0
            except UnicodeDecodeError as error:
                yield number, error
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
                    self._header = next(self._reader(file), [])
            except (OSError, EOFError, zlib.error, csv.Error):
                self._header = []
        return self._header

    def _reader(self, file: IO[bytes]) -> Any:
        lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")
        quoting: Literal[0, 3] = csv.QUOTE_NONE if self.delimiter == "\t" else csv.QUOTE_MINIMAL
        return csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=True)

    def _raw(self, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
        rows = self._reader(file)
        next(rows, None)
        while True:
            number = rows.line_num
            try:
                row: list[str] | csv.Error = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                row = error
            if row:
                yield number, row

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
