"""Sentences with slots: their wordings, the values of slots, the functions that compute values, and numbers as words.

The notation is that of hassil, the templates of Home Assistant's intents: `(a | b)` alternatives, `[a]` or `[a | b]` optional
words, `<name>` a wording of the file's `wordings`, `{name}` a slot, which stays as it is. All of them nest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from omni.errors import UserError, closest

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
MOST = 99
"""Largest number that is spelled out, and with "minus" the lowest."""


def spoken_number(number: int) -> str:
    """Spell out a number from -99 to 99: "minus eighteen", "thirty six"."""
    tens, ones = divmod(abs(number), 10)
    words = NUMBERS[abs(number)] if abs(number) < len(NUMBERS) else f"{TENS[tens - 2]} {NUMBERS[ones] if ones else ''}".rstrip()
    return f"minus {words}" if number < 0 else words


MOST_WORDINGS = 10_000
"""Most wordings of a sentence."""

DEEPEST = 50
"""Most brackets within each other."""

SLOT = re.compile(r"\{([^{}]*)\}")
_MARKS = "()[]{}<>|"


class Wordings:
    """The named wordings of a file, each one or more templates. `used`: names that a template has named, directly or by way of
    another."""

    def __init__(self, named: Mapping[str, Sequence[str]] | None = None) -> None:
        self.named = dict(named or {})
        self.used: set[str] = set()

    def expand(self, template: str, within: tuple[str, ...] = ()) -> tuple[str, ...]:
        """All wordings of a template, each once, with single spaces. `within`: names of the wordings that the template is a
        part of. UserError: a mark that is not closed, an unknown name, wordings that name each other in a circle, too many."""
        reading = _Reading(self, template, within)
        readings = reading.alternatives("")
        return _checked(dict.fromkeys(" ".join(wording.split()) for wording in readings), template)

    def of(self, name: str, within: tuple[str, ...]) -> tuple[str, ...]:
        """All wordings under a name."""
        if name not in self.named:
            raise UserError(f"<{name}> is no key of wordings; {closest(name, self.named)}")
        if name in within:
            circle = " in ".join(f"<{link}>" for link in (name, *reversed(within[within.index(name) :])))
            raise UserError(f"wordings name each other in a circle ({circle}): write one of them out")
        self.used.add(name)
        parts = [self.expand(template, (*within, name)) for template in self.named[name]]
        return _checked(itertools.chain.from_iterable(parts), f"<{name}>")


def _checked(wordings: Iterable[str], noun: str) -> tuple[str, ...]:
    expanded = tuple(itertools.islice(wordings, MOST_WORDINGS + 1))
    if len(expanded) > MOST_WORDINGS:
        raise UserError(f"{noun!r} has more than {MOST_WORDINGS} wordings: take optional words or alternatives out")
    return expanded


class _Reading:
    """Reads one template from left to right."""

    def __init__(self, wordings: Wordings, template: str, within: tuple[str, ...]) -> None:
        self.wordings, self.template, self.within, self.at = wordings, template, within, 0
        self.depth = 0

    def alternatives(self, end: str) -> list[str]:
        """Read sequences apart by bars, up to the mark `end`, "" for the template's end."""
        self.depth += 1
        sequences = self._sequence()
        while self._next() == "|" and end:
            self.at += 1
            sequences += self._sequence()
        if self._next() != end:
            raise self._bad(f"{self._next() or 'the end'!r} stands where {end or 'the end'!r} is due")
        self.at += 1
        self.depth -= 1
        return sequences

    def _next(self) -> str:
        return self.template[self.at : self.at + 1]

    def _sequence(self) -> list[str]:
        done = [""]
        while (mark := self._next()) and mark not in ")]}>|":
            done = list(_checked((f"{a}{b}" for a, b in itertools.product(done, self._part(mark))), self.template))
        return done

    def _part(self, mark: str) -> Sequence[str]:
        """Read one part: alternatives, optional words, a name, or plain text."""
        start = self.at
        self.at += 1
        if self.depth >= DEEPEST and mark in "([":
            raise self._bad(f"more than {DEEPEST} brackets stand within each other")
        if mark == "(":
            return self.alternatives(")")
        if mark == "[":
            return [*self.alternatives("]"), ""]
        if mark in "<{":
            close = ">" if mark == "<" else "}"
            end = self.template.find(close, self.at)
            name = self.template[self.at : end].strip()
            if end < 0 or not name or any(other in name for other in _MARKS):
                raise self._bad(f"{mark!r} is not followed by a name and {close!r}")
            self.at = end + 1
            return self.wordings.of(name, self.within) if mark == "<" else [f"{{{name}}}"]
        while self._next() and self._next() not in _MARKS:
            self.at += 1
        return [self.template[start : self.at]]

    def _bad(self, why: str) -> UserError:
        return UserError(f"{self.template!r}: {why}; the marks are (a | b), [optional], <wording> and {{slot}}")


Cell = str | int
"""What a table holds: a text, or a number, which is spoken as words."""


@dataclass(frozen=True)
class Table:
    """A named table.

    Attributes:
        rows: the cells of each row, one for each column.
        columns: names of the columns; empty for a plain list, whose rows have one cell.
    """

    name: str
    rows: tuple[tuple[Cell, ...], ...]
    columns: tuple[str, ...] = ()

    def cell(self, row: int, column: str) -> Cell:
        """A cell; UserError for a column that is not there, or not named where there are several."""
        if column in self.columns:
            return self.rows[row][self.columns.index(column)]
        if not column and not self.columns:
            return self.rows[row][0]
        if not self.columns:
            raise UserError(f"table {self.name} is a plain list without columns: leave .{column} out")
        said = f"has no column {column!r}" if column else "has columns, and none is named"
        raise UserError(f"table {self.name} {said}: write {{SLOT.COLUMN}}; {closest(column, self.columns)}")


class TableEntry(NamedTuple):
    """A row of a table."""

    table: Table
    row: int


Value = TableEntry | Cell


class Numbers:
    """Spells numbers: by English words, or by a list of the words of zero, one, two, ..."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = tuple(words)

    def spoken(self, number: int) -> str:
        """The words of a number; UserError where it has none."""
        least, most = (0, len(self.words) - 1) if self.words else (-MOST, MOST)
        if not least <= number <= most:
            raise UserError(f"{number} has no word, only {least} to {most} have: keep values within by from and to")
        return self.words[number] if self.words else spoken_number(number)

    def text(self, value: Value, column: str = "") -> str:
        """The text of a value; UserError for a column that does not fit."""
        cell = cell_of(value, column)
        return self.spoken(cell) if isinstance(cell, int) else cell


def cell_of(value: Value, column: str = "") -> Cell:
    """The text or number of a value, or of one of its columns."""
    if isinstance(value, TableEntry):
        return value.table.cell(value.row, column)
    if column:
        raise UserError(f"a computed value has no columns: leave .{column} out")
    return value


@dataclass(frozen=True)
class Argument:
    """An argument of a function: a slot or value and its column, or a number."""

    name: str = ""
    column: str = ""
    number: int = 0

    def value(self, values: Mapping[str, Value]) -> Value:
        if not self.name:
            return self.number
        value = values[self.name]
        return cell_of(value, self.column) if self.column else value


@dataclass(frozen=True)
class Computed:
    """A value computed of others: `c: {sum: [a, b], from: 0, to: 20}`. least, most: limits of a number; combinations of slots
    beyond them are left out. None for no limit."""

    function: str
    arguments: tuple[Argument, ...]
    least: int | None = None
    most: int | None = None

    def value(self, values: Mapping[str, Value], numbers: Numbers) -> Value | None:
        """Compute the value; None where it is out of its limits. UserError where the arguments do not fit the function."""
        result = FUNCTIONS[self.function].compute([argument.value(values) for argument in self.arguments], numbers)
        if self.least is None and self.most is None:
            return result
        number = _number(result)
        within = (self.least is None or number >= self.least) and (self.most is None or number <= self.most)
        return result if within else None


class Function(NamedTuple):
    """A function of values: how many it takes (None for any number from one on), and how it computes."""

    arguments: int | None
    compute: Callable[[Sequence[Value], Numbers], Value]


def _number(value: Value) -> int:
    cell = cell_of(value)
    if not isinstance(cell, int):
        raise UserError(f"{cell!r} is no number: name a slot of a table of numbers, such as {{from: 0, to: 20}}")
    return cell


def _beside(value: Value, step: int) -> Value:
    """The number, or the row of a table, `step` places on; the first row follows the last."""
    if not isinstance(value, TableEntry):
        return _number(value) + step
    if not value.table.columns and isinstance(cell := value.table.rows[value.row][0], int):
        return cell + step
    return TableEntry(value.table, (value.row + step) % len(value.table.rows))


def _reversed(values: Sequence[Value], numbers: Numbers) -> str:
    return " ".join(numbers.text(value) for value in reversed(values))


FUNCTIONS: dict[str, Function] = {
    "sum": Function(None, lambda values, _: sum(map(_number, values))),
    "difference": Function(2, lambda values, _: _number(values[0]) - _number(values[1])),
    "double": Function(1, lambda values, _: 2 * _number(values[0])),
    "next": Function(1, lambda values, _: _beside(values[0], 1)),
    "previous": Function(1, lambda values, _: _beside(values[0], -1)),
    "reversed": Function(None, _reversed),
}
"""All functions. `next` and `previous` go by the order of a table, round its end, or count on where it holds numbers.
`reversed` is the text of its arguments from the last to the first."""
