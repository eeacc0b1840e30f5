"""Reads a question, or a question with its answer, a row: tables of your own, prepared rows, Common Voice, LibriSpeech, and
recordings alone; words what a file of no known format holds.

A table of your own has some of these columns; others are mapped (`ReaderOptions.columns`: field to column), never guessed.

    question_audio, question_text, answer_audio, answer_text       what the turn holds; paths of recordings and texts
    id, speaker, language                                          of the row

Common Voice: a table such as `train.tsv` with `client_id, path, sentence` (and `locale`, ...), recordings in `clips/` beside
it. LibriSpeech: folders `<speaker>/<chapter>/` with a `<speaker>-<chapter>.trans.txt`, a line `<id> <TEXT>` for each
`<id>.flac` beside it. Both give questions with recording and text, and no answers. Recordings alone give questions that
have nothing else: an encoder is distilled on them (`objective.distill_weight`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omni.audio.decode import SUFFIXES
from omni.errors import UserError
from omni.plugins import PLUGIN
from train.data.readers.containers import ENDINGS, TAR, TRANSCRIPT, open_records
from train.data.readers.contract import ReaderOptions
from train.data.readers.files import Files, list_files, seconds
from train.data.readers.records import Record, Records, TableRecords
from train.data.readers.source import FIRST_DEPTH, RecordReader, RowMapper, make_row, text
from train.data.rows.row import ROW_VERSION, Row, RowTurn, Sound, from_plain

_USUAL = {
    "question_audio": "audio wav audio_path audio_file audio_filepath question_wav file_name path file",
    "question_text": "question text transcript transcription sentence instruction prompt",
    "answer_text": "answer response output reply",
    "answer_audio": "answer_wav response_audio",
}
"""Usual column names of a row's fields: suggested in messages, never used by themselves."""


def columns_flag(columns: Iterable[str]) -> str:
    """Suggest the option that maps columns like these, for the command line."""
    plain = {name: name.lower().replace(" ", "_") for name in reversed(list(columns))}
    mapping = {field: name for field, usual in _USUAL.items() for name, known in plain.items() if known in usual.split()}
    maps = ", ".join(f"{field}: {name}" for field, name in mapping.items()) or "question_text: COLUMN"
    return f"--read.columns '{{{maps}}}'"


def unknown(path: Path, formats: Sequence[str]) -> str:
    """Message for data of no known format: what was found, and what to do."""
    start = f"data {path} is of no format known here:"
    named = f"name the format with --read.format, one of {', '.join(formats)} ({PLUGIN})"
    files = list_files(path, ENDINGS, FIRST_DEPTH) if path.is_dir() else [str(path)]
    file = next((Path(file) for file in files if file.lower().endswith(ENDINGS)), None)
    if file is None:
        held = "it holds no file that ends in" if path.is_dir() else "its name ends in none of"
        return f"{start} {held} {', '.join(ENDINGS)}; {named}"
    content, advice = _look(file)
    subject = "it" if file == path else f"its first file, {file.relative_to(path)},"
    return f"{start} {subject} {content}" + (f"; {advice}, or {named}" if advice else ": name other data")


def _look(file: Path) -> tuple[str, str]:
    """Describe what a file holds, and what may help; "" where nothing does."""
    records = open_records(file)
    columns, first = records.columns(), next(records.iterate(0, 1), None)
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


class TableReader(RecordReader):
    """Reads one file (or a folder with one such file, or with WebDataset shards alone)."""

    def recognise(self, path: Path) -> bool:
        files = self._files(path)
        return one_table(files) and self.fits(dict.fromkeys(open_records(files[0]).columns()))

    def records(self, path: Path) -> list[Records]:
        files = self._files(path)
        if not one_table(files):
            raise UserError(f"{path} holds {len(files)} tables (.csv, .tsv, .jsonl, .json, .parquet, .tar): name one")
        return list(map(open_records, files))

    def maker(self, files: Files, options: ReaderOptions, columns: Callable[[], Collection[str]], where: str) -> RowMapper:
        """What makes rows of a table with these columns; UserError where these do not fit."""
        held, fields = columns(), (*TURN, *ROW)
        if not held:
            raise UserError(f"{where} names no columns: it is empty, or does not start with a row; name other data, or fix it")
        for field, column in options.columns.items():
            if field not in fields:
                raise UserError(f"--read.columns maps {field!r}, which is no field of a row: there are {', '.join(fields)}")
            if column not in held:
                raise UserError(f"{where} has no column {column!r}: it has {', '.join(held)}")
        if not any(options.columns.get(field, field) in held for field in TURN):
            raise UserError(
                f"{where} has none of the columns {', '.join(TURN)}: it has {', '.join(held)}; "
                f"map them, such as with {columns_flag(held)}"
            )
        return RowMapper(partial(table_row, names=options.columns), files, options)

    def _files(self, path: Path) -> list[Path]:
        files = list_files(path, self.endings, 0) if path.is_dir() else [str(path)]
        return [Path(file) for file in files if file.lower().endswith(self.endings)]


def one_table(files: Sequence[Path]) -> bool:
    """True for a single file, and for WebDataset shards."""
    return len(files) == 1 or (len(files) > 1 and all(file.name.lower().endswith(TAR) for file in files))


def table_row(
    data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions, names: Mapping[str, str], format: str = "table"
) -> Row:
    """Make the row of one record; UserError where it has none of the parts of a turn, or one is broken. `names`: the columns of
    fields, where these have other names."""
    texts = {field: text(data, names.get(field, field)) for field in (*ROW, "question_text", "answer_text")}
    question, answer = (files.sound(data.get(names.get(field, field))) for field in ("question_audio", "answer_audio"))
    turn = RowTurn(texts.pop("question_text"), question, texts.pop("answer_text"), answer)
    return make_row([turn], options, format, where, **texts)


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
    (".parquet", TAR),
    (frozenset({"version", "turns"}),),
)

TABLE = TableReader(
    "table",
    "CSV, TSV, JSON lines, Parquet or .tar with question_audio, question_text, answer_audio, answer_text (or columns mapped)",
    partial(table_row, names={}),
    ENDINGS,
    tuple(frozenset({field}) for field in TURN),
)


class CommonVoice(RecordReader):
    """Reads one table of Common Voice, given as the file or as a folder with one table."""

    def recognise(self, path: Path) -> bool:
        return bool(self._tables(path))

    def records(self, path: Path) -> list[Records]:
        tables = self._tables(path)
        if not tables:
            raise UserError(f"{path} is no .tsv with the columns client_id, path, sentence, and holds none")
        if len(tables) > 1:
            names = ", ".join(table.path.name for table in tables)
            raise UserError(f"{path} holds several tables, which share rows: name one of {names} in it")
        return list(tables)

    def _tables(self, path: Path) -> Sequence[TableRecords]:
        files = list_files(path, self.endings, 0) if path.is_dir() else [str(path)]
        tables = [TableRecords(Path(file)) for file in files if file.endswith(self.endings)]
        return [table for table in tables if self.fits(dict.fromkeys(table.layout.names))]


def common_voice_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one line; UserError where its recording is missing or broken."""
    name, said = text(data, "path", needed=True), text(data, "sentence", needed=True)
    if not name or not said:
        raise UserError(f"has no {'path' if not name else 'sentence'}: drop the row")
    clip = name if "/" in name else f"clips/{name}"
    turn = RowTurn(question_text=said, question_audio=files.sound(clip))
    speaker, language = text(data, "client_id"), text(data, "locale")
    return make_row([turn], options, "common-voice", where, id=Path(name).stem, speaker=speaker, language=language)


COMMON_VOICE = CommonVoice(
    "common-voice",
    "Common Voice: a .tsv with client_id, path, sentence and the folder clips/ beside it",
    common_voice_row,
    (".tsv",),
    (frozenset({"client_id", "path", "sentence"}),),
)


LIBRISPEECH = RecordReader(
    "librispeech",
    "LibriSpeech: folders with *.trans.txt and a .flac for each of their lines",
    partial(table_row, names={}, format="librispeech"),
    (TRANSCRIPT,),
    (frozenset({"id", "question_text"}),),
    depth=sys.maxsize,
)


class RecordingsReader(RecordReader):
    """Reads a folder that holds recordings and nothing else, in folders of any depth; a row for each."""

    def recognise(self, path: Path) -> bool:
        names = (name.lower() for name in list_files(path))
        return next(names, "").endswith(SUFFIXES) and all(name.endswith(SUFFIXES) for name in names)

    def records(self, path: Path) -> list[Records]:
        records = SoundFiles(path)
        if not len(records):
            raise UserError(f"data folder {path} holds no recording ({', '.join(SUFFIXES[:4])})")
        return [records]


class SoundFiles(Records):
    """The recordings in a folder, or one recording, as records of `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = list(list_files(path, SUFFIXES)) if path.is_dir() else [str(path)]

    def __len__(self) -> int:
        return len(self._files)

    def _raw(self, start: int) -> tuple[int, Iterator[Record]]:
        return start, (Record(file, {"path": os.path.abspath(file)}) for file in self._files[start:])


def recording_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one recording; UserError where it is broken."""
    name = files.locate(data["path"])[0]
    return make_row([RowTurn(question_audio=files.sound(name))], options, "recordings", where, id=name)


RECORDINGS = RecordingsReader(
    "recordings",
    "recordings without texts: a folder of .flac, .wav, .mp3, .m4a or the like and nothing else",
    recording_row,
    SUFFIXES,
)
