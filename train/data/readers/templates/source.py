"""Reads dialogues with slots: rows of written questions and answers, spread evenly over wordings and combinations of slots.

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
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from omni.errors import UserError
from train.data.readers.contract import Broken, OpenedSource, ReaderOptions
from train.data.readers.templates.script import Script, SlotDialogue, at, read_script, say
from train.data.rows.row import Row, RowTurn
from train.data.seeding import key, seeded_rng, shuffled

PARTS = ("train", "held_out", "all")
"""Parts of the combinations: those to train on, those kept for evaluation, and both."""

JOINED = "joined"
"""The skill of rows of several dialogues."""

MOST = 10_000
"""Most combinations of a dialogue; of more, so many are drawn."""

_HASHES = 1 << 63


class Planned(NamedTuple):
    """A dialogue, and the rows of the tables of each combination of its slots."""

    dialogue: SlotDialogue
    combinations: tuple[tuple[int, ...], ...]


class DialogueSource(OpenedSource):
    """The rows of a file of dialogues; see the module."""

    format = "dialogues"

    def __init__(self, path: Path, script: Script, options: ReaderOptions) -> None:
        self._path, self._numbers, self._joined, self._options = path, script.numbers, script.joined, options
        planned = []
        for number, dialogue in enumerate(script.dialogues):
            with at(f"dialogues {path}: dialogues.{number} ({dialogue.skill})."):
                selected = combinations(dialogue, script, options.part)
            if selected and dialogue.weight > 0:
                planned.append(Planned(dialogue, selected))
        if not planned:
            raise UserError(f"dialogues {path}: no combination is held out: raise held_out, or give a question several slots")
        weights = list(itertools.accumulate(plan.dialogue.weight for plan in planned))
        self._planned = planned
        self._starts = [0, *(round(options.rows * weight / weights[-1]) for weight in weights)]
        pairs = zip(planned, itertools.pairwise(self._starts), strict=True)
        if all(plan.dialogue.begins or low == high for plan, (low, high) in pairs):
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
            others = (position for position in drawn if not self._find(position)[0].dialogue.begins)
            positions += itertools.islice(others, count - 1)
        planned, _ = self._find(positions[0])
        skill = planned.dialogue.skill if len(positions) == 1 else JOINED
        return Row(
            tuple(turn for position in positions for turn in self._turns(position)),
            id=f"{skill}-{part}-{seed}-{index:08d}",
            source=f"{options.name or self.format}/{skill}",
            language=options.language,
            task=options.task,
            where=f"{self._path} {planned.dialogue.name}, {part} row {index}",
        )

    def _find(self, position: int) -> tuple[Planned, int]:
        """The dialogue that has a place in the order by dialogues, and the number of the place among its own."""
        number = bisect_right(self._starts, position) - 1
        return self._planned[number], position - self._starts[number]

    def _turns(self, position: int) -> Iterator[RowTurn]:
        """The turns of a dialogue, for a place in the order by dialogues."""
        planned, count = self._find(position)
        dialogue, available, seed = planned.dialogue, planned.combinations, self._options.seed
        slots = available[_even(count, len(available), seed, dialogue.name, "slots")]
        values = dialogue.filled(slots, self._numbers)
        assert values is not None
        for at_turn, turn in enumerate(dialogue.turns):
            question = turn.questions[_even(count, len(turn.questions), seed, dialogue.name, "wording", at_turn)]
            said = (say(sentence, values, self._numbers) for sentence in (question, turn.answer))
            yield RowTurn(question_text=next(said), answer_text=next(said))


def _even(count: int, size: int, *parts: int | str) -> int:
    """Number `count` of an endless sequence that goes through [0, size) in one permutation after the other."""
    epoch, index = divmod(count, size)
    return shuffled(index, size, *parts, epoch)


def combinations(dialogue: SlotDialogue, script: Script, part: str) -> tuple[tuple[int, ...], ...]:
    """The combinations of a dialogue's slots that belong to a part: the row of each slot's table. UserError where a value
    cannot be computed or said, or all combinations are out of limits."""
    sizes = [len(table.rows) for table in dialogue.slots.values()]
    size = math.prod(sizes)
    groups = [dialogue.behind(turn.questions) for turn in dialogue.turns]
    groups = list(dict.fromkeys(group for group in (*groups, tuple(dialogue.slots)) if len(group) > 1))
    parts: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    said = dialogue.said
    for number in range(min(size, MOST)):
        slots = _unravelled(number if size <= MOST else shuffled(number, size, "combinations", dialogue.name), sizes)
        values = dialogue.filled(slots, script.numbers)
        if values is None:
            continue
        for name, column in said:
            with at(f"{{{name}}}"):
                script.numbers.text(values[name], column)
        named = dict(zip(dialogue.slots, slots, strict=True))
        parts[any(_hash(dialogue, group, named) < script.held_out * _HASHES for group in groups)].append(slots)
    if not any(parts.values()):
        raise UserError("values: no combination of slots is within from and to: widen them")
    if part == "train" and not parts[False]:
        raise UserError("slots: all combinations are held out: lower held_out, or give the tables more rows")
    return tuple(parts[False] if part == "train" else parts[True] if part == "held_out" else parts[False] + parts[True])


def _hash(dialogue: SlotDialogue, group: Sequence[str], rows: Mapping[str, int]) -> int:
    """A hash of the values of some slots, from 0 to below 2^63."""
    cells = (dialogue.slots[name].rows[rows[name]] for name in group)
    return key("held out", *("\x1e".join(map(str, row)) for row in cells))


def _unravelled(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The combination of that number: an index for each size, the last of which changes fastest."""
    out: list[int] = []
    for size in reversed(sizes):
        number, index = divmod(number, size)
        out.append(index)
    return tuple(reversed(out))


class DialoguesReader:
    """Reads one YAML file of dialogues; `script` documents it."""

    name = "dialogues"
    summary = "YAML of dialogues with slots and wordings, which rows are made of (docs/data.md#dialogues-of-your-own)"

    def recognise(self, path: Path) -> bool:
        return path.suffix.lower() in (".yaml", ".yml") and path.is_file()

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        return DialogueSource(path, read_script(path), options)
