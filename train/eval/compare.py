"""Compares two runs over the questions that both answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omni.errors import UserError
from omni.files import write_json, write_whole
from omni.utils.charts import markdown_table
from train.eval.measures import MEASURES
from train.eval.report import (
    ANSWERS,
    COMPARISON,
    TEXT,
    TIMINGS,
    Record,
    Run,
    ScoreChange,
    change_table,
    compared,
    draw_comparison,
)

EAR = ("ear_words", "ear_longest")
"""Settings that are part of the ASR's name."""
JSON, TABLE = "compare.json", "compare.md"


@dataclass(frozen=True)
class Comparison:
    """Two runs, the changes from A to B, and notes on differences between their data and settings."""

    a: Run
    b: Run
    changes: Mapping[str, ScoreChange]
    common: int
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, str]:
        """Short names of the two."""
        first, second = self.a.folder.resolve(), self.b.folder.resolve()
        return (first.name, second.name) if first.name != second.name else (str(self.a.folder), str(self.b.folder))


def compare(folder_a: Path, folder_b: Path) -> Comparison:
    """Compares two output folders; UserError where they have no question in common."""
    a, b = Run.read(folder_a), Run.read(folder_b)
    of_a, of_b = ([r for r in run.records[ANSWERS] if "broken" not in r] for run in (a, b))
    for run, answered in ((a, of_a), (b, of_b)):
        if not answered:
            raise UserError(
                f"{run.folder / ANSWERS} has no whole record of an answer: it was cut, damaged or never written; evaluate "
                "again, into the same folder"
            )
    same = _matched(of_a, of_b)
    if not same:
        raise UserError(f"{folder_a} and {folder_b} have no answered question in common: compare two runs over the same data")
    timed = [name for name in MEASURES if name in ("first_text", "first_audio", "real_time_factor")]
    texts = [name for name in MEASURES if name.startswith("text_")]
    spoken = [name for name in MEASURES if name not in (*timed, *texts)]
    changes: dict[str, ScoreChange] = {}
    for file, names in ((ANSWERS, spoken), (TIMINGS, timed), (TEXT, texts)):
        moved = [{**r, "index": same[r["index"]]} for r in b.records[file] if r["index"] in same]
        changes.update(compared(a.records[file], moved, names))
    if not changes:
        raise UserError(f"{folder_a} and {folder_b} have no figure in common: evaluate both with the same task")
    return Comparison(a, b, changes, len(same), tuple(_notes(a, b, len(of_a), len(of_b), same)))


def write_comparison(comparison: Comparison, out: Path) -> str:
    """Write table, JSON and picture into a folder; returns the table."""
    out.mkdir(parents=True, exist_ok=True)
    names = comparison.names
    text = as_markdown(comparison)
    write_whole(out / TABLE, text)
    data = {
        "a": dict(comparison.a.started),
        "b": dict(comparison.b.started),
        "common": comparison.common,
        "notes": comparison.notes,
        "changes": {name: c.plain("a", "b") for name, c in comparison.changes.items()},
    }
    write_json(out / JSON, data)
    draw_comparison(comparison.changes, names, out / COMPARISON)
    return text


def as_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown."""
    lines = [
        "# Two runs side by side",
        "",
        f"- A, {comparison.names[0]}: {comparison.a.started['model']} on {comparison.a.started['data']}",
        f"- B, {comparison.names[1]}: {comparison.b.started['model']} on {comparison.b.started['data']}",
        f"- {comparison.common} questions that both answered; differences are B minus A, intervals by a paired bootstrap",
        *(f"- {note}" for note in comparison.notes),
        "",
        markdown_table(*change_table(comparison.changes, "A", "B")),
    ]
    return "\n".join(lines) + "\n"


_ASKED = ("id", "question", "reference")


def _matched(a: Sequence[Record], b: Sequence[Record]) -> dict[int, int]:
    """Places of B's answered questions that A answered too, with their places in A.

    Questions are the same where id, question and reference are, at the same place or as the only such ones of either run: data
    that have been prepared lack broken rows, so that places differ.
    """
    of_a = {(r["index"], *_asked(r)): r["index"] for r in a}
    same = {r["index"]: r["index"] for r in b if (r["index"], *_asked(r)) in of_a}
    only_a, only_b = _only(a), _only(b)
    return same | {only_b[asked]: only_a[asked] for asked in only_b if asked in only_a}


def _asked(record: Record) -> tuple[str, ...]:
    return tuple(str(record[name]) for name in _ASKED)


def _only(records: Sequence[Record]) -> dict[tuple[str, ...], int]:
    """Places of questions that were asked only once, by `_asked`; those without a text are left out: an id is not enough."""
    count = Counter(_asked(r) for r in records)
    return {_asked(r): r["index"] for r in records if count[_asked(r)] == 1 and (r["question"] or r["reference"])}


def _notes(a: Run, b: Run, in_a: int, in_b: int, same: Mapping[int, int]) -> list[str]:
    """Notes on differences between the questions, settings and machine loads of two runs."""
    notes = []
    for letter, count in (("A", in_a), ("B", in_b)):
        if count > len(same):
            notes.append(f"{count - len(same)} further questions of {letter} are left out")
    moved = sum(b_index != a_index for b_index, a_index in same.items())
    if moved:
        notes.append(
            f"{moved} of the questions have another place in B's data than in A's: matched by id, question and reference"
        )
    for name, title in (("task", "task"), ("ear", "ASR")):
        if a.started.get(name) != b.started.get(name):
            notes.append(f"note: {title} is {a.started.get(name)} in A and {b.started.get(name)} in B")
    for name, value in a.started["settings"].items():
        other = b.started["settings"].get(name, value)  # a run from before the setting lacks it
        if value != other and name not in ("batch", "questions", "ear", *EAR):
            notes.append(f"note: {name} is {value} in A and {other} in B")
    for name in ("dtype", "quantize"):  # which only a run that was given them has
        if name not in a.started["settings"] and name in b.started["settings"]:
            notes.append(f"note: {name} is {b.started['settings'][name]} in B only")
    loads = [max((r.get("load") or 0 for r in run.records[TIMINGS]), default=0) for run in (a, b)]
    if all(loads):
        notes.append(f"times were taken at a load of {loads[0]:g} in A and {loads[1]:g} in B: others' work slows a machine")
    return notes
