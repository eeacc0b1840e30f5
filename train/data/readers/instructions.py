"""Reads written instructions and answers, chats and Alpaca, from which `data prepare --speak` makes speech data.

A chat is `{"messages": [{"role": "system" | "user" | "assistant", "content": text}]}`, as OpenAI's fine-tuning, TRL and
LLaMA-Factory have it (`conversations`, and `from: human | gpt` with `value`, as ShareGPT has it, are taken too). Its questions
and answers become turns of one row, and system messages before the first question its system message (later ones are left
out). A `content` may also be a list of parts of type `text`. Alpaca (tatsu-lab/stanford_alpaca) is
`instruction, input, output`: an `input` that is not empty is joined to the instruction by a blank line. LLaMA-Factory's
`history [[question, answer]]` comes before it as turns of their own; its `system` is the row's.
Recordings and images are not read in any form: rows that name some are broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni.errors import UserError
from train.data.readers.contract import ReaderOptions
from train.data.readers.dialogue import Message, pairs, system_of
from train.data.readers.files import Files
from train.data.readers.source import RecordReader, check_text, items, make_row, text
from train.data.rows.row import Row, RowTurn

_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_NO_TEXT = ("audio", "audios", "speech", "image", "images", "video", "videos")


def chat_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one chat; UserError where it is broken."""
    _check_written(data)
    messages = items(data, "messages" if data.get("messages") is not None or "conversations" not in data else "conversations")
    turns = [
        RowTurn(question_text=_said(asked), answer_text=_said(answer)) for asked, answer in pairs(messages, "role", "from")
    ]
    system = system_of(data, messages, _told, "role", "from")
    return make_row(turns, options, "chat", where, id=text(data, "id", "prompt_id"), system=system)


def _told(message: Message) -> str:
    """The text of a system message, "" for an empty one."""
    return _said(message) if message.get("content") or message.get("value") else ""


def _said(message: Message | None) -> str:
    """The text of a message, "" for no message; UserError for a message without text, or with parts that are no text."""
    if message is None:
        return ""
    of = f"a message of {text(message, 'role', 'from')!r}"
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = repr(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
                raise UserError(f"{of} has a part of type {kind}, and only parts of type 'text' are read: drop the row")
        said = "\n".join(filter(None, (text(part, "text") for part in content)))
    else:
        said = text(message, "content", "value", needed=True)
    if not said:
        raise UserError(f"{of} holds no text: fix or drop the row")
    return said


def alpaca_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one instruction; UserError where it is broken."""
    _check_written(data)
    asked, given, answered = text(data, "instruction", needed=True), text(data, "input"), text(data, "output", needed=True)
    if not asked or not answered:
        raise UserError(f"has no {'output' if asked else 'instruction'}: drop the row")
    turn = RowTurn(question_text=f"{asked}\n\n{given}" if given else asked, answer_text=answered)
    return make_row([*_history(data), turn], options, "alpaca", where, id=text(data, "id"), system=text(data, "system"))


def _history(data: Mapping[str, Any]) -> list[RowTurn]:
    """Turns before the instruction, of the field `history`; UserError where it holds no such turns."""
    turns = []
    history = data.get("history") or []
    for entry in history if isinstance(history, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(said, str) and said.strip() for said in entry):
            raise UserError("field 'history' is not a list of [question, answer]: fix the row")
        asked, answered = (check_text(said.strip(), "field 'history'") for said in entry)
        turns.append(RowTurn(question_text=asked, answer_text=answered))
    return turns


def _check_written(data: Mapping[str, Any]) -> None:
    """Refuse a row that has more than text, which would be lost (UserError)."""
    for name in _NO_TEXT:
        if data.get(name):
            raise UserError(
                f"has {name!r} beside its texts, and only texts are read in this format: drop the row, or write tables with "
                "question_audio, question_text, answer_text (--read.format table)"
            )


CHAT = RecordReader(
    "chat",
    'written chats: JSON or Parquet of {"messages": [{"role", "content"}]}, also of several turns',
    chat_row,
    _ENDINGS,
    (frozenset({"messages"}),),
    inner=("messages", frozenset({"role", "content"})),
    notice="system messages after the first question are left out",
)

ALPACA = RecordReader(
    "alpaca",
    "written instructions as Alpaca has them: JSON, CSV or Parquet of instruction, input, output",
    alpaca_row,
    (*_ENDINGS, ".csv", ".csv.gz"),
    (frozenset({"instruction", "output"}),),
    absent=frozenset({"question_audio", "question_text", "answer_audio", "answer_text"}),
    notice="an input follows its instruction after a blank line",
)
