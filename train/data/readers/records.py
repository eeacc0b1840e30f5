"""Records of files: each with its place in the file, and the error in the place of its data where it cannot be read.

Here are those of text files: JSON lines, JSON arrays and tables, plain or compressed by gzip. A file is read from its start;
no file is ever in memory as a whole. The next range of records goes on where the last one ended and not at the file's start,
without parsing skipped records: a process keeps one reading, that of the range it has read last, so no more than one file stays
open.
"""

from __future__ import annotations

import atexit
import codecs
import csv
import gzip
import io
import itertools
import json
import math
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from omni.errors import UserError
from omni.files import refuse_pointer


class Record(NamedTuple):
    """One record: where it is, its fields, or the error in their place."""

    where: str
    data: Mapping[str, Any]
    error: str = ""


def finite(value: Any) -> Any:
    """Plain data without the fields and entries that are NaN or infinite, which JSON and pandas write for what is missing.
    Numbers of a list, such as samples, stay as they are."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items() if not _lacks(entry)}
    if isinstance(value, list) and (not value or not isinstance(value[0], int | float) or all(map(_lacks, value))):
        return [finite(entry) for entry in value if not _lacks(entry)]
    return value


def _lacks(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Records(ABC):
    """The records of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _raw(self, start: int) -> tuple[int, Iterator[Any]]:
        """Raw records from the nearest place at or before `start` that can be entered, and the number of the first."""

    @abstractmethod
    def _record(self, raw: Any) -> Record:
        """Parse a raw record."""

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Iterate over records `start` to `stop`; a range that starts where the last one ended goes on there."""
        at, raw = max(take(self, start) or (-1, iter(())), self._raw(start), key=itemgetter(0))
        last = None if stop is None else max(start, stop)
        yield from map(self._record, itertools.islice(raw, start - at, None if last is None else last - at))
        if last is not None:
            _kept[:] = [(os.getpid(), self, last, raw)]

    def first(self) -> Mapping[str, Any]:
        """Fields of the first record; empty where it cannot be read, or there is none."""
        return next((record.data for record in self.iterate(0, 1)), {})


_kept: list[tuple[int, Records, int, Iterator[Any]]] = []
"""At most one reading, with its process (a forked one shares the place in an open file, and must not read on there), and the
number of its next record."""

atexit.register(_kept.clear)  # before the modules that close its file are torn down


def take(records: Records, start: int) -> tuple[int, Iterator[Any]] | None:
    """Take the kept reading of these records, where it has not gone past `start`; any other is dropped."""
    process, owner, at, raw = _kept.pop() if _kept else (0, None, 0, iter(()))
    return (at, raw) if process == os.getpid() and owner is records and at <= start else None


_CHUNK = 1 << 20
_LONGEST = 64 << 20  # characters of one element of a JSON array, or of a line; beyond it the file is taken to be damaged
_LONGEST_QUOTE, _SURE = 1 << 17, 8  # characters of quotes over several lines, and rows within them that leave no doubt
_SEPARATOR, _QUOTED = re.compile(r'"?sep=([,;\t|])"?', re.IGNORECASE), re.compile(r'"[^"]*"')
_UNDECODED = re.compile("[\udc80-\udcff]")
csv.field_size_limit(_LONGEST)
_BETWEEN = re.compile(r"[ \t\r\n,]*")


def open_binary(path: Path) -> IO[bytes]:
    """Open a file, unpacked where its name ends in .gz; UserError for a pointer of Git LFS."""
    refuse_pointer(path)
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


class TextRecords(Records):
    """Records of a text file: a raw one is the number of its line, or of its element, and that itself."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._count = -1

    @abstractmethod
    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
        """Yield the raw records of an open file."""

    @abstractmethod
    def _parsed(self, number: int, part: Any) -> Record:
        """Parse a raw record."""

    def _raw(self, start: int) -> tuple[int, Iterator[Any]]:
        return 0, self._all()

    def _all(self) -> Iterator[tuple[int, Any]]:
        """Open the file and iterate as `_parts`; where the file is truncated, the last record is the error."""
        number = 0
        try:
            with open_binary(self.path) as file:
                for number, part in self._parts(file):
                    yield number, part
        except (OSError, EOFError, zlib.error) as error:
            yield number, UserError(f"the file cannot be read from here on ({error}): download or copy it again")

    def _record(self, raw: tuple[int, Any]) -> Record:
        if isinstance(raw[1], UserError):
            return Record(f"{self.path} after line {raw[0]}", {}, str(raw[1]))
        return self._parsed(*raw)

    def __len__(self) -> int:
        if self._count < 0:
            self._count = sum(1 for _ in self._all())
        return self._count


class JsonLines(TextRecords):
    """Records of JSON lines, an object each, also with a comma after it; empty lines are skipped."""

    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        return ((number, line) for number, line in enumerate(file) if line.strip())

    def _parsed(self, number: int, raw: bytes) -> Record:
        where = f"{self.path} line {number + 1}"
        try:
            data = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode().rstrip(", \t\r\n"))
            nonfinite = (b"N" in raw and b"NaN" in raw) or (b"I" in raw and b"Infinity" in raw)  # single bytes are found faster
            return _object(where, finite(data) if nonfinite else data)
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

    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
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
                    if text[at + 1 :].strip() or file.read(_CHUNK).strip():
                        yield number, ValueError("more follows the end of the array")
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

    def _parsed(self, number: int, raw: Any) -> Record:
        where = f"{self.path} row {number}"
        if isinstance(raw, ValueError):
            return Record(where, {}, f"is no JSON, and what follows cannot be read either ({raw}): fix the file")
        return _object(where, finite(raw))


class TableLayout(NamedTuple):
    """Delimiter and columns of a table, the lines that come before its rows, and whether values may be quoted."""

    delimiter: str
    names: list[str]
    lines: int
    quoted: bool

    def values(self, line: str) -> list[str] | csv.Error:
        """The values of a row, or why it is none."""
        if not self.quoted or '"' not in line:
            return line.split(self.delimiter) if line else []
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            return error

    def open(self, text: str) -> bool:
        """True where a text ends within quotes."""
        unclosed = '"' in text and self.quoted and isinstance(self.values(text), csv.Error)
        return unclosed and not isinstance(self.values(text + '"'), csv.Error)


class TableRecords(TextRecords):
    """Records of a table whose first line names its columns, parted by the comma, semicolon, tab or bar that it has most of (or
    that `sep=;` before it says). Lines end in LF, CR LF or CR. Values may be quoted, but not in .tsv between tabs. A quote that
    is not closed, or only after lines that are rows of their own, breaks the row that opens it and no other."""

    @property
    def header(self) -> list[str]:
        """Names of the columns; empty where they cannot be read."""
        return self.layout.names

    @cached_property
    def layout(self) -> TableLayout:
        """How the table is written; UserError where its first line is too long for a table, or opens a quote."""
        with suppress(OSError, EOFError, zlib.error), open_binary(self.path) as file:
            return self._sniff(_lines(file))
        return TableLayout(",", [], 0, True)

    def _sniff(self, lines: Iterator[str]) -> TableLayout:
        first, number = next(lines, ""), 1
        said = _SEPARATOR.fullmatch(first)
        if said:
            first, number = next(lines, ""), 2
        tabs = self.path.name.lower().removesuffix(".gz").endswith(".tsv") and "\t" in first and not said
        bare = _QUOTED.sub("", first)
        layout = TableLayout(said[1] if said else "\t" if tabs else max(",;\t|", key=bare.count), [], 0, not tabs)
        while layout.open(first) and len(first) <= _LONGEST_QUOTE and (more := next(lines, None)) is not None:
            first, number = f"{first}\n{more}", number + 1
        if len(first) > _LONGEST_QUOTE:
            raise UserError(f"{self.path}: its first line is too long for names of columns: it is no table, name other data")
        names = layout.values(first)
        if isinstance(names, csv.Error):
            raise UserError(f"{self.path} line 1: its names of columns are no row of a table ({names}): fix the line")
        return layout._replace(names=[name.strip() for name in names], lines=number)

    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, str | csv.Error]]:
        ahead = deque[tuple[int, str]]()
        lines = itertools.islice(enumerate(_lines(file)), self.layout.lines, None)
        while (entry := ahead.popleft() if ahead else next(lines, None)) is not None:
            number, line = entry
            if line:
                yield number, self._joined(line, ahead, lines) if self.layout.open(line) else line

    def _joined(self, line: str, ahead: deque[tuple[int, str]], lines: Iterator[tuple[int, str]]) -> str | csv.Error:
        """The row that goes on after a line within quotes; the error of that line where it does not, or where rows of their own
        lie within the quotes. What follows is put back into `ahead`."""
        taken, own, text = list[tuple[int, str]](), list[int](), line
        last = len(self.layout.values(line + '"')) > 1  # type: ignore[arg-type]
        while self.layout.open(text) and len(text) <= _LONGEST_QUOTE and 2 * len(own) < max(len(taken), 2 * _SURE):
            entry = ahead.popleft() if ahead else next(lines, None)
            if entry is None:
                break
            taken.append(entry)
            text += f"\n{entry[1]}"
            if self._is_row(entry[1], last):
                own.append(entry[0] + 1)
        values = self.layout.values(text)
        closed = not isinstance(values, csv.Error) and len(values) == len(self.header)
        if (closed or not (own or self.layout.open(text))) and 2 * len(own) < max(1, len(taken)):
            return text
        ahead.extendleft(reversed(taken))
        location = f"before line {own[0]}, which is a row of its own" if own else "in this row"
        return csv.Error(f"opens a quote that is not closed {location}: close it, or write the quote twice")

    def _is_row(self, line: str, last: bool) -> bool:
        """True for a line of a value for each column; prose has a space after a comma. One that ends in a quote is a row where
        that may have opened in the `last` value, not the end of quoted ones."""
        values = self.layout.values(line)
        if isinstance(values, csv.Error) or len(values) != len(self.header) or len(values) < 2:
            return False
        whole = line.count('"') % 2 == 0 or (last and line.find('"') == len(line) - 1)
        return whole and not any(value[:1].isspace() for value in values[1:])

    def _parsed(self, number: int, raw: str | csv.Error) -> Record:
        where = f"{self.path} line {number + 1}"
        if isinstance(raw, csv.Error):
            return Record(where, {}, str(raw))
        values, names = self.layout.values(raw), self.header
        if isinstance(values, csv.Error):
            return Record(where, {}, f"is no row of a table ({values}): fix or drop it")
        if len(values) != len(names):
            advice = "quote or fix it" if self.layout.quoted else "fix it (tabs part values, which are not quoted here)"
            return Record(where, {}, f"has {len(values)} values, the first line names {len(names)} columns: {advice}")
        if not raw.isascii() and _UNDECODED.search(raw):
            return Record(where, {}, "is not UTF-8: convert the file")
        return Record(where, dict(zip(names, values, strict=True)))


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Lines without their ends; one beyond `_LONGEST` characters comes in pieces."""
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape")
    return (line.removesuffix("\n") for line in iter(partial(text.readline, _LONGEST), ""))
