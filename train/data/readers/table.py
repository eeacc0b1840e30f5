"""Reads a table or JSON lines of your own: a row each, with columns named as the row's fields, or mapped to them.

    question_audio, question_text, answer_audio, answer_text       what the turn holds; paths of recordings and texts
    id, speaker, language                                          of the row

Other names are mapped (`ReaderOptions.columns`: field to column), never guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omni.errors import UserError
from train.data.readers.contract import OpenedSource, ReaderOptions
from train.data.readers.files import Files
from train.data.readers.layout import ENDINGS, columns_flag, columns_of
from train.data.readers.listing import entries
from train.data.readers.records import open_records
from train.data.readers.shards import TAR
from train.data.readers.source import MakeRow, RecordSource, RowMapper, make_row, text
from train.data.rows.row import Row, RowTurn

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
        """What makes the row of a record of a table with these columns; UserError where they do not fit. `where` names it."""
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
        if not path.is_dir():
            return [path] if path.name.lower().endswith(ENDINGS) else []
        names = (entry.name for entry in entries(path))
        return sorted(path / name for name in names if name.lower().endswith(ENDINGS) and not name.startswith("."))


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
