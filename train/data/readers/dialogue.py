"""Makes turns of the messages of a conversation, under the usual names of roles and fields."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni.errors import UserError
from train.data.readers.files import Files
from train.data.readers.media import Said, listed, present, read_said, recordings_of, tags
from train.data.readers.source import check_text, text
from train.data.rows.row import Codes, RowTurn

_ASKING, _ANSWERING, _SYSTEM = ("user", "human"), ("assistant", "gpt"), ("system", "developer")
_ROLE = ("role", "from")
_SPEAKERS = _ASKING + _ANSWERING + _SYSTEM

Message = Mapping[str, Any]
ReadCodes = Callable[[list[Message]], Sequence[Codes | None]]


def system_of(data: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """Text of the system messages before the first question, joined by blank lines, or else the record's field `system`."""
    first = itertools.takewhile(lambda message: _who(message) in _SYSTEM, messages)
    return "\n\n".join(filter(None, (_said(message).text for message in first))) or text(data, "system")


def turns_of(
    data: Mapping[str, Any], messages: Sequence[Message], files: Files, codes: ReadCodes = lambda answers: [None] * len(answers)
) -> list[RowTurn]:  # fmt: skip
    """Make turns of a record's messages and recordings; system messages are left out (`system_of`). `codes` gives answers'.

    Recordings of the record belong to the tags in the texts, in their order; without tags, to the questions. UserError where
    they are not as many, where a message says nothing, or is by an unknown speaker, and where sides do not alternate.
    """
    asked = _pairs(messages)
    heard = {place: files.sound(one) for place, one in _assigned(recordings_of(data), asked).items()}
    coded = iter(codes([answer.message for _, answer in asked if answer is not None]))
    turns = []
    for index, (question, answer) in enumerate(asked):
        sides: list[Any] = [question.text, heard.get((index, 0))]
        if answer is not None:
            sides += [answer.text, heard.get((index, 1)), next(coded)]
        if not any(sides[:2]) or (answer is not None and not any(sides[2:])):
            side = "answer" if any(sides[:2]) else "question"
            raise UserError(f"{side} {index} has no text, and there is no recording of it: drop the row")
        turns.append(RowTurn(*sides))
    return turns


def _who(message: Message) -> str:
    role = message.get("role", message.get("from"))
    return role if role in _SPEAKERS else text(message, *_ROLE, needed=True).lower()


def _said(message: Message) -> Said:
    try:
        said = read_said(message)
        check_text(said.text, "that")
    except UserError as error:
        raise UserError(f"a message of {_who(message)!r} {error}") from None
    return said


def _pairs(messages: Sequence[Message]) -> list[tuple[Said, Said | None]]:
    """Pair each question with its answer; None for a last question without one. A recording and the texts of the same side
    that stand beside it are one."""
    sides: list[Said] = []
    for number, message in enumerate(messages):
        who = _who(message)
        if who in _SYSTEM:
            continue
        said = _said(message)
        due, last = (_ANSWERING, _ASKING) if len(sides) % 2 else (_ASKING, _ANSWERING)
        if who in due:
            sides.append(said)
        elif sides and who in last and (sides[-1].recordings or said.recordings):
            before = sides[-1]
            sides[-1] = Said(f"{before.text}\n{said.text}", [*before.recordings, *said.recordings], before.message)
        else:
            raise UserError(
                f"message {number} is from {who!r}, not {due[0]!r} (or {due[1]!r}): questions and answers must alternate; "
                "fix or drop the row"
            )
    return list(itertools.zip_longest(sides[::2], sides[1::2]))


def _assigned(value: Any, asked: Sequence[tuple[Said, Said | None]]) -> dict[tuple[int, int], Any]:
    """The recording of each question (0) and answer (1) by its turn's index; UserError where they are not as many as belong
    there."""
    if value is None and not any(said and (said.recordings or "<" in said.text) for pair in asked for said in pair):
        return {}
    sides = {(i, side): said for i, pair in enumerate(asked) for side, said in enumerate(pair) if said is not None}
    out = {place: list(said.recordings) for place, said in sides.items()}
    wanted = {place: tags(said.text) for place, said in sides.items() if not said.recordings}
    given = listed(value)
    if sum(wanted.values()):
        there = [one for one in given if present(one)]
        if len(there) != sum(wanted.values()):
            raise UserError(f"its texts have tags (<audio>) of {sum(wanted.values())} recordings, {len(there)} are there")
        for place, count in wanted.items():
            out[place], there = there[:count], there[count:]
    elif given:
        if len(given) not in (1, len(asked)):
            raise UserError(f"has {len(given)} recordings for {len(asked)} questions: fix the row")
        for index, one in enumerate(given, len(asked) - len(given)):
            out[index, 0] += [one] if present(one) else []
    for (index, side), found in out.items():
        if len(found) > 1:
            raise UserError(f"{'answer' if side else 'question'} {index} has {len(found)} recordings, not one: join them")
    return {place: found[0] for place, found in out.items() if found}
