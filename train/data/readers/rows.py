"""Reads rows that are prepared already (`train.data.rows.row`), to prepare them again: for another codec, or spoken again.

Rows come as they are stored, words and starts included; `ReaderOptions.name` and `ReaderOptions.task` replace their own values,
and `ReaderOptions.language` is used where they have none. With `ReaderOptions.audio` "none" all their recordings are left out,
so that a preparation speaks them again; codes stay, and are used where they are of the wanted codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omni.errors import UserError
from omni.stores.tries import StoreError
from train.data.readers.contract import ReaderOptions
from train.data.readers.files import Files, seconds
from train.data.readers.source import RecordReader, make_row, one_line
from train.data.rows.row import ROW_VERSION, Row, Sound, from_plain


def stored_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make a row of one of our own stored rows; UserError where columns are missing or it breaks the format."""
    if data.get("version") != ROW_VERSION:
        raise UserError(f"is of version {data.get('version')}; this is version {ROW_VERSION}: prepare the data again")
    try:
        row = from_plain(data, files.folder, where)
    except KeyError as error:
        raise UserError(f"has no {error} where a row has it: its file is of another format, prepare it again") from error
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last is torch's
        raise UserError(f"breaks the format of a row ({one_line(error)}): prepare it again") from error
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
    try:
        seconds(sound)
    except StoreError:
        raise
    except UserError:
        return None
    return sound


ROWS = RecordReader(
    "rows",
    "Parquet of prepared rows, as `train data prepare` writes them, such as to prepare them for another codec",
    stored_row,
    (".parquet",),
    (frozenset({"version", "turns"}),),
)
