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
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from omni.audio.decode import SUFFIXES
from omni.errors import UserError
from omni.files import refuse_pointer
from train.data.rows.reference import DataFile


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

    _count: int | None = None  # once they have been counted

    def __init__(self, path: DataFile) -> None:
        self.path = path

    def __len__(self) -> int:
        if self._count is None:
            self._count = sum(1 for _ in self._raw(0)[1])
        return self._count

    @abstractmethod
    def _raw(self, start: int) -> tuple[int, Iterator[Any]]:
        """Raw records from the nearest place at or before `start` that can be entered, and the number of the first."""

    def _record(self, raw: Any) -> Record:
        """Parse a raw record; here one that is a record already."""
        record: Record = raw
        return record

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Iterate over records `start` to `stop`; a range that starts where the last one ended goes on there."""
        process, owner, at, raw = _kept.pop() if _kept else (0, None, 0, iter(()))
        kept = (at, raw) if process == os.getpid() and owner is self and at <= start else (-1, raw)
        at, raw = max(kept, self._raw(start), key=itemgetter(0))
        last = None if stop is None else max(start, stop)
        yield from map(self._record, itertools.islice(raw, start - at, None if last is None else last - at))
        if last is not None:
            _kept[:] = [(os.getpid(), self, last, raw)]

    def first(self) -> Mapping[str, Any]:
        """Fields of the first record; empty where it cannot be read, or there is none."""
        return next((record.data for record in self.iterate(0, 1)), {})

    def columns(self) -> list[str]:
        """Names of the first record's fields; empty where they cannot be read. UserError for text that is no UTF-8, and for two
        columns of one name."""
        return list(self.first())


_kept: list[tuple[int, Records, int, Iterator[Any]]] = []
"""At most one reading, with its process (a forked one shares the place in an open file, and must not read on there), and the
number of its next record."""

atexit.register(_kept.clear)  # before the modules that close its file are torn down


_CHUNK = 1 << 20
_LONGEST = 64 << 20  # characters of one element of a JSON array, or of a line; beyond it the file is taken to be damaged
_LONGEST_HEADER, _MOST_LINES = 1 << 17, 1000  # characters of a table's first line, and lines of one of its rows
_SEPARATOR, _QUOTED = re.compile(r'"?sep=([,;\t|])"?', re.IGNORECASE), re.compile(r'"[^"]*"')
_UNDECODED = re.compile("[\udc80-\udcff]")
csv.field_size_limit(_LONGEST)
_BETWEEN = re.compile(r"[ \t\r\n,]*")


def open_binary(path: Path) -> IO[bytes]:
    """Open a file, unpacked where its name ends in .gz; UserError for a pointer of Git LFS."""
    refuse_pointer(path)
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


class TextRecords(Records):
    """Records of a text file: a raw one is its number, and its line, element or values, or the error in their place."""

    path: Path
    unit, first_number = "line", 1
    """Words of a record's place."""

    @abstractmethod
    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
        """Yield the raw records of an open file."""

    @abstractmethod
    def _fields(self, part: Any) -> Any:
        """Parse a raw record; UserError where it is none."""

    def columns(self) -> list[str]:
        with suppress(OSError, EOFError, zlib.error), open_binary(self.path) as file:
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UserError(f"{self.path} is UTF-16; save it as UTF-8")
        return super().columns()

    def _raw(self, start: int) -> tuple[int, Iterator[tuple[int, Any]]]:
        return 0, self._all()

    def _all(self) -> Iterator[tuple[int, Any]]:
        number = -1
        try:
            with open_binary(self.path) as file:
                for number, part in self._parts(file):
                    yield number, part
        except (OSError, EOFError, zlib.error) as error:
            yield number + 1, UserError(f"the file cannot be read from here on ({error}): download or copy it again")

    def _record(self, raw: tuple[int, Any]) -> Record:
        number, part = raw
        where = f"{self.path} {self.unit} {number + self.first_number}"
        try:
            if isinstance(part, UserError):
                raise part
            data = self._fields(part)
        except UserError as error:
            return Record(where, {}, str(error))
        if isinstance(data, dict):
            return Record(where, data)
        return Record(where, {}, f"is {type(data).__name__}, not an object with fields: fix or drop it")


class JsonLines(TextRecords):
    """Records of JSON lines, an object each, also with a comma after it; empty lines are skipped."""

    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        return ((number, line) for number, line in enumerate(file) if line.strip())

    def _fields(self, part: bytes) -> Any:
        try:
            data = json.loads(part.removeprefix(codecs.BOM_UTF8).decode().rstrip(", \t\r\n"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"is no JSON ({error}): fix or drop the line") from error
        nonfinite = (b"N" in part and b"NaN" in part) or (b"I" in part and b"Infinity" in part)  # one byte is found faster
        return finite(data) if nonfinite else data


class Transcript(JsonLines):
    """Records of LibriSpeech's transcripts, lines of a name, which a recording beside the file has, and a text."""

    def _fields(self, part: bytes) -> dict[str, str]:
        try:
            name, _, said = part.decode().strip().partition(" ")
        except UnicodeDecodeError as error:
            raise UserError("is not UTF-8: convert the file") from error
        if not said.strip() or Path(name).name != name:
            raise UserError(f"{name!r} is not followed by a text: a line is <id> <TEXT>")
        start = self.path.parent.resolve() / name
        ending = next((ending for ending in SUFFIXES if os.path.isfile(f"{start}{ending}")), SUFFIXES[0])
        return {"id": name, "question_text": said, "question_audio": f"{start}{ending}", "speaker": name.partition("-")[0]}


class JsonArray(TextRecords):
    """Records of one JSON array, read element by element. An element that is no JSON is an error, and the last record."""

    unit, first_number = "row", 0

    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
        stream, decode = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape"), json.JSONDecoder().raw_decode
        text, number = stream.read(_CHUNK), 0
        at = text.index("[") + 1
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith("]", at):
                if text[at + 1 :].strip() or stream.read(_CHUNK).strip():
                    yield number, _no_array("more follows the end of the array")
                return
            problem: object = "the array is not closed"
            try:
                element, end = decode(text, at)
            except (ValueError, RecursionError) as error:
                problem, end = error, len(text)
            if end < len(text):  # complete only where text follows: a number may go on in the next chunk
                yield number, element
                at, number = end, number + 1
                continue
            more = stream.read(max(_CHUNK, len(text) - at)) if len(text) - at <= _LONGEST else ""
            if not more:
                yield number, _no_array(problem)
                return
            text, at = text[at:] + more, 0

    def _fields(self, part: Any) -> Any:
        return finite(part)


def _no_array(problem: object) -> UserError:
    return UserError(f"is no JSON, and what follows cannot be read either ({problem}): fix the file")


class TableLayout(NamedTuple):
    """Names of the columns of a table, the lines that come before its rows, and how these are read (`csv.reader`)."""

    names: list[str]
    lines: int
    style: dict[str, Any]


class TableRecords(TextRecords):
    """Records of a table whose first line names its columns, parted by the comma, semicolon, tab or bar that it has most of (or
    that `sep=;` before it says). Lines end in LF, CR LF or CR. Values may be quoted, but not in .tsv between tabs. A quote that
    is not closed, or only after lines that are rows of their own, breaks the row that opens it and no other."""

    def columns(self) -> list[str]:
        super().columns()
        twice = [name for name, count in Counter(self.layout.names).items() if count > 1]
        if twice:
            raise UserError(f"{self.path} has the column {twice[0]!r} more than once; give each column a name of its own")
        return self.layout.names

    @cached_property
    def layout(self) -> TableLayout:
        """How the table is written; UserError where its first line is too long for a table, or opens a quote."""
        names, number, style = list[str](), 0, dict[str, Any](strict=True)
        with suppress(OSError, EOFError, zlib.error), open_binary(self.path) as file:
            lines = _lines(file)
            first = next(lines, "")
            if said := _SEPARATOR.fullmatch(first.removesuffix("\n")):
                first, number = next(lines, ""), 1
            if len(first) > _LONGEST_HEADER:
                raise UserError(f"{self.path}: its first line is too long for names of columns; name other data")
            tabs = self.path.name.lower().removesuffix(".gz").endswith(".tsv") and "\t" in first and not said
            style["delimiter"] = said[1] if said else "\t" if tabs else max(",;\t|", key=_QUOTED.sub("", first).count)
            style["quoting"] = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
            reader = csv.reader(itertools.islice(itertools.chain([first], lines), _MOST_LINES), **style)
            try:
                names = [name.strip() for name in next(reader, [])]
            except csv.Error as error:
                why = f"its names of columns are no row of a table ({error}): fix the line"
                raise UserError(f"{self.path} line 1: {why}") from error
            number += reader.line_num
        return TableLayout(names, number, style)

    def _parts(self, file: IO[bytes]) -> Iterator[tuple[int, list[str] | UserError]]:
        names, number, style = self.layout
        following = itertools.islice(_lines(file), number, None)
        ahead, taken = deque[str](), list[str]()  # lines that a broken row has given back, and those of a row

        def lines() -> Iterator[str]:
            while len(taken) < _MOST_LINES and (line := ahead.popleft() if ahead else next(following, "")):
                taken.append(line)
                yield line

        reader = csv.reader(lines(), **style)
        while True:
            taken.clear()
            values: list[str] | UserError
            try:
                values = next(reader, [])
                split = (line.split(style["delimiter"]) for line in taken[1:-1])  # prose has a space after a comma
                rows = sum(len(s) == len(names) > 1 and not any(v[:1].isspace() for v in s[1:]) for s in split)
                why = "closes a quote only after lines that are rows of their own" if 2 * rows > len(taken[1:-1]) else ""
            except csv.Error as error:
                why = "opens a quote that is not closed in it" if len(taken) > 1 else f"is no row of a table ({error})"
            if not taken:
                return
            if why:
                values = UserError(f"{why}: close the quote, or write it twice")
                ahead.extendleft(reversed(taken[1:]))
                del taken[1:]
                reader = csv.reader(lines(), **style)
            if values:
                yield number, values
            number += len(taken)

    def _fields(self, part: list[str]) -> dict[str, str]:
        names, said = self.layout.names, "".join(part)
        if len(part) != len(names):
            quoted = self.layout.style["quoting"] != csv.QUOTE_NONE
            advice = "quote or fix it" if quoted else "fix it (tabs part values, which are not quoted here)"
            raise UserError(f"has {len(part)} values, the first line names {len(names)} columns: {advice}")
        if not said.isascii() and _UNDECODED.search(said):
            raise UserError("is not UTF-8: convert the file")
        return dict(zip(names, part, strict=True))


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Lines with their ends; one beyond `_LONGEST` characters comes in pieces."""
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape")
    return iter(partial(text.readline, _LONGEST), "")
