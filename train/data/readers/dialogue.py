"""Pairs the messages of a conversation, under the usual names of roles and fields, into questions and answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni.errors import UserError
from train.data.readers.source import text

_ASKING, _ANSWERING, _SYSTEM = ("user", "human"), ("assistant", "gpt"), ("system", "developer")

Message = Mapping[str, Any]


def system_of(data: Mapping[str, Any], messages: Sequence[Message], said: Callable[[Message], str], *role: str) -> str:
    """Text of the system messages before the first question, joined by blank lines, or else the record's field `system`.

    Args:
        said: returns the text of a message.
        role: see `pairs`.
    """
    first = itertools.takewhile(lambda message: text(message, *role) in _SYSTEM, messages)
    return "\n\n".join(filter(None, map(said, first))) or text(data, "system")


def pairs(messages: Sequence[Message], *role: str) -> list[tuple[Message, Message | None]]:
    """Pair each question with its answer; None for a last question without one. System messages are skipped (`system_of`).

    Args:
        role: fields of a message that may name the speaker; the first that is present counts.

    Raises:
        UserError: a message without speaker or by an unknown one, or two of one side that follow each other.
    """
    out: list[tuple[Message, Message | None]] = []
    for number, message in enumerate(messages):
        who = text(message, *role, needed=True)
        if who in _SYSTEM:
            continue
        answer_due = bool(out) and out[-1][1] is None
        due = _ANSWERING if answer_due else _ASKING
        if who not in due:
            raise UserError(
                f"message {number} is from {who!r}, not {due[0]!r} (or {due[1]!r}): questions and answers must alternate; "
                "fix or drop the row"
            )
        if answer_due:
            out[-1] = (out[-1][0], message)
        else:
            out.append((message, None))
    return out
