"""Reads LUCY: JSON of `conversations [{role, content, wavpath, codec, speaker}]`, with SNAC codes in text files.

A `.snac` file has seven integers a frame, level by level: c0 | c1 c1 | c2 c2 c2 c2 (our `levels`), which is not the order of
the model's streams. Source: the data section of LUCY's README (VITA-MLLM/LUCY). The codes of the user's recordings are not
read; system messages before the first question are the row's, later ones have no place in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni.errors import UserError
from train.data.readers.codes import check_duration, read_codes
from train.data.readers.contract import ReaderOptions
from train.data.readers.dialogue import system_of, turns_of
from train.data.readers.files import Files, seconds
from train.data.readers.source import RecordReader, items, make_row, text
from train.data.rows.row import Codes, Row


def lucy_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one conversation; UserError where it is broken."""
    messages = items(data, "conversations")
    turns = turns_of(data, messages, files, lambda answers: [_codes(answer, files, options) for answer in answers])
    for turn in turns:
        check_duration(turn.answer_codes, seconds(turn.answer_audio))
    return make_row(turns, options, "lucy", where, id=text(data, "id"), system=system_of(data, messages))


def _codes(message: Mapping[str, Any], files: Files, options: ReaderOptions) -> Codes | None:
    """Read the codes of the file that an answer names."""
    name = text(message, "codec")
    if not name:
        return None
    path = files.file(name, "codes")
    try:
        written = path.read_text("utf-8")
    except ValueError as error:
        raise UserError(f"codes {name!r} are no text: seven integers a frame are expected") from error
    try:
        return read_codes(written, "snac", "levels", options)
    except UserError as error:
        raise UserError(f"codes {name!r}: {error}") from error


LUCY = RecordReader(
    "lucy",
    "LUCY: JSON of conversations with role, content, wavpath and .snac files; the same of text alone",
    lucy_row,
    (".json", ".jsonl"),
    (frozenset({"conversations"}),),
    inner=("conversations", frozenset({"role", "content"})),
    notice="SNAC codes are taken to be in the order {order} (c0 | c1 c1 | c2 c2 c2 c2 as the format documents it); "
    "system messages after the first question are left out",
    order="levels",
)
