"""Sources made of files of records and a function that turns a record into a row; typed access to a record's fields."""

from __future__ import annotations

import itertools
import os
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.stores.cache import has_pointers
from omni.stores.tries import StoreError
from train.data.executor import in_threads
from train.data.readers.codes import ROWS, check_order
from train.data.readers.containers import open_records
from train.data.readers.contract import Broken, OpenedSource, ReaderOptions
from train.data.readers.files import TAG, Files, list_files, recording_fields, refuse_pictures, tags
from train.data.readers.records import Record, Records
from train.data.rows.row import Row, RowTurn

FIRST_DEPTH = 1
"""Depth of the folders in which the first file of a format is looked for."""
_SAMPLE, _TOLD = 8, 20
"""First records whose fields are compared with what rows take, and names of fields that are told."""

UNTAKEN = "nothing takes the columns"

_BAD = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)
"""Exceptions that an unforeseen record may raise: they make it broken. UserError is a ValueError."""


class Fields(UserDict[str, Any]):
    """The fields of a record; `asked` has the names that a reader has looked for."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.asked: set[str] = set()
        super().__init__(data)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return name in self.data


@dataclass(frozen=True)
class RowMapper:
    """Makes rows of a format's records: `row(data, where, files=, options=)`."""

    row: Callable[..., Row]
    files: Files
    options: ReaderOptions

    def __call__(self, record: Record) -> Row | Broken:
        """Make the row of a record, or say why there is none; StoreError where a store does not give its recordings."""
        data, where = record.data, record.where
        if record.error:
            return Broken(where, record.error)
        try:
            refuse_pictures(data)
            row = self.row(data, where, files=self.files, options=self.options)
            recordings = recording_fields(data) if self.files.audio != "none" else []
            if recordings and not any(turn.question_audio or turn.answer_audio for turn in row.turns):
                asked = self.asked(data, where)
                if name := next((name for name in recordings if name not in asked), ""):
                    raise UserError(
                        f"has {name!r}, a recording that is not read there: call it question_audio (in a table, with "
                        f"--read.columns '{{question_audio: {name}}}'), or leave recordings out with --read.audio none"
                    )
            return row
        except StoreError:
            raise
        except _BAD as error:
            return Broken(where, one_line(error))

    def asked(self, data: Mapping[str, Any], where: str) -> set[str]:
        """Names of the fields that `row` looks for in a record; no recording is opened."""
        fields = Fields(data)
        self.row(fields, where, files=replace(self.files, audio="none"), options=self.options)
        return fields.asked


class RecordSource(OpenedSource):
    """A row for each record of some files, in their order. The source can be pickled where `make` can. `away`: whether
    recordings, or the files themselves, are in a store, where each takes a request."""

    def __init__(self, format: str, files: Sequence[Records], make: RowMapper, note: str = "") -> None:
        self.format, self._files, self._make = format, list(files), make
        self.away = any(has_pointers(str(file.path)) for file in self._files[:1])
        names, asked = dict[str, None](), set[str]()
        for record in itertools.chain.from_iterable(file.iterate(0, _SAMPLE) for file in self._files[:1]):
            with suppress(*_BAD):
                asked |= make.asked(record.data, record.where)
                names |= dict.fromkeys(record.data)
        near = {name: get_close_matches(name, asked - names.keys(), 1) for name in names if name and name not in asked}
        listed = [f"{name} (did you mean {close[0]}?)" if close else name for name, close in near.items()]
        untaken = f"{UNTAKEN} {', '.join(listed[:_TOLD])}{', ...' * (len(listed) > _TOLD)}" if listed else ""
        self.note = "; ".join(filter(None, (note, untaken)))

    def __len__(self) -> int:
        return sum((in_threads if self.away else map)(len, self._files))

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Row | Broken]:
        for file in self._files:
            # The records of the last file need not be counted, no file follows it; nor those of any where all are read.
            counted = file is not self._files[-1] and (start or stop is not None)
            count = len(file) if counted else 0
            if start < count or not counted:
                yield from (in_threads if self.away else map)(self._make, file.iterate(start, stop))
                # What was removed meanwhile looks like what is missing.
                if self.away and not has_pointers(path := str(self._files[0].path)):
                    raise StoreError(f"{path} was removed from the cache while it was read: run the same command again")
            start, stop = max(0, start - count), None if stop is None else stop - count
            if stop is not None and stop <= 0:
                return


def one_line(error: BaseException) -> str:
    """Message of an error in one line of valid UTF-8, with its type where it is no UserError or OSError."""
    said = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return said if isinstance(error, UserError | OSError) else f"{type(error).__name__}: {said}"


@dataclass(eq=False)
class RecordReader:
    """Reads a format whose rows are records; recognises it by file suffixes and the fields of the first record.

    Attributes:
        row: makes the row of a record: `row(data, where, files=, options=)`; UserError where it makes none.
        endings: suffixes of its files.
        fields: sets of fields; a first record with all of one set is of this format.
        also: what else is true of such a record.
        notice: see `OpenedSource.note`; `{order}` and `{codec}` are replaced by those in use.
        order: SNAC's order as the format documents it, checked on the first rows (`check_order`).
        codec: the codec as the format documents it.
        depth: depth of the folders in which its first file is looked for.
    """

    name: str
    summary: str
    row: Callable[..., Row]
    endings: tuple[str, ...]
    fields: tuple[frozenset[str], ...] = ()
    also: Callable[[Mapping[str, Any]], bool] = bool
    notice: str = ""
    order: str = ""
    codec: str = ""
    depth: int = FIRST_DEPTH

    def recognise(self, path: Path) -> bool:
        """True where the file, or the first in a folder, starts with a record of this format."""
        file = next(list_files(path, self.endings, self.depth), "") if path.is_dir() else str(path)
        return file.lower().endswith(self.endings) and os.path.isfile(file) and self.fits(open_records(Path(file)).first())

    def fits(self, record: Mapping[str, Any]) -> bool:
        """True where a record with these fields is of this format."""
        return any(fields <= record.keys() for fields in self.fields) and self.also(record)

    def records(self, path: Path) -> list[Records]:
        """The records of a file, or of those in a folder and below it; UserError where there are none."""
        files = list(list_files(path, self.endings)) if path.is_dir() else [path]
        if not files:
            raise UserError(f"data folder {path} holds no file that ends in {', '.join(self.endings)}")
        return [open_records(Path(file)) for file in files]

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        records = self.records(path)
        make = self.maker(Files.of(path, options), options, records[0].columns, str(records[0].path))
        note = self.notice.format(order=options.order or self.order, codec=options.codec or self.codec)
        source = RecordSource(self.name, records, make, note)
        if self.order and not options.order:
            check_order(source.iterate(0, ROWS), self.order, self.name)
        return source

    def maker(self, files: Files, options: ReaderOptions, columns: Callable[[], Collection[str]], where: str) -> RowMapper:
        """What makes the rows of records with these columns. `where` names the data."""
        return RowMapper(self.row, files, options)


# ------------------------------------------------------------------------------------------- fields of a record


def text(data: Mapping[str, Any], *names: str, needed: bool = False) -> str:
    """Read the first of these fields that is present, as text without surrounding whitespace; "" for null or none. UserError
    where it is no text or number, or has half a surrogate pair, or where it is needed and none is present."""
    for name in names:
        if name in data:
            value = data[name]
            if value is None:
                return ""
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise UserError(f"field {name!r} is {type(value).__name__}, not text: fix the row")
            return check_text(str(value).strip(), f"field {name!r}")
    if needed:
        raise UserError(f"has no field {' or '.join(repr(name) for name in names)}: its fields are {', '.join(data) or 'none'}")
    return ""


def check_text(said: str, noun: str) -> str:
    """Return the text; UserError where it has half a surrogate pair, which JSON can write and no file of rows can store."""
    try:
        said.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{noun} holds {said[error.start]!a}, half a surrogate pair: fix or drop the row") from error
    return said


def number(data: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Read a finite number; UserError for anything else, or where it is absent and there is no default."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise UserError(f"field {name!r} is {_shown(value)}, not a number: fix the row")
    return float(value)


def items(data: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Read a list of objects, at least one; UserError for anything else."""
    value = data.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        raise UserError(f"field {name!r} is {_shown(value)}, not a list of objects: fix the row")
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{value!r:.60}"


def make_row(turns: Sequence[RowTurn], options: ReaderOptions, format: str, where: str, **fields: str) -> Row:
    """Make the row of these turns; UserError where a turn is empty, or a text has a tag of a recording that is not there.
    `fields` are further fields of `Row` from the data; an empty `language` becomes that of the options."""
    turns = [_untagged(turn) for turn in turns]
    for index, turn in enumerate(turns):
        if not (turn.question_text or turn.answer_text or turn.question_audio or turn.answer_audio or turn.answer_codes):
            raise UserError(f"turn {index} holds neither text, recording nor codes: drop the row")
    if not turns:
        raise UserError("holds no question and no answer: drop the row")
    fields["language"] = fields.get("language") or options.language
    return Row(tuple(turns), source=options.name or format, task=options.task, where=where, **fields)  # type: ignore[arg-type]


def _untagged(turn: RowTurn) -> RowTurn:
    """The turn without tags of recordings. What stands beside that of a question is about the recording, not what is said."""
    if "<" not in turn.question_text and "<" not in turn.answer_text:
        return turn
    for name, recording in (("question", turn.question_audio), ("answer", turn.answer_audio or turn.answer_codes)):
        said = getattr(turn, f"{name}_text")
        count, tag = tags(said), TAG.search(said)
        if tag and (count > 1 or (count and not recording)):
            has = f"{tag[0]!r:.60} and so tags of {count} recordings, and {int(bool(recording))} is there"
            raise UserError(f"its {name} has {has}: fix or drop the row")
        if tag:
            rest = "" if count and name == "question" else TAG.sub("", said).strip()
            turn = replace(turn, **{f"{name}_text": rest})  # type: ignore[arg-type]
    return turn
