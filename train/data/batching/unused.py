"""Counts what is trained by source, and draws that give no example by source, task and reason; stops where there are too many.

The counts of a packer's draws are plain data and part of its state, so that a resumed run goes on counting.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omni.errors import UserError

FIRST = 3
"""Number of messages kept for each source, task and reason."""

ENOUGH = 100
"""Fewest draws of a source for a task at which the broken share is checked."""

SPREAD = 4.0
"""Standard deviations by which the number of broken rows may exceed the limit, as chance allows."""

TOO_LONG = "too long"

COLUMNS = ("source", "task", "reason", "rows", "of", "share", "first")
"""Columns of the file `unused.csv`: `of` are all draws of the source for the task, `share` is rows / of."""


class Unusable(UserError):
    """A row that a task cannot use; `reason` is the kind of fault, the same for all such rows, `task` that of the draw."""

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
    """

    source: str
    task: str
    reason: str
    why: str


class Trained(NamedTuple):
    """Counts of what has been trained of a source: rows, milliseconds of sound (see `Example`) and tokens (time steps)."""

    rows: int
    milliseconds: int
    tokens: int


@dataclass
class Counts:
    """Counts of draws by source, and by source and task; of unused ones by reason, with the first messages; and of what is
    trained, which does not include examples that wait to be packed."""

    sources: dict[str, int] = field(default_factory=dict)
    drawn: dict[tuple[str, str], int] = field(default_factory=dict)
    unused: dict[tuple[str, str, str], tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    trained: dict[str, Trained] = field(default_factory=dict)

    def add(self, source: str, tasks: Iterable[str]) -> None:
        """Count a draw of a source for these tasks (of its turns)."""
        self.sources[source] = self.sources.get(source, 0) + 1
        for task in set(tasks):
            self.drawn[source, task] = self.drawn.get((source, task), 0) + 1

    def train(self, source: str, more: Trained) -> None:
        """Count what a batch has of a source."""
        self.trained[source] = Trained(*map(sum, zip(self.trained.get(source, (0, 0, 0)), more, strict=True)))

    def leave_out(self, draw: Unused) -> None:
        """Count an unused draw, and keep its message where it is among the first."""
        self.add(draw.source, [draw.task])
        key = draw.source, draw.task, draw.reason
        count, first = self.unused.get(key, (0, ()))
        self.unused[key] = count + 1, first if len(first) == FIRST else (*first, draw.why)

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, fit for JSON."""
        return {
            "sources": [[source, count] for source, count in self.sources.items()],
            "drawn": [[*key, count] for key, count in self.drawn.items()],
            "unused": [[*key, count, list(first)] for key, (count, first) in self.unused.items()],
            "trained": [[source, *amounts] for source, amounts in self.trained.items()],
        }

    @classmethod
    def joined(cls, several: Iterable[Mapping[str, Any]]) -> Counts:
        """Sum plain counts; of the messages, the first in their order."""
        out = cls()
        for counts in several:
            for source, count in counts.get("sources", ()):
                out.sources[source] = out.sources.get(source, 0) + count
            for source, task, count in counts.get("drawn", ()):
                out.drawn[source, task] = out.drawn.get((source, task), 0) + count
            for source, task, reason, count, first in counts.get("unused", ()):
                before, known = out.unused.get((source, task, reason), (0, ()))
                out.unused[source, task, reason] = before + count, (*known, *first)[:FIRST]
            for source, *amounts in counts.get("trained", ()):
                out.train(source, Trained(*amounts))
        return out

    def total(self, source: str, task: str) -> int:
        """Number of draws of a source for a task; for the task "", of rows that could not be read, all draws of the source."""
        return self.drawn.get((source, task), 0) if task else self.sources.get(source, 0)

    def check(self, limit: float) -> None:
        """Stop where the broken share of a source's draws for a task exceeds `limit` by more than chance (UserError)."""
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
        """Format a line for each source, task and reason, the most frequent first."""
        out = {}
        for (source, task, reason), (count, first) in sorted(self.unused.items(), key=lambda item: -item[1][0]):
            of = self.total(source, task)
            text = f"{count} of {of} rows ({count / of:.1%}) left out: {reason} (the first: {first[0]})"
            out[source, task, reason] = f"{source}{f' as {task}' if task else ''}: {text}"
        return out

    def table(self) -> str:
        """Format the file `unused.csv`: comma-separated values under `COLUMNS`."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (source, task, reason), (count, first) in sorted(self.unused.items()):
            of = self.total(source, task)
            writer.writerow([source, task, reason, count, of, f"{count / of:.6g}", " | ".join(first)])
        return out.getvalue()
