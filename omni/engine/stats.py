"""Figures of an engine: how long steps take, and whether sound is there when its listener needs it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from omni.engine.measure import KnownCosts

WINDOW = 4096
"""Newest measurements that percentiles are taken over."""

AGAIN = 64
"""Steps, or chunks of sound, after which their cost, or lateness, is judged again."""


@dataclass(frozen=True)
class Percentiles:
    """Of the newest measurements, in seconds; None before there are any."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0

    @classmethod
    def of(cls, values: Collection[float]) -> Percentiles:
        found = list(values)
        if not found:
            return cls()
        p50, p95, p99 = (float(x) for x in np.percentile(found, (50, 95, 99)))
        return cls(p50, p95, p99, len(found))


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment, and its newest measurements.

    Attributes:
        sessions: open conversations.
        active: answers under way; `live`, those of them that somebody hears as they come.
        waiting: questions without a slot, or not yet let in.
        slots, free: number of slots, and of those that nobody holds.
        steps: number of steps so far; `rows`, the mean number of rows of the newest ones.
        answers: answers that ended.
        underruns: chunks of sound that came after they were due.
        hearing: seconds that the stepping thread spent on questions while their sound came.
        step: seconds of a step.
        lateness: seconds by which a chunk was ready after it was due; below zero it was early.
        first_audio: seconds from a question to the first sound of its answer, of live listeners.
        slack: seconds that the stepping thread had left, at present, until a listener needs sound; None without listeners.
    """

    sessions: int = 0
    active: int = 0
    live: int = 0
    waiting: int = 0
    slots: int = 0
    free: int = 0
    steps: int = 0
    rows: float = 0.0
    answers: int = 0
    underruns: int = 0
    hearing: float = 0.0
    step: Percentiles = field(default_factory=Percentiles)
    lateness: Percentiles = field(default_factory=Percentiles)
    first_audio: Percentiles = field(default_factory=Percentiles)
    slack: float | None = None


class Recorder:
    """Collects what the threads of an engine measure.

    Args:
        known: costs of steps that were measured before.
    """

    def __init__(self, known: KnownCosts | None = None) -> None:
        self.known = known
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all that was measured."""
        with self._lock:
            self.steps, self.answers, self.underruns, self.hearing = 0, 0, 0, 0.0
            self.step: deque[tuple[int, float]] = deque(maxlen=WINDOW)
            self.lateness: deque[float] = deque(maxlen=WINDOW)
            self.first_audio: deque[float] = deque(maxlen=WINDOW)
            self.slack: float | None = None
            self._fitted: tuple[int, tuple[float, float]] | None = None
            self._most: tuple[int, int] | None = None
            self._chunks = 0
            self._judged: tuple[int, float] | None = None

    def stepped(self, rows: int, seconds: float) -> None:
        with self._lock:
            self.steps += 1
            self.step.append((rows, seconds))

    def heard(self, seconds: float) -> None:
        """Note the seconds of a piece of a question whose sound is coming."""
        with self._lock:
            self.hearing += seconds

    def sounded(self, late: float) -> None:
        """Note by how many seconds a live listener's chunk was ready after it was due; of coded sound, decoded."""
        with self._lock:
            self._chunks += 1
            self.lateness.append(late)
            self.underruns += late > 0

    def late(self, recent: int, least: int) -> float | None:
        """The 99th percentile of the lateness of the newest chunks, as it was `AGAIN` chunks ago at most; None before a few."""
        with self._lock:
            if self._judged is not None and self._chunks - self._judged[0] < AGAIN:
                return self._judged[1]
            lateness, number = list(self.lateness)[-recent:], self._chunks
        if len(lateness) < least:
            return None
        late = float(np.percentile(lateness, 99))
        self._judged = number, late  # what it is by now is another thread's, which may clear it
        return late

    def began(self, seconds: float) -> None:
        """Note the seconds to a live listener's first sound."""
        with self._lock:
            self.first_audio.append(seconds)

    def ended(self) -> None:
        with self._lock:
            self.answers += 1

    def cost(self) -> tuple[float, float] | None:
        """Seconds of a step without rows, and more for each row, fitted to the newest steps (again after `AGAIN` of them); None
        before there are some."""
        with self._lock:
            if self._fitted is not None and self.steps - self._fitted[0] < AGAIN:
                return self._fitted[1]
            steps, number = list(self.step)[-512:], self.steps
        if len(steps) < 8:
            return None
        cost = self._fit(steps)
        self._fitted = number, cost
        return cost

    def _fit(self, steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
        rows, seconds = np.array(steps, dtype=float).T
        if rows.min() == rows.max():
            each = float(np.median(seconds)) / rows[0]
            return 0.0, each
        each, fixed = np.polyfit(rows, seconds, 1)
        return max(float(fixed), 0.0), max(float(each), 0.0)

    def most_rows(self) -> int:
        """The most rows of one of the newest steps, as it was `AGAIN` steps ago at most."""
        with self._lock:
            if self._most is None or self.steps - self._most[0] >= AGAIN:
                self._most = self.steps, max((rows for rows, _ in list(self.step)[-512:]), default=0)
            return self._most[1]

    def stats(self, **now: int) -> EngineStats:
        """The figures, with those of this moment given by name."""
        with self._lock:
            rows = float(np.mean([n for n, _ in self.step])) if self.step else 0.0
            return EngineStats(
                **now,  # type: ignore[arg-type]
                steps=self.steps,
                rows=rows,
                answers=self.answers,
                underruns=self.underruns,
                hearing=self.hearing,
                step=Percentiles.of([seconds for _, seconds in self.step]),
                lateness=Percentiles.of(self.lateness),
                first_audio=Percentiles.of(self.first_audio),
                slack=self.slack,
            )
