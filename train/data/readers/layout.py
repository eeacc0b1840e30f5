"""Reads the column names of data files, and words the message for data that no reader recognises."""

from __future__ import annotations

import codecs
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from omni.errors import UserError
from omni.plugins import PLUGIN
from train.data.readers.records import ParquetRecords, TableRecords, open_binary, open_records
from train.data.readers.source import data_files

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".tar")

_USUAL = {
    "question_audio": (
        "audio",
        "wav",
        "audio_path",
        "audio_file",
        "audio_filepath",
        "question_wav",
        "file_name",
        "path",
        "file",
    ),
    "question_text": ("question", "text", "transcript", "transcription", "sentence", "instruction", "prompt"),
    "answer_text": ("answer", "response", "output", "reply"),
    "answer_audio": ("answer_wav", "response_audio"),
}
"""Usual column names of a row's fields: suggested in messages, never used by themselves."""


def columns_of(path: Path) -> list[str]:
    """Columns of a table, or fields of the first record; empty where they cannot be read.

    UserError for text in another encoding, and for two columns of one name.
    """
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
    found = {field: name for field, usual in _USUAL.items() for name, known in plain.items() if known in usual}
    maps = ", ".join(f"{field}: {name}" for field, name in found.items()) or "question_text: COLUMN"
    return f"--read.columns '{{{maps}}}'"


def unknown(path: Path, formats: Sequence[str]) -> str:
    """Message for data of no known format: what was found, and what to do."""
    named = f"name the format with --read.format, one of {', '.join(formats)} ({PLUGIN})"
    file, which = path, "it"
    if path.is_dir():
        files = data_files(path, ENDINGS)
        if not files:
            return f"data {path} is of no format known here: it holds no file that ends in {', '.join(ENDINGS)}; {named}"
        file, which = files[0], f"its first file, {files[0].relative_to(path)},"
    elif not file.name.lower().endswith(ENDINGS):
        return f"data {path} is of no format known here: its name ends in none of {', '.join(ENDINGS)}; {named}"
    found, advice = _look(file)
    what_to_do = f"; {advice}, or {named}" if advice else ": name other data"
    return f"data {path} is of no format known here: {which} {found}{what_to_do}"


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
