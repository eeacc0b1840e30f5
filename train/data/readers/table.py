"""Reads tables and JSON lines of your own, and rows that are prepared already; words what a file of no known format holds.

    question_audio, question_text, answer_audio, answer_text       what the turn holds; paths of recordings and texts
    id, speaker, language                                          of the row

Other names are mapped (`ReaderOptions.columns`: field to column), never guessed.
"""

from __future__ import annotations

import codecs
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.plugins import PLUGIN
from train.data.readers.containers import ENDINGS, TAR, ParquetRecords, open_records
from train.data.readers.contract import OpenedSource, ReaderOptions
from train.data.readers.files import Files, list_files, seconds
from train.data.readers.records import TableRecords, open_binary
from train.data.readers.source import FIRST_DEPTH, MakeRow, RecordReader, RecordSource, RowMapper, make_row, text
from train.data.rows.row import ROW_VERSION, Row, RowTurn, Sound, from_plain

_USUAL = {
    "question_audio": "audio wav audio_path audio_file audio_filepath question_wav file_name path file",
    "question_text": "question text transcript transcription sentence instruction prompt",
    "answer_text": "answer response output reply",
    "answer_audio": "answer_wav response_audio",
}
"""Usual column names of a row's fields: suggested in messages, never used by themselves."""


def columns_of(path: Path) -> list[str]:
    """Columns of a table, or fields of the first record; empty where they cannot be read. UserError for text in another
    encoding, and for two columns of one name."""
    records = open_records(path)
    if isinstance(records, ParquetRecords):
        return records.columns()
    with suppress(OSError, EOFError, zlib.error), open_binary(path) as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path} is UTF-16; save it as UTF-8")
    if not isinstance(records, TableRecords):
        return list(records.first())
    twice = next((name for name, count in Counter(records.header).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"{path} has the column {twice!r} more than once; give each column a name of its own")
    return records.header


def columns_flag(columns: Iterable[str]) -> str:
    """Suggest the option that maps columns like these, for the command line."""
    plain = {name: name.lower().replace(" ", "_") for name in reversed(list(columns))}
    mapping = {field: name for field, usual in _USUAL.items() for name, known in plain.items() if known in usual.split()}
    maps = ", ".join(f"{field}: {name}" for field, name in mapping.items()) or "question_text: COLUMN"
    return f"--read.columns '{{{maps}}}'"


def unknown(path: Path, formats: Sequence[str]) -> str:
    """Message for data of no known format: what was found, and what to do."""
    named = f"name the format with --read.format, one of {', '.join(formats)} ({PLUGIN})"
    file, subject = path, "it"
    if path.is_dir():
        first = next(list_files(path, ENDINGS, FIRST_DEPTH), None)
        if first is None:
            return f"data {path} is of no format known here: it holds no file that ends in {', '.join(ENDINGS)}; {named}"
        file, subject = Path(first), f"its first file, {Path(first).relative_to(path)},"
    elif not file.name.lower().endswith(ENDINGS):
        return f"data {path} is of no format known here: its name ends in none of {', '.join(ENDINGS)}; {named}"
    content, advice = _look(file)
    what_to_do = f"; {advice}, or {named}" if advice else ": name other data"
    return f"data {path} is of no format known here: {subject} {content}{what_to_do}"


def _look(file: Path) -> tuple[str, str]:
    """Describe what a file holds, and what may help; "" where nothing does."""
    columns = columns_of(file)
    first = next(open_records(file).iterate(0, 1), None)
    if first is None and not columns:
        return "is empty", ""
    if first is not None and first.error and not columns:
        text = file.name.lower().removesuffix(".gz").endswith((".json", ".jsonl"))
        advice = "make it a list of JSON objects, or one object a line" if text else "fix it"
        return f"does not start with a row ({first.error})", advice
    if not any(columns):
        return "names no columns", ""
    fields = first.data if first else {}
    for name, value in fields.items():
        if len(fields) == 1 and isinstance(value, list) and value and isinstance(value[0], Mapping):
            return f"has all under {name!r}, a list", "write that list to a file of its own"
    return (
        f"has the columns {', '.join(columns)}",
        f"name those that hold texts and recordings, such as with {columns_flag(columns)}",
    )


TURN = ("question_audio", "question_text", "answer_audio", "answer_text")
ROW = ("id", "speaker", "language")


class TableReader:
    """Reads one file (or a folder with one such file, or with WebDataset shards alone)."""

    name = "table"
    summary = (
        "CSV, TSV, JSON lines, Parquet or .tar with question_audio, question_text, answer_audio, answer_text (or columns "
        "mapped)"
    )

    def recognise(self, path: Path) -> bool:
        files = self._files(path)
        return one_table(files) and bool(set(TURN) & set(columns_of(files[0])))

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        files = self._files(path)
        if not one_table(files):
            raise UserError(f"{path} holds {len(files)} tables (.csv, .tsv, .jsonl, .json, .parquet, .tar): name one")
        columns = columns_of(files[0])
        if not columns:
            raise UserError(
                f"{files[0]} names no columns: it is empty, or does not start with a row; name other data, or fix it"
            )
        make = self.maker(Files.of(path, options), options, columns, str(files[0]))
        return RecordSource(self.name, list(map(open_records, files)), make)

    def maker(self, files: Files, options: ReaderOptions, columns: Collection[str], where: str) -> MakeRow:
        """The function that makes rows of a table with these columns; UserError where these do not fit. `where` names it."""
        unknown = [field for field in options.columns if field not in (*TURN, *ROW)]
        if unknown:
            raise UserError(
                f"--read.columns maps {unknown[0]!r}, which is no field of a row: there are {', '.join((*TURN, *ROW))}"
            )
        names = {field: options.columns.get(field, field) for field in (*TURN, *ROW)}
        missing = [column for field, column in options.columns.items() if column not in columns]
        if missing:
            raise UserError(f"{where} has no column {missing[0]!r}: it has {', '.join(columns)}")
        if not any(names[field] in columns for field in TURN):
            raise UserError(
                f"{where} has none of the columns {', '.join(TURN)}: it has {', '.join(columns)}; "
                f"map them, such as with {columns_flag(columns)}"
            )
        return RowMapper(partial(table_row, names=names), files, options)

    def _files(self, path: Path) -> list[Path]:
        if path.is_dir():
            return [Path(file) for file in list_files(path, ENDINGS, 0)]
        return [path] if path.name.lower().endswith(ENDINGS) else []


def one_table(files: Sequence[Path]) -> bool:
    """True for a single file, and for WebDataset shards."""
    return len(files) == 1 or (len(files) > 1 and all(file.name.lower().endswith(TAR) for file in files))


def table_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions, names: Mapping[str, str]) -> Row:
    """Make the row of one record; UserError where it has none of the parts of a turn, or one is broken."""
    turn = RowTurn(
        question_text=text(data, names["question_text"]),
        question_audio=files.sound(data.get(names["question_audio"])),
        answer_text=text(data, names["answer_text"]),
        answer_audio=files.sound(data.get(names["answer_audio"])),
    )
    fields = {field: text(data, names[field]) for field in ROW}
    return make_row([turn], options, "table", where, **fields)


def stored_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make a row of one of our own stored rows; UserError where columns are missing or it breaks the format."""
    if data.get("version") != ROW_VERSION:
        raise UserError(f"is of version {data.get('version')}; this is version {ROW_VERSION}: prepare the data again")
    row = from_plain(data, files.folder, where)
    if files.audio != "required":
        turns = (
            replace(turn, question_audio=_wanted(turn.question_audio, files), answer_audio=_wanted(turn.answer_audio, files))
            for turn in row.turns
        )
        row = replace(row, turns=tuple(turns))
    fields = {"id": row.id, "speaker": row.speaker, "language": row.language}
    made = make_row(row.turns, options, row.source or "rows", where, **fields)
    return replace(made, task=options.task or row.task, system=row.system)


def _wanted(sound: Sound | None, files: Files) -> Sound | None:
    """The recording; None where there is none, `ReaderOptions.audio` is "none", or its header cannot be read."""
    if sound is None or files.audio == "none":
        return None
    return sound if files.or_without(lambda: seconds(sound)) is not None else None


ROWS = RecordReader(
    "rows",
    "Parquet of prepared rows, as `train data prepare` writes them, such as to prepare them for another codec",
    stored_row,
    (".parquet",),
    (frozenset({"version", "turns"}),),
)
