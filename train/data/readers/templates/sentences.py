"""Sentences with slots: their wordings, the values of slots, the functions that compute values, and numbers as words.

The notation is that of hassil, the templates of Home Assistant's intents: `(a | b)` alternatives, `[a]` or `[a | b]` optional
words, `<name>` a wording of the file's `wordings`, `{name}` a slot, which stays as it is. All of them nest.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
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

SLOT = re.compile(r"\{([^{}]*)\}")
_TOKEN = re.compile(r"\{[^(){}\[\]<>|]*\}|<[^(){}\[\]<>|]*>|[^(){}\[\]<>|]+|.")


@dataclass(frozen=True, eq=False)
class Wordings:
    """The named wordings of a file, each one or more templates."""

    named: Mapping[str, Sequence[str]]

    def expand(self, template: str, within: tuple[str, ...] = ()) -> tuple[str, ...]:
        """All wordings of a template, each once, with single spaces. `within`: names of the wordings that the template is a
        part of. UserError: a mark that is not closed, an unknown name, wordings that name each other in a circle, too many."""
        tokens = deque(_TOKEN.findall(template))

        def alternatives(end: str) -> list[str]:
            """Read sequences apart by bars, up to the mark `end`, "" for the template's end."""
            done, sequence = list[str](), [""]
            while (token := tokens.popleft() if tokens else "") != end:
                if token == "|" and end:
                    done, sequence = done + sequence, [""]
                    continue
                if token in ("(", "["):
                    parts = alternatives(")") if token == "(" else [*alternatives("]"), ""]
                elif token[:1] == "<" and token[1:]:
                    parts = list(self.of(token[1:-1].strip(), within))
                elif token[:1] == "{" and token[1:]:
                    parts = [f"{{{token[1:-1].strip()}}}"]
                elif token and token not in "()[]{}<>|":
                    parts = [token]
                else:
                    why = f"{token or 'the end'!r} stands where {end or 'the end'!r}, words or a name are due"
                    raise UserError(f"{template!r}: {why}; the marks are (a | b), [optional], <wording> and {{slot}}")
                sequence = _limited(map("".join, itertools.product(sequence, parts)), template)
            return done + sequence

        return tuple(_limited(dict.fromkeys(" ".join(wording.split()) for wording in alternatives("")), template))

    def of(self, name: str, within: tuple[str, ...]) -> list[str]:
        """All wordings under a name."""
        if name not in self.named:
            raise UserError(f"<{name}> is no key of wordings; {closest(name, self.named)}")
        if name in within:
            circle = " in ".join(f"<{link}>" for link in (name, *reversed(within[within.index(name) :])))
            raise UserError(f"wordings name each other in a circle ({circle}): write one of them out")
        parts = (self.expand(template, (*within, name)) for template in self.named[name])
        return _limited(itertools.chain.from_iterable(parts), f"<{name}>")


def _limited(wordings: Iterable[str], noun: str) -> list[str]:
    expanded = list(itertools.islice(wordings, MOST_WORDINGS + 1))
    if len(expanded) > MOST_WORDINGS:
        raise UserError(f"{noun!r} has more than {MOST_WORDINGS} wordings: take optional words or alternatives out")
    return expanded


class Table(NamedTuple):
    """A named table: the cells of each row by their column, "" for that of a plain list."""

    name: str
    rows: tuple[dict[str, str | int], ...]


class TableEntry(NamedTuple):
    """A row of a table."""

    table: Table
    row: int


Value = TableEntry | str | int


def cell_of(value: Value, column: str = "") -> str | int:
    """The text or number of a value, or of one of its columns; UserError for a column that is not there, or not named."""
    name, cells = (value.table.name, value.table.rows[value.row]) if isinstance(value, TableEntry) else ("", {"": value})
    if column in cells:
        return cells[column]
    if "" in cells:
        raise UserError(f"{f'table {name}' if name else 'a computed value'} has no columns: leave .{column} out")
    said = f"has no column {column!r}" if column else "has columns, and none is named"
    raise UserError(f"table {name} {said}: write {{SLOT.COLUMN}}; {closest(column, cells)}")


def number_of(value: Value) -> int:
    cell = cell_of(value)
    if not isinstance(cell, int):
        raise UserError(f"{cell!r} is no number: name a slot of a table of numbers, such as {{from: 0, to: 20}}")
    return cell


def _beside(value: Value, step: int) -> Value:
    """The number, or the row of a table, `step` places on; the first row follows the last."""
    if isinstance(value, TableEntry) and not isinstance(value.table.rows[value.row].get(""), int):
        return TableEntry(value.table, (value.row + step) % len(value.table.rows))
    return number_of(value) + step


FUNCTIONS: dict[str, tuple[int | None, Callable[[Sequence[Value], Callable[[Value], str]], Value]]] = {
    "sum": (None, lambda values, _: sum(map(number_of, values))),
    "difference": (2, lambda values, _: number_of(values[0]) - number_of(values[1])),
    "double": (1, lambda values, _: 2 * number_of(values[0])),
    "next": (1, lambda values, _: _beside(values[0], 1)),
    "previous": (1, lambda values, _: _beside(values[0], -1)),
    "reversed": (None, lambda values, text: " ".join(map(text, reversed(values)))),
}
"""All functions: how many values they take (None for any number from one on), and how they compute. `next` and `previous` go by
the order of a table, round its end, or count on where it holds numbers. `reversed` is the text of its arguments, from last to
first."""


class Computed(NamedTuple):
    """A value computed of others. operands: numbers, or a slot or value and its column. limits: of a number, beyond which a
    combination of slots is left out."""

    function: str
    operands: tuple[int | tuple[str, str], ...]
    limits: tuple[float, float] | None


def references(sentences: Iterable[str]) -> list[tuple[str, str]]:
    """Names and columns of the slots in sentences, each once."""
    return list(dict.fromkeys(split_slot(name) for sentence in sentences for name in SLOT.findall(sentence)))


def split_slot(name: str) -> tuple[str, str]:
    """A slot, and the column of it."""
    slot, _, column = name.partition(".")
    return slot.strip(), column.strip()
