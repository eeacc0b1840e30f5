"""Reads VoiceAssistant-400K and SLAM-Omni: one question and answer a row, with earlier turns inside the question's text.

VoiceAssistant-400K (gpt-omni/VoiceAssistant-400K, Parquet): `split_name, index, round, question, question_audio {bytes,
path}, answer, answer_snac`, the latter `# t0 t1 t2 t3 t4 t5 t6 # ...` with a frame's codes as c0 c1 c2 c2 c1 c2 c2 (our
`streams`). SLAM-Omni (Parquet): the same with `answer_cosyvoice_speech_token`; as JSON lines `key, source_wav, source_text,
target_token, target_text`, the tokens CosyVoice's, one stream at 50 a second. A later round's question starts with the
earlier ones, `USER: ... ASSISTANT: ... <USER>: ...`: those become turns of text, and the recording belongs to the last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from omni.errors import UserError
from train.data.readers.codes import check_duration, read_codes
from train.data.readers.contract import ReaderOptions
from train.data.readers.files import Files, seconds
from train.data.readers.source import RecordReader, make_row, text
from train.data.rows.row import Row, RowTurn

_SPEAKER = re.compile(r"(?:^|\s)<?(USER|ASSISTANT)>?:\s*")

_CODES = {"answer_snac": "snac", "answer_cosyvoice_speech_token": "cosyvoice", "target_token": "cosyvoice"}
"""Fields with codes, and their codecs."""


def assistant_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions, format: str) -> Row:
    """Make the row of one record of either `format`; UserError where it is broken."""
    turns = history(text(data, "question", "source_text", needed=True))
    field = _code_field(data, options.codec)
    turn = replace(
        turns[-1],
        question_audio=files.sound(data.get("question_audio") or data.get("source_wav")),
        answer_text=text(data, "answer", "target_text", needed=True),
        answer_audio=files.sound(data.get("answer_audio") or data.get("target_wav")),
        answer_codes=read_codes(data[field], _CODES[field], "streams", options) if field else None,
    )
    check_duration(turn.answer_codes, seconds(turn.answer_audio))
    name = text(data, "key") or "-".join(filter(None, (text(data, part) for part in ("split_name", "index", "round"))))
    if not (turn.question_text or turn.question_audio):
        raise UserError("has no question, neither as text nor as a recording: drop the row")
    return make_row([*turns[:-1], turn], options, format, where, id=name)


def history(question: str) -> list[RowTurn]:
    """Split a question that starts with `USER:` or `<USER>:` into turns (the last has no answer yet); any other is one turn.

    UserError where speakers do not alternate, from USER to USER.
    """
    if not (start := _SPEAKER.match(question)) or start[1] != "USER":
        return [RowTurn(question_text=question)]
    parts = _SPEAKER.split(question)[1:]  # USER, what was said, ASSISTANT, ...
    speakers, said = parts[::2], [part.strip() for part in parts[1::2]]
    if len(speakers) % 2 == 0 or any(name != ("USER", "ASSISTANT")[i % 2] for i, name in enumerate(speakers)):
        raise UserError(
            f"its question's history does not alternate from USER to USER: {', '.join(speakers)}; fix or drop the row"
        )
    answers = [*said[1::2], ""]
    return [RowTurn(question_text=asked, answer_text=answer) for asked, answer in zip(said[::2], answers, strict=True)]


def _code_field(data: Mapping[str, Any], codec: str) -> str:
    """Name of the field whose codes are used: that of the wanted codec, or else the first that is not empty."""
    there = [field for field in _CODES if data.get(field)]
    return next((field for field in there if codec and codec.startswith(_CODES[field])), there[0] if there else "")


VOICE_ASSISTANT = RecordReader(
    "voiceassistant",
    "VoiceAssistant-400K: Parquet with question_audio and answer_snac",
    partial(assistant_row, format="voiceassistant"),
    (".parquet",),
    (frozenset({"question", "answer", "answer_snac"}),),
    notice="SNAC codes are taken to be in the order {order} (c0 c1 c2 c2 c1 c2 c2 as the format documents it)",
    order="streams",
)

SLAM_OMNI = RecordReader(
    "slam-omni",
    "SLAM-Omni: Parquet with answer_cosyvoice_speech_token, or JSON lines with source_wav, target_token",
    partial(assistant_row, format="slam-omni"),
    (".parquet", ".jsonl"),
    (frozenset({"question", "answer", "answer_cosyvoice_speech_token"}), frozenset({"source_text", "target_text"})),
    notice="answers' codes are taken to be of the codec {codec}, which only a model of that codec speaks",
    codec="cosyvoice",
)
