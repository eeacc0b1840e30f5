"""Tables, the values of slots, and the functions that compute values of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from omni.errors import UserError, closest
from train.data.number_words import MOST, spoken_number

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
        found = values[self.name]
        return cell_of(found, self.column) if self.column else found


@dataclass(frozen=True)
class Computed:
    """A value computed of others: `c: {sum: [a, b], from: 0, to: 20}`.

    Attributes:
        least, most: limits of a number; combinations of slots beyond them are left out. None for no limit.
    """

    function: str
    arguments: tuple[Argument, ...]
    least: int | None = None
    most: int | None = None

    def value(self, values: Mapping[str, Value], numbers: Numbers) -> Value | None:
        """Compute the value; None where it is out of its limits. UserError where the arguments do not fit the function."""
        found = FUNCTIONS[self.function].compute([argument.value(values) for argument in self.arguments], numbers)
        if self.least is None and self.most is None:
            return found
        number = _number(found)
        within = (self.least is None or number >= self.least) and (self.most is None or number <= self.most)
        return found if within else None


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
