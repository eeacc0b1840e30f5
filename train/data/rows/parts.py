"""Parts of a turn that are large, each in Parquet columns of its own, and those of them that examples of some tasks need.

    question_audio    tasks with a spoken question
    answer_codes      tasks with a spoken answer
    answer_audio      the same, where a turn has no codes
    words             where answers are cut

Everything else of a row is small and always read. What the tasks of a source need is read of every row at once; what only the
task needs that a row names itself, or a turn without codes, is read after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from omni.tasks import TASKS
from train.data.rows.row import features, has_codes

if TYPE_CHECKING:
    import pyarrow.parquet as pq

PARTS = frozenset({"question_audio", "answer_audio", "answer_codes", "words"})


@dataclass(frozen=True)
class LeafColumns:
    """Columns to read: those of some parts, and the rest of the row or not."""

    parts: frozenset[str] = PARTS
    rest: bool = True

    def paths(self, metadata: pq.FileMetaData) -> list[str]:
        """Paths of these leaf columns in a file, such as `turns.list.element.answer_audio.bytes`.

        Other columns than those of rows are left out. What lists call their elements differs between writers.
        """
        out = []
        for number in range(metadata.num_columns):
            path = metadata.schema.column(number).path
            first, *inner = path.split(".")
            part = next((name for name in inner if name in PARTS), None)
            if first in _columns() and (self.rest if part is None else part in self.parts):
                out.append(path)
        return out


EVERYTHING = LeafColumns()


@dataclass(frozen=True)
class Needed:
    """What examples need of a source's rows.

    Attributes:
        tasks: names of tasks that rows are used for, unless they name one themselves.
        words: answers are cut, see `train.data.batching.interrupt`.
        heard_only: see `train.data.batching.examples.ExampleMaker`.
    """

    tasks: frozenset[str]
    words: bool = False
    heard_only: bool = False

    @cached_property
    def first(self) -> LeafColumns:
        """What is read of every row."""
        return LeafColumns(self._parts(self.tasks))

    def next(self, plain: Mapping[str, Any]) -> LeafColumns | None:
        """What is still to be read of a row of which `plain` has been; None where nothing is."""
        wanted = self._parts([plain["task"]]) if plain["task"] else self.first.parts
        turns = plain["turns"] or ()
        lacking = frozenset(part for part in wanted if not all(part in turn for turn in turns))
        if not lacking and "answer_codes" in wanted and not all(has_codes(turn["answer_codes"]) for turn in turns):
            lacking = frozenset({"answer_audio"} - {name for turn in turns for name in turn})
        return LeafColumns(lacking, rest=False) if lacking else None

    def _parts(self, names: Iterable[str]) -> frozenset[str]:
        tasks = [TASKS[name] for name in names if name in TASKS]  # an unknown one is refused where the example is made
        wanted = {
            "question_audio": any(task.question == "audio" for task in tasks),
            "answer_codes": any(task.audio for task in tasks) and not self.heard_only,
            "words": self.words and not self.heard_only,
        }
        return frozenset(part for part, needed in wanted.items() if needed)


@cache
def _columns() -> frozenset[str]:
    return frozenset(features())
