"""Reads written instructions and answers, chats and Alpaca, from which `data prepare --speak` makes speech data.

A chat is `{"messages": [{"role": "system" | "user" | "assistant", "content": text}]}`, as OpenAI's fine-tuning, TRL and
LLaMA-Factory have it (`conversations`, and `from: human | gpt` with `value`, as ShareGPT has it, are taken too). Its questions
and answers become turns of one row, and system messages before the first question its system message (later ones are left
out). A `content` may also be a list of parts of type `text`. Recordings are read wherever `media` knows them.

Alpaca (tatsu-lab/stanford_alpaca) is `instruction, input, output`: an `input` that is not empty is joined to the instruction by
a blank line. LLaMA-Factory's `history [[question, answer]]` comes before it as turns of their own; its `system` is the row's,
and its recordings are read where texts have tags of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni.errors import UserError
from train.data.readers.contract import ReaderOptions
from train.data.readers.dialogue import system_of, turns_of
from train.data.readers.files import Files
from train.data.readers.media import recordings_of, tags
from train.data.readers.source import RecordReader, check_text, items, make_row, text
from train.data.rows.row import Row

_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def chat_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one chat; UserError where it is broken."""
    messages = items(data, "messages" if data.get("messages") is not None or "conversations" not in data else "conversations")
    turns, system = turns_of(data, messages, files), system_of(data, messages)
    return make_row(turns, options, "chat", where, id=text(data, "id", "prompt_id"), system=system)


def alpaca_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one instruction; UserError where it is broken."""
    asked, given, answered = text(data, "instruction", needed=True), text(data, "input"), text(data, "output", needed=True)
    if not asked or not answered:
        raise UserError(f"has no {'output' if asked else 'instruction'}: drop the row")
    said = [*_history(data), f"{asked}\n\n{given}" if given else asked, answered]
    if recordings_of(data) and not any(map(tags, said)):
        raise UserError(
            "has a recording beside its texts, and none has a tag of it, such as <audio>: drop the row, or write tables with "
            "question_audio, question_text, answer_text (--read.format table)"
        )
    messages = [{"role": "assistant" if number % 2 else "user", "content": one} for number, one in enumerate(said)]
    turns = turns_of(data, messages, files)
    return make_row(turns, options, "alpaca", where, id=text(data, "id"), system=text(data, "system"))


def _history(data: Mapping[str, Any]) -> list[str]:
    """Questions and answers before the instruction, of the field `history`; UserError where it holds none."""
    said: list[str] = []
    history = data.get("history") or []
    for entry in history if isinstance(history, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(one, str) and one.strip() for one in entry):
            raise UserError("field 'history' is not a list of [question, answer]: fix the row")
        said += (check_text(one.strip(), "field 'history'") for one in entry)
    return said


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
