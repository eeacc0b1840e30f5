"""Reads LLaMA-Omni and VocalNet: JSON of `id, speech, conversations [{from: human | gpt, value}]`, units in .npy files.

`speech` is the recording of the question, or a list with one for each human message (`audio`, `audios`, messages of type
audio, ... are taken too, see `media`). A human value with `<speech>` in it is an instruction about the recording ("Please
directly answer ..."), not what is said there: it is no question text. `units` are
those of the answers: a path to an .npy file, a list of integers or their text, or a list of paths, one for each answer. Their
codec is not written anywhere (CosyVoice 2 for VocalNet and LLaMA-Omni 2, HuBERT clusters for LLaMA-Omni), so
`ReaderOptions.codec` must say it. `user` and `assistant` are taken for human and gpt; system messages before the first
question are the row's, later ones have no place in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni.errors import UserError
from train.data.readers.codes import load_array, read_codes
from train.data.readers.contract import ReaderOptions
from train.data.readers.dialogue import system_of, turns_of
from train.data.readers.files import Files
from train.data.readers.source import RecordReader, items, make_row, text
from train.data.rows.row import Codes, Row

_UNITS = ("units", "unit", "tgt_units", "tgt_unit")


def llama_omni_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one conversation; UserError where it is broken."""
    messages = items(data, "conversations")
    units = next((data[name] for name in _UNITS if data.get(name) is not None), None)
    turns = turns_of(
        data, messages, files, lambda answers: [_codes(one, files, options) for one in _for_each(units, len(answers))]
    )  # fmt: skip
    return make_row(turns, options, "llama-omni", where, id=text(data, "id"), system=system_of(data, messages))


def _for_each(value: Any, count: int) -> list[Any]:
    """Assign units to each answer. A list of integers, or what is no list, belongs to the last: earlier ones have none."""
    if not isinstance(value, list) or all(isinstance(element, int) for element in value):
        return [None] * (count - 1) + [value or None] if count else []
    if len(value) != count:
        raise UserError(f"units has {len(value)} entries for {count} answers: fix the row")
    return value


def _codes(value: Any, files: Files, options: ReaderOptions) -> Codes | None:
    if isinstance(value, str) and value.endswith(".npy"):
        path = files.file(value, "units")
        return read_codes(load_array(path), "", "", options)
    return None if value is None else read_codes(value, "", "", options)


LLAMA_OMNI = RecordReader(
    "llama-omni",
    "LLaMA-Omni, VocalNet: JSON of speech and conversations (from human, gpt), units in .npy; the same of text alone",
    llama_omni_row,
    (".json", ".jsonl"),
    (frozenset({"conversations"}),),
    inner=("conversations", frozenset({"from", "value"})),
    notice="units are taken to be of the codec {codec}; text beside <speech> is not kept; system messages "
    "after the first question are left out",
    codec="that --read.codec names",
)
