"""Reads a file of dialogues with slots, and checks all of it.

    held_out: 0.1                              share of the combinations of slots that are kept for evaluation; 0.1
    joined: [5, 2, 1]                          weights of rows of one, two, three dialogues, one after another; [1]
    numbers: [null, eins, zwei]                words of 0, 1, 2, ...; English up to 99
    tables:
      digit: {from: 0, to: 9}                  numbers
      day: [monday, tuesday]                   a list of texts
      pair:                                    rows with columns
        - {word: hot, opposite: cold}
    wordings:
      what is: (what is | what's | tell me)    parts of sentences: `<what is>`; a text or a list of them
    dialogues:
      - skill: sums                            named in the rows' source, so that figures are given by skill
        weight: 2                              share of the rows, relative to other dialogues; 1
        begins: true                           it comes after no other dialogue, as what asks for a name that nobody told; false
        slots: {a: digit, b: digit}            the table of each slot; a table's own name is a slot without that
        values: {c: {sum: [a, b], to: 10}}     computed of slots and of values before (`values.FUNCTIONS`)
        turns:                                 or question and answer without turns, for one
          - question: ["<what is> {a} plus {b}", "{a} and {b}"]
            answer: "{c}"

Sentences are in the notation of `wordings`. A question is one sentence or a list, an answer one sentence of one wording.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni.errors import UserError, closest
from train.console.command import Spelled, read_yaml
from train.data.readers.templates.sentences import (
    FUNCTIONS,
    SLOT,
    Argument,
    Cell,
    Computed,
    Numbers,
    Table,
    TableEntry,
    Value,
    Wordings,
)

_KEYS = ("held_out", "joined", "numbers", "tables", "wordings", "dialogues")
_DIALOGUE = ("skill", "weight", "begins", "slots", "values", "turns", "question", "answer")
_LIMITS = ("from", "to")
_MOST_NUMBERS = 10_000
_NAME = re.compile(r"[^\W\d][\w -]*")


@dataclass(frozen=True)
class ScriptTurn:
    """The wordings of a question, and its answer; slots are still open."""

    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class SlotDialogue:
    """A dialogue with slots.

    Attributes:
        name: its skill, and its number among those of the skill.
        begins: it comes after no other one in a row.
        slots: table of each slot.
        values: how values are computed, each of those before it.
    """

    name: str
    skill: str
    weight: float
    begins: bool
    slots: Mapping[str, Table]
    values: Mapping[str, Computed]
    turns: tuple[ScriptTurn, ...]

    def filled(self, rows: Sequence[int], numbers: Numbers) -> dict[str, Value] | None:
        """Values by name where slots have these rows of their tables; None where a value is out of its limits."""
        values: dict[str, Value] = {
            name: TableEntry(table, row) for (name, table), row in zip(self.slots.items(), rows, strict=True)
        }
        for name, computed in self.values.items():
            with at(f"values.{name}"):
                value = computed.value(values, numbers)
            if value is None:
                return None
            values[name] = value
        return values

    @property
    def said(self) -> tuple[tuple[str, str], ...]:
        """Names and columns of all slots and values that sentences have."""
        sentences = [sentence for turn in self.turns for sentence in (*turn.questions, turn.answer)]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(map(references, sentences))))

    def behind(self, sentences: Sequence[str]) -> tuple[str, ...]:
        """Names of the slots that sentences depend on, in the order of `slots`."""
        found = {name for sentence in sentences for name, _ in references(sentence)}
        for name, computed in reversed(list(self.values.items())):
            if name in found:
                found |= {argument.name for argument in computed.arguments}
        return tuple(name for name in self.slots if name in found)


@dataclass(frozen=True)
class Script:
    """The contents of a file of dialogues."""

    dialogues: tuple[SlotDialogue, ...]
    numbers: Numbers
    held_out: float
    joined: tuple[float, ...] = (1.0,)


def references(sentence: str) -> list[tuple[str, str]]:
    """Names and columns of the slots in a sentence."""
    return [_split(name) for name in SLOT.findall(sentence)]


def say(sentence: str, values: Mapping[str, Value], numbers: Numbers) -> str:
    """Fill the slots of a sentence; UserError where a value has no text."""

    def text(match: re.Match[str]) -> str:
        name, column = _split(match[1])
        return numbers.text(values[name], column)

    return SLOT.sub(text, sentence)


def _split(name: str) -> tuple[str, str]:
    slot, _, column = name.partition(".")
    return slot.strip(), column.strip()


@contextmanager
def at(key: str) -> Iterator[None]:
    """Put a key before the message of a UserError; one that ends, or is followed by, a dot is the start of a longer key."""
    try:
        yield
    except UserError as error:
        dotted = key.endswith(".") or str(error).startswith(".")
        raise UserError(f"{key}{'' if dotted else ': '}{error}") from None


def read_script(path: Path) -> Script:
    """Read a file of dialogues; UserError, with the file and the key, where it breaks the format."""
    data = read_yaml(path, "dialogues")
    try:
        return _script(data)
    except UserError as error:
        raise UserError(f"dialogues {path}: {error}") from None


def _script(data: Any) -> Script:
    _known(_mapping(data, ", such as dialogues"), _KEYS)
    held_out = data.get("held_out", 0.1)
    if not _is_number(held_out) or not 0 <= held_out < 1:
        raise UserError(f"held_out: {held_out!r} is no share: give a number from 0 to below 1, such as 0.1")
    tables = {}
    for name, rows in _section(data, "tables"):
        with at(f"tables.{name}"):
            tables[name] = _table(name, rows)
    named = {}
    for name, sentences in _section(data, "wordings"):
        with at(f"wordings.{name}"):
            named[name] = _texts(sentences)
    wordings = Wordings(named)
    for name, sentences in named.items():
        with at(f"wordings.{name}"):
            for sentence in sentences:
                wordings.expand(sentence, (name,))
    wordings.used.clear()
    with at("numbers"):
        numbers = Numbers(_texts(_list(data["numbers"])) if "numbers" in data else ())
    with at("dialogues"):
        found = _list(data.get("dialogues"))
    dialogues, counted = [], dict[str, int]()
    for number, one in enumerate(found):
        with at(f"dialogues.{number}"):
            skill = _mapping(one, ", such as skill, question and answer").get("skill")
        with at(f"dialogues.{number}" + (f" ({skill})" if isinstance(skill, str) else "") + "."):
            dialogues.append(_dialogue(one, tables, wordings, counted))
    used = {table.name for dialogue in dialogues for table in dialogue.slots.values()}
    for section, all_names, taken in (("tables", tables, used), ("wordings", named, wordings.used)):
        for name in all_names:
            if name not in taken:
                raise UserError(f"{section}.{name}: no dialogue uses it: use it or take it out")
    if not any(dialogue.weight > 0 for dialogue in dialogues):
        raise UserError("dialogues: no weight is above 0: give at least one dialogue a weight")
    joined = data.get("joined", [1])
    if not isinstance(joined, list) or not all(_is_number(one) and one >= 0 for one in joined) or not any(joined):
        raise UserError(f"joined: {joined!r} are no weights of one, two, ... dialogues: give a list such as [5, 2, 1]")
    if any(joined[1:]) and all(dialogue.begins or not dialogue.weight for dialogue in dialogues):
        raise UserError("joined: every dialogue begins a row: leave joined out, or one's begins")
    return Script(tuple(dialogues), numbers, float(held_out), tuple(map(float, joined)))


def _table(name: str, rows: Any) -> Table:
    """Read a table: `{from, to}`, a list of cells, or a list of rows."""
    if isinstance(rows, Mapping):
        _known(rows, _LIMITS)
        first, last = (_whole(rows, limit) for limit in _LIMITS)
        if first is None or last is None or first > last:
            raise UserError(f"{dict(rows)} is no range: give from and a larger to, such as {{from: 0, to: 20}}")
        if last - first >= _MOST_NUMBERS:
            raise UserError(f"{dict(rows)} are more than {_MOST_NUMBERS} numbers: give a smaller range")
        return Table(name, tuple((number,) for number in range(first, last + 1)))
    given = _list(rows)
    columns = tuple(map(str, given[0])) if isinstance(given[0], Mapping) else ()
    found: dict[tuple[Cell, ...], None] = {}
    for number, row in enumerate(given):
        with at(f".{number}"):
            cells = {str(column): value for column, value in row.items()} if isinstance(row, Mapping) else {"": row}
            if set(cells) != set(columns or ("",)):
                alike = f"the columns {', '.join(columns)}" if columns else "one text each"
                raise UserError(f"{row!r} is unlike the first row: give all rows {alike}")
            values = tuple(_cell(cells[column]) for column in columns or ("",))
            if values in found:
                raise UserError(f"{values[0]!r} is there twice: keep one")
            found[values] = None
    return Table(name, tuple(found), columns)


def _cell(value: Any) -> Cell:
    value = str(value) if isinstance(value, Spelled) else value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(f"{value!r} is read as {type(value).__name__}, not text: put it in quotes")
    if isinstance(value, str) and not value.strip():
        raise UserError("is empty: write a text, or take it out")
    return " ".join(value.split()) if isinstance(value, str) else value


def _dialogue(one: Mapping[str, Any], tables: Mapping[str, Table], wordings: Wordings, counted: dict[str, int]) -> SlotDialogue:
    _known(one, _DIALOGUE)
    with at("skill"):
        skill = _sentence(one.get("skill"))
        if not _NAME.fullmatch(skill) or " " in skill:
            raise UserError(f"{skill!r} is no name: start with a letter, and use letters, digits, - and _")
    weight = one.get("weight", 1)
    if not _is_number(weight) or weight < 0:
        raise UserError(f"weight: {weight!r} is no weight: give a number of at least 0")
    begins = one.get("begins", False)
    if not isinstance(begins, bool):
        raise UserError(f"begins: {begins!r} is neither true nor false")
    turns = _turns(one, wordings)
    slots = {}
    for name, table in _section(one, "slots"):
        with at(f"slots.{name}"):
            slots[name] = tables[_choice(table, tables, "table")]
    computed = dict(_section(one, "values"))
    said = [sentence for turn in turns for sentence in (*turn.questions, turn.answer)]
    wanted = {name for sentence in said for name, _ in references(sentence)}
    wanted |= {name for value in computed.values() for name in _argument_names(value)}
    slots |= {name: table for name, table in tables.items() if name in wanted and name not in (*slots, *computed)}
    values: dict[str, Computed] = {}
    for name, value in computed.items():
        with at(f"values.{name}"):
            if name in slots:
                raise UserError("is a slot too: give one of them another name")
            values[name] = _computed(value, (*slots, *values))
    for number, turn in enumerate(turns):
        for side, sentences in (("question", turn.questions), ("answer", (turn.answer,))):
            with at(f"turns.{number}.{side}" if "turns" in one else side):
                for name, column in itertools.chain.from_iterable(map(references, sentences)):
                    _choice(name, (*slots, *values), "slot, value or table")
                    if name in slots:
                        slots[name].cell(0, column)
    for section, names in (("slots", slots), ("values", values)):
        for name in names:
            if name not in wanted:
                raise UserError(f"{section}.{name}: no sentence has {{{name}}}: use it or take it out")
    counted[skill] = counted.get(skill, 0) + 1
    return SlotDialogue(f"{skill} {counted[skill]}", skill, float(weight), begins, slots, values, turns)


def _turns(one: Mapping[str, Any], wordings: Wordings) -> tuple[ScriptTurn, ...]:
    if "turns" not in one:
        return (_turn(one, wordings),)
    for side in ("question", "answer"):
        if side in one:
            raise UserError(f"{side}: stands beside turns: move it into one of them")
    out = []
    with at("turns"):
        turns = _list(one["turns"])
    for number, turn in enumerate(turns):
        with at(f"turns.{number}"):
            _mapping(turn, " of question and answer")
        with at(f"turns.{number}."):
            _known(turn, ("question", "answer"))
            out.append(_turn(turn, wordings))
    return tuple(out)


def _turn(data: Mapping[str, Any], wordings: Wordings) -> ScriptTurn:
    with at("question"):
        found = [wordings.expand(sentence) for sentence in _texts(data.get("question"))]
        questions = tuple(dict.fromkeys(itertools.chain.from_iterable(found)))
        if not all(questions):
            raise UserError("has a wording without words: make fewer of its words optional")
    with at("answer"):
        answers = wordings.expand(_sentence(data.get("answer")))
        if len(answers) > 1:
            raise UserError(f"has {len(answers)} wordings: an answer has one, or a slot of a table")
    return ScriptTurn(questions, answers[0])


def _computed(value: Any, known: Sequence[str]) -> Computed:
    data = _mapping(value, ", such as {sum: [a, b], to: 20}")
    names = [name for name in data if name not in _LIMITS]
    if len(names) != 1:
        raise UserError(f"{dict(data)} has {len(names)} functions: give one, such as {{sum: [a, b]}}")
    name = _choice(names[0], FUNCTIONS, "function")
    given = data[name] if isinstance(data[name], list) else [data[name]]
    arguments = []
    for one in given:
        if isinstance(one, int) and not isinstance(one, bool):
            arguments.append(Argument(number=one))
            continue
        slot, column = _split(_sentence(one))
        arguments.append(Argument(_choice(slot, known, "slot, or value before this one"), column))
    wanted = FUNCTIONS[name].arguments
    if not arguments or wanted not in (None, len(arguments)):
        raise UserError(f"{name} takes {wanted or 'one or more'} of slots, values and numbers, and is given {len(arguments)}")
    return Computed(name, tuple(arguments), *(_whole(data, limit) for limit in _LIMITS))


def _argument_names(value: Any) -> Iterator[str]:
    """Names in a value's arguments, whether it is well formed or not."""
    for given in value.values() if isinstance(value, Mapping) else ():
        yield from (_split(one)[0] for one in (given if isinstance(given, list) else [given]) if isinstance(one, str))


# ------------------------------------------------------------------------------------------------ parts of the file


def _known(data: Mapping[Any, Any], keys: Sequence[str]) -> None:
    for key in data:
        if key not in keys:
            raise UserError(f"{key}: is no key here; {closest(key, keys)}")


def _choice(name: Any, known: Any, what: str) -> str:
    if name not in known:
        raise UserError(f"{name!r} is no {what}; {closest(name, known)}")
    return str(name)


def _mapping(data: Any, such: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise UserError(f"holds {_shown(data)}: give a mapping{such}")
    return data


def _section(data: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Names and contents of a part of the file that may be left out."""
    with at(name):
        found = _mapping(data[name], " of names") if name in data else {}
        for key in found:
            if not isinstance(key, str) or not _NAME.fullmatch(key):
                raise UserError(f".{key}: is no name: start with a letter, and use letters, digits, spaces, - and _")
    return list(found.items())


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list) or not data:
        raise UserError(f"holds {_shown(data)}: give a list with at least one entry")
    return data


def _texts(data: Any) -> tuple[str, ...]:
    """One sentence or a list of them."""
    if not isinstance(data, list):
        return (_sentence(data),)
    found = []
    for number, one in enumerate(_list(data)):
        with at(f".{number}"):
            found.append(_sentence(one))
    return tuple(found)


def _sentence(data: Any) -> str:
    data = str(data) if isinstance(data, int | float) and not isinstance(data, bool) else data
    if not isinstance(data, str) or not data.strip():
        quotes = ", in quotes where YAML reads something else (true, null, a mapping)"
        raise UserError(f"holds {_shown(data)}: give a text{quotes}")
    return " ".join(data.split())


def _shown(data: Any) -> str:
    return "nothing" if data is None else "an empty list" if data == [] else f"{data!r:.80}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(f"{name}: {value!r} is no whole number: give one")
    return value
