"""Draws that give no example: counted by source, task and reason, with the first of each, and refused where they are too many.

The counts of a packer's draws are plain data and travel with its state, so that a resumed run goes on counting.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omni.errors import UserError

FIRST = 3
"""Examples that are named of each source, task and reason."""

ENOUGH = 100
"""Draws of a source for a task from which on their broken share is judged."""

SPREAD = 4.0
"""Standard deviations by which broken rows may outnumber the limit: so many come by chance."""

TOO_LONG = "too long"

COLUMNS = ("source", "task", "reason", "rows", "of", "share", "first")
"""Of the file: `of` are all draws of the source for the task, `share` is rows / of."""


class Unusable(UserError):
    """A row that a task cannot use; `reason` is the same for all rows of a kind, `task` the one that it was drawn for."""

    def __init__(self, message: str, reason: str, task: str = "") -> None:
        super().__init__(message)
        self.reason, self.task = reason, task


@dataclass(frozen=True)
class Unused:
    """A draw without example.

    Attributes:
        source: number and name, as in `data.sources[0] (rows.parquet)`.
        task: that the row was drawn for, "" where the row could not be read.
        reason: the kind of fault, such as `too long` or `no answer_text`.
        why: the whole message.
    """

    source: str
    task: str
    reason: str
    why: str


@dataclass
class Counts:
    """Draws by source, and by source and task, and those that were not used by reason: number and the first messages."""

    sources: dict[str, int] = field(default_factory=dict)
    drawn: dict[tuple[str, str], int] = field(default_factory=dict)
    unused: dict[tuple[str, str, str], tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def add(self, source: str, tasks: Iterable[str]) -> None:
        """A draw of a source for these tasks (of its turns)."""
        self.sources[source] = self.sources.get(source, 0) + 1
        for task in set(tasks):
            self.drawn[source, task] = self.drawn.get((source, task), 0) + 1

    def leave_out(self, one: Unused) -> None:
        """A draw that is not used."""
        self.add(one.source, [one.task])
        key = one.source, one.task, one.reason
        count, first = self.unused.get(key, (0, ()))
        self.unused[key] = count + 1, first if len(first) == FIRST else (*first, one.why)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "sources": [[source, count] for source, count in self.sources.items()],
            "drawn": [[*key, count] for key, count in self.drawn.items()],
            "unused": [[*key, count, list(first)] for key, (count, first) in self.unused.items()],
        }

    @classmethod
    def joined(cls, several: Iterable[Mapping[str, Any]]) -> Counts:
        """The sum of plain counts; of the messages, the first in their order. Older ones lack the draws by source."""
        out = cls()
        for one in several:
            for source, count in one.get("sources") or [(source, count) for source, _, count in one.get("drawn", ())]:
                out.sources[source] = out.sources.get(source, 0) + count
            for source, task, count in one.get("drawn", ()):
                out.drawn[source, task] = out.drawn.get((source, task), 0) + count
            for source, task, reason, count, first in one.get("unused", ()):
                before, known = out.unused.get((source, task, reason), (0, ()))
                out.unused[source, task, reason] = before + count, (*known, *first)[:FIRST]
        return out

    def total(self, source: str, task: str) -> int:
        """Draws of a source for a task; all of them where the row could not be read, and its task is "" for that."""
        return self.drawn.get((source, task), 0) if task else self.sources.get(source, 0)

    def check(self, limit: float) -> None:
        """Refuse what is broken in more than `limit` of a source's draws for a task, by more than chance (UserError)."""
        for source, task in dict.fromkeys((s, t) for s, t, reason in self.unused if reason != TOO_LONG):
            of = self.total(source, task)
            bad = {r: n for (s, t, r), (n, _) in self.unused.items() if (s, t) == (source, task) and r != TOO_LONG}
            if of >= ENOUGH and sum(bad.values()) > limit * of + SPREAD * math.sqrt(limit * (1 - limit) * of):
                reasons = "; ".join(line for (s, t, r), line in self.lines().items() if (s, t) == (source, task) and r in bad)
                raise UserError(
                    f"{reasons}. More than data.broken_limit {limit:g} of them are broken: complete or drop these rows, take "
                    "the task out of the source's tasks, or raise the limit"
                )

    def lines(self) -> dict[tuple[str, str, str], str]:
        """A line for each source, task and reason, the most frequent first."""
        out = {}
        for (source, task, reason), (count, first) in sorted(self.unused.items(), key=lambda item: -item[1][0]):
            of = self.total(source, task)
            text = f"{count} of {of} rows ({count / of:.1%}) left out: {reason} (the first: {first[0]})"
            out[source, task, reason] = f"{_place(source, task)}: {text}"
        return out

    def table(self) -> str:
        """The file: comma-separated values under `COLUMNS`."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (source, task, reason), (count, first) in sorted(self.unused.items()):
            of = self.total(source, task)
            writer.writerow([source, task, reason, count, of, f"{count / of:.6g}", " | ".join(first)])
        return out.getvalue()


def _place(source: str, task: str) -> str:
    return source + (f" as {task}" if task else "")
