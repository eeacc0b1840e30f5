"""Reads a file of dialogues with slots: rows of written questions and answers, spread evenly over wordings and combinations.

docs/data.md (Dialogues of your own) documents the file, and `sentences` the notation of its sentences.

Row i of N is a pure function of the file, the seed and N. Rows of several dialogues (`joined`) begin with the one that has its
place here, and others of the rows follow. A dialogue has its share of the rows, by weight; they go through its
combinations of slots, and through the wordings of each question, in permutations of their own: each comes as often as any
other, give or take one.

A combination is held out where a hash of its values is below the file's share. That depends on nothing but the values: on no
other dialogue, wording or row. The values of each question with several slots are looked at, and those of the whole dialogue.
A question that is held out is therefore in no training row, whatever dialogue asks it. A single slot is never held out: a fact
that is not trained cannot be known.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, StrictInt

from omni.errors import UserError, closest
from omni.utils.configuration import configuration, validate
from train.console.command import read_yaml
from train.data.readers.contract import Broken, OpenedSource, ReaderOptions
from train.data.readers.templates.sentences import (
    FUNCTIONS,
    MOST,
    SLOT,
    Computed,
    Table,
    TableEntry,
    Value,
    Wordings,
    cell_of,
    number_of,
    references,
    split_slot,
    spoken_number,
)
from train.data.rows.row import Row, RowTurn
from train.data.seeding import key, seeded_rng, shuffled

JOINED = "joined"
"""The skill of rows of several dialogues."""

MOST_COMBINATIONS = 10_000
"""Most combinations of a dialogue; of more, so many are drawn. So many numbers has a table at most."""

_LIMITS = ("from", "to")
_HASHES = 1 << 63


def _spaced(text: str) -> str:
    if not text.strip():
        raise ValueError("give a text with words")
    return " ".join(text.split())


def _rows(data: Any) -> Any:
    """The rows of a table as cells by column, "" for that of a plain list or range."""
    if isinstance(data, Mapping):
        first, last = (data.get(limit) for limit in _LIMITS)
        if type(first) is not int or type(last) is not int or not 0 <= last - first < MOST_COMBINATIONS or len(data) > 2:
            raise ValueError(f"give from and a larger to, up to {MOST_COMBINATIONS} numbers, such as {{from: 0, to: 20}}")
        return [{"": number} for number in range(first, last + 1)]
    if not isinstance(data, list) or not data:
        raise ValueError("give a list with at least one entry")
    return [row if isinstance(row, Mapping) else {"": row} for row in data]


_Listed = BeforeValidator(lambda data: data if isinstance(data, list) and data else [data])
_Sentence = Annotated[str, AfterValidator(_spaced)]
_Sentences = Annotated[list[_Sentence], _Listed]
Cell = StrictInt | _Sentence
"""What a table holds: a text, or a number, which is spoken as words."""


@configuration
class _TurnKeys:
    """Keys of a turn."""

    question: _Sentences
    answer: _Sentence


@configuration
class _DialogueKeys:
    """Keys of a dialogue; `question` and `answer` are those of its only turn."""

    skill: str
    weight: NonNegativeFloat = 1.0
    begins: bool = False
    slots: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, Annotated[list[Cell], _Listed]]] = field(default_factory=dict)
    turns: tuple[_TurnKeys, ...] = ()
    question: _Sentences | None = None
    answer: _Sentence | None = None

    def __post_init__(self) -> None:
        if bool(self.turns) == bool(self.question or self.answer) or (self.question is None) != (self.answer is None):
            raise UserError(f"dialogue {self.skill} has either turns, or question and answer: give one of the two")


@configuration
class _ScriptKeys:
    """Keys of a file."""

    dialogues: tuple[_DialogueKeys, ...]
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    joined: tuple[NonNegativeFloat, ...] = (1.0,)
    numbers: tuple[_Sentence, ...] = ()
    tables: dict[str, Annotated[list[dict[str, Cell]], BeforeValidator(_rows)]] = field(default_factory=dict)
    wordings: dict[str, _Sentences] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not any(self.joined):
            raise UserError(f"joined: {list(self.joined)} are no weights of one, two, ... dialogues, such as [5, 2, 1]")
        if not any(dialogue.weight for dialogue in self.dialogues):
            raise UserError("dialogues: no weight is above 0: give at least one dialogue a weight")
        if any(self.joined[1:]) and all(dialogue.begins or not dialogue.weight for dialogue in self.dialogues):
            raise UserError("joined: every dialogue begins a row: leave joined out, or one's begins")


@contextmanager
def at(key: str) -> Iterator[None]:
    """Put a key before the message of a UserError; one that ends, or is followed by, a dot is the start of a longer key."""
    try:
        yield
    except UserError as error:
        dotted = key.endswith(".") or str(error).startswith(".")
        raise UserError(f"{key}{'' if dotted else ': '}{error}") from None


@dataclass(frozen=True)
class SlotDialogue:
    """A dialogue with slots.

    Attributes:
        name: its skill, and its number among those of the skill.
        begins: it comes after no other one in a row.
        values: how values are computed, each of those before it.
        turns: wordings of each question, and its answer; slots are still open.
        numbers: the words of 0, 1, 2, ...; English where there are none.
    """

    name: str
    skill: str
    weight: float
    begins: bool
    slots: Mapping[str, Table]
    values: Mapping[str, Computed]
    turns: tuple[tuple[tuple[str, ...], str], ...]
    numbers: tuple[str, ...]

    def text(self, value: Value, column: str = "") -> str:
        """The text of a value; UserError for a column that does not fit, and a number without a word."""
        cell = cell_of(value, column)
        if isinstance(cell, str):
            return cell
        least, most = (0, len(self.numbers) - 1) if self.numbers else (-MOST, MOST)
        if not least <= cell <= most:
            raise UserError(f"{cell} has no word, only {least} to {most} have: keep values within by from and to")
        return self.numbers[cell] if self.numbers else spoken_number(cell)

    def say(self, sentence: str, values: Mapping[str, Value]) -> str:
        """Fill the slots of a sentence; UserError where a value has no text."""

        def text(match: re.Match[str]) -> str:
            slot, column = split_slot(match[1])
            return self.text(values[slot], column)

        return SLOT.sub(text, sentence)

    def filled(self, rows: Sequence[int]) -> dict[str, Value] | None:
        """Values by name where slots have these rows of their tables; None where a value is out of its limits."""
        values: dict[str, Value] = {
            name: TableEntry(table, row) for (name, table), row in zip(self.slots.items(), rows, strict=True)
        }
        for name, (function, operands, limits) in self.values.items():
            with at(f"values.{name}"):
                arguments: list[Value] = []
                for operand in operands:
                    value, column = (operand, "") if isinstance(operand, int) else (values[operand[0]], operand[1])
                    arguments.append(cell_of(value, column) if column else value)
                values[name] = FUNCTIONS[function][1](arguments, self.text)
                if limits is not None and not limits[0] <= number_of(values[name]) <= limits[1]:
                    return None
        return values

    def behind(self, sentences: Sequence[str]) -> tuple[str, ...]:
        """Names of the slots that sentences depend on, in the order of `slots`."""
        names = {name for name, _ in references(sentences)}
        for name, computed in reversed(list(self.values.items())):
            if name in names:
                names |= {operand[0] for operand in computed.operands if not isinstance(operand, int)}
        return tuple(name for name in self.slots if name in names)

    def combinations(self, held_out: float, part: str) -> list[tuple[int, ...]]:
        """The combinations of the slots that belong to a part: the row of each slot's table. UserError where a value cannot be
        computed or said, or all combinations are out of limits."""
        sizes = [len(table.rows) for table in self.slots.values()]
        size = math.prod(sizes)
        groups = dict.fromkeys([*(self.behind(questions) for questions, _ in self.turns), tuple(self.slots)])
        said = references(sentence for questions, answer in self.turns for sentence in (*questions, answer))
        parts: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
        for number in range(min(size, MOST_COMBINATIONS)):
            number = number if size <= MOST_COMBINATIONS else shuffled(number, size, "combinations", self.name)
            rows = tuple(number // math.prod(sizes[slot + 1 :]) % count for slot, count in enumerate(sizes))
            values = self.filled(rows)
            if values is None:
                continue
            for name, column in said:
                with at(f"{{{name}}}"):
                    self.text(values[name], column)
            cells = {
                name: "\x1e".join(map(str, table.rows[row].values()))
                for (name, table), row in zip(self.slots.items(), rows, strict=True)
            }
            hashes = (key("held out", *map(cells.__getitem__, group)) for group in groups if len(group) > 1)
            parts[any(value < held_out * _HASHES for value in hashes)].append(rows)
        if not any(parts.values()):
            raise UserError("values: no combination of slots is within from and to: widen them")
        if part == "train" and not parts[False]:
            raise UserError("slots: all combinations are held out: lower held_out, or give the tables more rows")
        return parts[False] * (part != "held_out") + parts[True] * (part != "train")


# ------------------------------------------------------------------------------------------------------------ the file


def read_dialogues(keys: _ScriptKeys) -> list[SlotDialogue]:
    """The dialogues of a file; UserError, with the key, where one cannot be."""
    tables: dict[str, Table] = {}
    for name, rows in keys.tables.items():
        for number, row in enumerate(rows):
            if row.keys() != rows[0].keys():
                alike = "one text each" if "" in rows[0] else f"the columns {', '.join(rows[0])}"
                raise UserError(f"tables.{name}.{number}: {row} is unlike the first row: give all rows {alike}")
        tables[name] = Table(name, tuple({column: row[column] for column in rows[0]} for row in rows))
    wordings = Wordings(keys.wordings)
    for name in wordings.named:
        with at(f"wordings.{name}"):
            wordings.of(name, ())
    dialogues, counted = [], Counter[str]()
    for number, entry in enumerate(keys.dialogues):
        counted[entry.skill] += 1
        with at(f"dialogues.{number} ({entry.skill})."):
            dialogues.append(_dialogue(entry, f"{entry.skill} {counted[entry.skill]}", tables, wordings, keys.numbers))
    return dialogues


def _dialogue(
    keys: _DialogueKeys, name: str, tables: Mapping[str, Table], wordings: Wordings, numbers: tuple[str, ...]
) -> SlotDialogue:
    sides: dict[str, tuple[str, ...]] = {}
    for number, turn in enumerate(keys.turns or (_TurnKeys(keys.question or [], keys.answer or ""),)):
        for side, sentences in (("question", turn.question), ("answer", [turn.answer])):
            path = f"turns.{number}.{side}" if keys.turns else side
            with at(path):
                sides[path] = tuple(dict.fromkeys(itertools.chain.from_iterable(map(wordings.expand, sentences))))
                if not all(sides[path]):
                    raise UserError("has a wording without words: make fewer of its words optional")
                if side == "answer" and len(sides[path]) > 1:
                    raise UserError(f"has {len(sides[path])} wordings: an answer has one, or a slot of a table")
    said = {path: references(sentences) for path, sentences in sides.items()}
    wanted = {name for names in said.values() for name, _ in names}
    for computed, value in reversed(list(keys.values.items())):
        if computed in wanted:
            operands = itertools.chain.from_iterable(value.values())
            wanted |= {split_slot(operand)[0] for operand in operands if isinstance(operand, str)}
    slots: dict[str, Table] = {}  # what no sentence needs is left out
    for slot, table in keys.slots.items():
        with at(f"slots.{slot}"):
            slots |= {slot: tables[_choice(table, tables, "table")]} if slot in wanted else {}
    slots |= {table: rows for table, rows in tables.items() if table in wanted and table not in (*slots, *keys.values)}
    values: dict[str, Computed] = {}
    for computed, value in keys.values.items():
        with at(f"values.{computed}"):
            if computed in slots:
                raise UserError("is a slot too: give one of them another name")
            values |= {computed: _computed(value, (*slots, *values))} if computed in wanted else {}
    for path, names in said.items():
        with at(path):
            for reference, column in names:
                if _choice(reference, (*slots, *values), "slot, value or table") in slots:
                    cell_of(TableEntry(slots[reference], 0), column)
    pairs = list(sides.values())
    turns = tuple((questions, answer) for questions, (answer,) in zip(pairs[::2], pairs[1::2], strict=True))
    return SlotDialogue(name, keys.skill, keys.weight, keys.begins, slots, values, turns, numbers)


def _computed(data: Mapping[str, Sequence[str | int]], known: Sequence[str]) -> Computed:
    least, most = data.get("from", [-math.inf])[0], data.get("to", [math.inf])[0]
    names = [name for name in data if name not in _LIMITS]
    if len(names) != 1 or isinstance(least, str) or isinstance(most, str):
        raise UserError(f"{dict(data)} is no function with limits: give one, such as {{sum: [a, b], from: 0, to: 20}}")
    function = _choice(names[0], FUNCTIONS, "function")
    operands: list[int | tuple[str, str]] = []
    for operand in data[function]:
        if isinstance(operand, str):
            slot, column = split_slot(operand)
            operands.append((_choice(slot, known, "slot, or value before this one"), column))
        else:
            operands.append(operand)
    wanted = FUNCTIONS[function][0]
    if wanted not in (None, len(operands)):
        raise UserError(f"{function} takes {wanted} of slots, values and numbers, and is given {len(operands)}")
    return Computed(function, tuple(operands), (least, most) if len(data) > 1 else None)


def _choice(name: str, known: Iterable[str], noun: str) -> str:
    if name not in known:
        raise UserError(f"{name!r} is no {noun}; {closest(name, known)}")
    return name


# ------------------------------------------------------------------------------------------------------------ the rows


class DialogueSource(OpenedSource):
    """The rows of a file of dialogues; see the module. UserError, with the file and the key, where it breaks the format."""

    format = "dialogues"

    def __init__(self, path: Path, options: ReaderOptions) -> None:
        data, planned = read_yaml(path, "dialogues"), list[tuple[SlotDialogue, list[tuple[int, ...]]]]()
        with at(f"dialogues {path}"):
            keys = validate(_ScriptKeys, data)
            for number, dialogue in enumerate(read_dialogues(keys)):
                with at(f"dialogues.{number} ({dialogue.skill})."):
                    combinations = dialogue.combinations(keys.held_out, options.part)
                if combinations and dialogue.weight > 0:
                    planned.append((dialogue, combinations))
            if not planned:
                raise UserError("no combination is held out: raise held_out, or give a question several slots")
        weights = list(itertools.accumulate(dialogue.weight for dialogue, _ in planned))
        self._path, self._options, self._planned, self._joined = path, options, planned, keys.joined
        self._starts = [0, *(round(options.rows * weight / weights[-1]) for weight in weights)]
        pairs = zip(planned, itertools.pairwise(self._starts), strict=True)
        if all(dialogue.begins or low == high for (dialogue, _), (low, high) in pairs):
            self._joined = (1.0,)  # no row has a dialogue that may follow

    def __len__(self) -> int:
        return self._options.rows

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Row | Broken]:
        for index in range(start, len(self) if stop is None else min(stop, len(self))):
            yield self.row(index)

    def row(self, index: int) -> Row:
        """Make row `index`."""
        options = self._options
        seed, part = options.seed, options.part
        positions = [shuffled(index, len(self), seed, "order", len(self))]
        if len(self._joined) > 1:
            rng = seeded_rng(seed, "joined", len(self), index)
            count = rng.choices(range(1, len(self._joined) + 1), self._joined)[0]
            drawn = iter(lambda: rng.randrange(len(self)), -1)  # without end
            others = (position for position in drawn if not self._find(position)[0].begins)
            positions += itertools.islice(others, count - 1)
        dialogue = self._find(positions[0])[0]
        skill = dialogue.skill if len(positions) == 1 else JOINED
        return Row(
            tuple(turn for position in positions for turn in self._turns(position)),
            id=f"{skill}-{part}-{seed}-{index:08d}",
            source=f"{options.name or self.format}/{skill}",
            language=options.language,
            task=options.task,
            where=f"{self._path} {dialogue.name}, {part} row {index}",
        )

    def _find(self, position: int) -> tuple[SlotDialogue, list[tuple[int, ...]], int]:
        """The dialogue that has a place in the order by dialogues, its combinations, and the place among its own."""
        number = bisect_right(self._starts, position) - 1
        return *self._planned[number], position - self._starts[number]

    def _turns(self, position: int) -> Iterator[RowTurn]:
        """The turns of a dialogue, for a place in the order by dialogues."""
        (dialogue, available, count), seed = self._find(position), self._options.seed
        slots = available[_even(count, len(available), seed, dialogue.name, "slots")]
        values = dialogue.filled(slots)
        assert values is not None
        for turn, (questions, answer) in enumerate(dialogue.turns):
            question = questions[_even(count, len(questions), seed, dialogue.name, "wording", turn)]
            yield RowTurn(question_text=dialogue.say(question, values), answer_text=dialogue.say(answer, values))


def _even(count: int, size: int, *parts: int | str) -> int:
    """Number `count` of an endless sequence that goes through [0, size) in one permutation after the other."""
    epoch, index = divmod(count, size)
    return shuffled(index, size, *parts, epoch)


class DialoguesReader:
    """Reads one YAML file of dialogues."""

    name = "dialogues"
    summary = "YAML of dialogues with slots and wordings, which rows are made of (docs/data.md#dialogues-of-your-own)"

    def recognise(self, path: Path) -> bool:
        return path.suffix.lower() in (".yaml", ".yml") and path.is_file()

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        return DialogueSource(path, options)
