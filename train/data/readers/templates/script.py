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
        values: {c: {sum: [a, b], to: 10}}     computed of slots and of values before (`FUNCTIONS`)
        turns:                                 or question and answer without turns, for one
          - question: ["<what is> {a} plus {b}", "{a} and {b}"]
            answer: "{c}"

Sentences are in the notation of `sentences`. A question is one sentence or a list, an answer one sentence of one wording.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat

from omni.config import from_dict
from omni.errors import UserError, closest
from omni.utils.configuration import configuration, read_yaml
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

_LIMITS = ("from", "to")
_MOST_NUMBERS = 10_000


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
        names = {name for sentence in sentences for name, _ in references(sentence)}
        for name, computed in reversed(list(self.values.items())):
            if name in names:
                names |= {argument.name for argument in computed.arguments}
        return tuple(name for name in self.slots if name in names)


@dataclass(frozen=True)
class Script:
    """The contents of a file of dialogues."""

    dialogues: tuple[SlotDialogue, ...]
    numbers: Numbers
    held_out: float
    joined: tuple[float, ...]


@configuration
class _TurnKeys:
    """Keys of a turn."""

    question: object
    answer: object


@configuration
class _DialogueKeys:
    """Keys of a dialogue; `question` and `answer` are those of its only turn."""

    skill: str
    weight: NonNegativeFloat = 1.0
    begins: bool = False
    slots: dict[str, object] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    turns: tuple[_TurnKeys, ...] = ()
    question: object = None
    answer: object = None

    def __post_init__(self) -> None:
        if self.turns and (self.question or self.answer):
            raise UserError(f"dialogue {self.skill} has question or answer beside turns: move them into one")


@configuration
class _ScriptKeys:
    """Keys of a file."""

    dialogues: tuple[_DialogueKeys, ...]
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    joined: tuple[float, ...] = (1.0,)
    numbers: tuple[object, ...] = ()
    tables: dict[str, object] = field(default_factory=dict)
    wordings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(0 <= weight < math.inf for weight in self.joined) or not any(self.joined):
            raise UserError(f"joined: {list(self.joined)} are no weights of one, two, ... dialogues, such as [5, 2, 1]")
        if not any(dialogue.weight for dialogue in self.dialogues):
            raise UserError("dialogues: no weight is above 0: give at least one dialogue a weight")
        if any(self.joined[1:]) and all(dialogue.begins or not dialogue.weight for dialogue in self.dialogues):
            raise UserError("joined: every dialogue begins a row: leave joined out, or one's begins")


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
    with at(f"dialogues {path}"):
        return _script(from_dict(_ScriptKeys, data, "the file"))


def _script(keys: _ScriptKeys) -> Script:
    tables = {}
    for name, rows in keys.tables.items():
        with at(f"tables.{name}"):
            tables[name] = _table(name, rows)
    named = {}
    for name, sentences in keys.wordings.items():
        with at(f"wordings.{name}"):
            named[name] = _texts(sentences)
    wordings = Wordings(named)
    for name, sentences in named.items():
        with at(f"wordings.{name}"):
            for sentence in sentences:
                wordings.expand(sentence, (name,))
    wordings.used.clear()
    with at("numbers"):
        numbers = Numbers(_texts(list(keys.numbers)) if keys.numbers else ())
    dialogues, counted = [], Counter[str]()
    for number, entry in enumerate(keys.dialogues):
        counted[entry.skill] += 1
        with at(f"dialogues.{number} ({entry.skill})."):
            dialogues.append(_dialogue(entry, f"{entry.skill} {counted[entry.skill]}", tables, wordings))
    used = {table.name for dialogue in dialogues for table in dialogue.slots.values()}
    for section, all_names, taken in (("tables", tables, used), ("wordings", named, wordings.used)):
        for name in all_names:
            if name not in taken:
                raise UserError(f"{section}.{name}: no dialogue uses it: use it or take it out")
    return Script(tuple(dialogues), numbers, keys.held_out, keys.joined)


def _table(name: str, rows: Any) -> Table:
    """Read a table: `{from, to}`, a list of cells, or a list of rows."""
    if isinstance(rows, Mapping):
        first, last = (_whole(rows, limit) for limit in _LIMITS)
        if first is None or last is None or first > last or len(rows) > len(_LIMITS):
            raise UserError(f"{dict(rows)} is no range: give from and a larger to, such as {{from: 0, to: 20}}")
        if last - first >= _MOST_NUMBERS:
            raise UserError(f"{dict(rows)} are more than {_MOST_NUMBERS} numbers: give a smaller range")
        return Table(name, tuple((number,) for number in range(first, last + 1)))
    listed = _list(rows)
    columns = tuple(map(str, listed[0])) if isinstance(listed[0], Mapping) else ()
    unique: dict[tuple[Cell, ...], None] = {}
    for number, row in enumerate(listed):
        with at(f".{number}"):
            cells = {str(column): value for column, value in row.items()} if isinstance(row, Mapping) else {"": row}
            if set(cells) != set(columns or ("",)):
                alike = f"the columns {', '.join(columns)}" if columns else "one text each"
                raise UserError(f"{row!r} is unlike the first row: give all rows {alike}")
            values = tuple(_cell(cells[column]) for column in columns or ("",))
            if values in unique:
                raise UserError(f"{values[0]!r} is there twice: keep one")
            unique[values] = None
    return Table(name, tuple(unique), columns)


def _cell(value: Any) -> Cell:
    return value if isinstance(value, int) and not isinstance(value, bool) else _sentence(value)


def _dialogue(dialogue: _DialogueKeys, name: str, tables: Mapping[str, Table], wordings: Wordings) -> SlotDialogue:
    if dialogue.turns:
        turns = []
        for number, keys in enumerate(dialogue.turns):
            with at(f"turns.{number}."):
                turns.append(_turn(keys.question, keys.answer, wordings))
    else:
        turns = [_turn(dialogue.question, dialogue.answer, wordings)]
    slots = {}
    for slot, table in dialogue.slots.items():
        with at(f"slots.{slot}"):
            slots[slot] = tables[_choice(table, tables, "table")]
    said = [sentence for turn in turns for sentence in (*turn.questions, turn.answer)]
    wanted = {reference for sentence in said for reference, _ in references(sentence)}
    wanted |= {reference for value in dialogue.values.values() for reference in _argument_names(value)}
    slots |= {table: rows for table, rows in tables.items() if table in wanted and table not in (*slots, *dialogue.values)}
    values: dict[str, Computed] = {}
    for computed, value in dialogue.values.items():
        with at(f"values.{computed}"):
            if computed in slots:
                raise UserError("is a slot too: give one of them another name")
            values[computed] = _computed(value, (*slots, *values))
    for number, turn in enumerate(turns):
        for side, sentences in (("question", turn.questions), ("answer", (turn.answer,))):
            with at(f"turns.{number}.{side}" if dialogue.turns else side):
                for reference, column in itertools.chain.from_iterable(map(references, sentences)):
                    _choice(reference, (*slots, *values), "slot, value or table")
                    if reference in slots:
                        slots[reference].cell(0, column)
    for section, names in (("slots", slots), ("values", values)):
        for reference in names:
            if reference not in wanted:
                raise UserError(f"{section}.{reference}: no sentence has {{{reference}}}: use it or take it out")
    return SlotDialogue(name, dialogue.skill, dialogue.weight, dialogue.begins, slots, values, tuple(turns))


def _turn(question: object, answer: object, wordings: Wordings) -> ScriptTurn:
    with at("question"):
        expanded = [wordings.expand(sentence) for sentence in _texts(question)]
        questions = tuple(dict.fromkeys(itertools.chain.from_iterable(expanded)))
        if not all(questions):
            raise UserError("has a wording without words: make fewer of its words optional")
    with at("answer"):
        answers = wordings.expand(_sentence(answer))
        if len(answers) > 1:
            raise UserError(f"has {len(answers)} wordings: an answer has one, or a slot of a table")
    return ScriptTurn(questions, answers[0])


def _computed(data: Any, known: Sequence[str]) -> Computed:
    names = [name for name in data if name not in _LIMITS] if isinstance(data, Mapping) else []
    if len(names) != 1:
        raise UserError(f"{data!r} has {len(names)} functions: give one, such as {{sum: [a, b]}}")
    name = _choice(names[0], FUNCTIONS, "function")
    operands = data[name] if isinstance(data[name], list) else [data[name]]
    arguments = []
    for operand in operands:
        if isinstance(operand, int) and not isinstance(operand, bool):
            arguments.append(Argument(number=operand))
            continue
        slot, column = _split(_sentence(operand))
        arguments.append(Argument(_choice(slot, known, "slot, or value before this one"), column))
    wanted = FUNCTIONS[name].arguments
    if not arguments or wanted not in (None, len(arguments)):
        raise UserError(f"{name} takes {wanted or 'one or more'} of slots, values and numbers, and is given {len(arguments)}")
    return Computed(name, tuple(arguments), *(_whole(data, limit) for limit in _LIMITS))


def _argument_names(value: Any) -> Iterator[str]:
    """Names in a value's arguments, whether it is well formed or not."""
    for terms in value.values() if isinstance(value, Mapping) else ():
        yield from (_split(text)[0] for text in (terms if isinstance(terms, list) else [terms]) if isinstance(text, str))


def _choice(name: Any, known: Any, noun: str) -> str:
    if name not in known:
        raise UserError(f"{name!r} is no {noun}; {closest(name, known)}")
    return str(name)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list) or not data:
        raise UserError(f"holds {data!r:.80}: give a list with at least one entry")
    return data


def _texts(data: Any) -> tuple[str, ...]:
    """One sentence or a list of them."""
    return tuple(map(_sentence, _list(data) if isinstance(data, list) else [data]))


def _sentence(data: Any) -> str:
    data = str(data) if isinstance(data, int | float) and not isinstance(data, bool) else data
    if not isinstance(data, str) or not data.strip():
        raise UserError(f"holds {data!r:.80}: give a text, in quotes where YAML reads something else (true, null, a mapping)")
    return " ".join(data.split())


def _whole(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(f"{name}: {value!r} is no whole number: give one")
    return value
