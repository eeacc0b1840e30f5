"""Figures of live sessions, one line for each number of them: as a table, as JSON, and as the deadline curve."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from omni.engine.stats import Percentiles
from omni.utils.charts import BESIDE, INK, drawn, print_table, printable

COLUMNS = (
    *("sessions", "loop", "late\nms", "under-\nruns", "step\nms", "first audio\nms", "active", "engine\nCPU", "load\nCPU"),
    *("a session\nCPU", "/ bare\nCPU", "waiting"),
)


@dataclass(frozen=True)
class LiveFigures:
    """What a number of sessions gave. Times in seconds; CPU in shares of one core.

    Attributes:
        loop: `closed` for people, `nonstop` for rows that speak all the time.
        lateness, first_audio: of chunks at their listeners, below zero early; from the end of a question to the first sound.
        active, rows, waiting: mean numbers of answers under way, of rows of a step, and of questions that waited.
        written: columns of all rows that were written in a second.
        engine_cpu, generator_cpu: of the engine, with what it had decoded in this process, and of the load.
        overhead: the engine's CPU time for a row's step over that of a bare runner and codec; None without a step.
    """

    loop: Literal["closed", "nonstop"]
    sessions: int
    seconds: float
    lateness: Percentiles
    underruns: int
    step: Percentiles
    first_audio: Percentiles
    active: float
    rows: float
    written: float
    engine_cpu: float
    generator_cpu: float
    overhead: float | None
    questions: int
    answers: int
    interrupted: int
    waiting: float
    errors: int


@dataclass(frozen=True)
class LiveTable:
    """Figures of one model, whose frames of sound play for `frame` seconds each."""

    title: str
    frame: float
    runs: list[LiveFigures]

    def plain(self) -> dict[str, Any]:
        """The table for JSON."""
        return {"title": self.title, "frame_seconds": self.frame, "runs": [asdict(run) for run in self.runs]}

    def show(self) -> None:
        """Prints the table; three times are the 50th, 95th and 99th percentile."""
        print_table(self.title, COLUMNS, [cells(run) for run in self.runs])
        print(f"a frame plays {1e3 * self.frame:.0f} ms; times are 50th, 95th and 99th percentile; CPU in shares of a core")

    def largest_without_underrun(self) -> int | None:
        """The largest number up to which somebody heard something, and nobody a gap; None for none."""
        best = None
        for run in self.runs:
            if run.underruns or run.errors:
                break
            best = run.sessions if run.first_audio.count else best
        return best


def cells(run: LiveFigures) -> list[str]:
    """A line of the table."""
    late, step, first = (_three(times) for times in (run.lateness, run.step, run.first_audio))
    shares = [f"{run.active:.1f}", f"{run.engine_cpu:.2f}", f"{run.generator_cpu:.2f}", f"{run.engine_cpu / run.sessions:.4f}"]
    rest = ["" if run.overhead is None else f"{run.overhead:.2f}", f"{run.waiting:.1f}"]
    return [str(run.sessions), run.loop, late, str(run.underruns), step, first, *shares, *rest]


def _three(found: Percentiles) -> str:
    times = [None if value is None else 1e3 * value for value in (found.p50, found.p95, found.p99)]
    return " ".join("-" if value is None else f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}" for value in times)


def draw(table: LiveTable, file: Path) -> Path:
    """Draws lateness, steps and first audio over the number of sessions as a PNG file."""
    numbers, best = [run.sessions for run in table.runs], table.largest_without_underrun()
    with drawn(file, 3, 1, (9.5, 9), BESIDE, sharex=True, height_ratios=(3, 2, 2)) as axes:
        for axis, name in zip(axes[:, 0], ("lateness", "step", "first_audio"), strict=True):
            for part, color in (("p50", "C0"), ("p95", "C1"), ("p99", "C3")):
                points = [(run.sessions, getattr(getattr(run, name), part)) for run in table.runs]
                if points := [(number, 1e3 * value) for number, value in points if value is not None]:
                    axis.plot(*zip(*points, strict=True), "-o", color=color, label=part)
            if best is not None:
                axis.axvline(best, color="C2", linewidth=1.2, linestyle=":", label=f"{best} without underrun")
            axis.set_xscale("log", base=2)
            axis.set_xticks(numbers, [str(n) for n in numbers])
            axis.minorticks_off()
            axis.set_ylabel(f"{name.replace('_', ' ')} (ms)")
        late, step, first = axes[:, 0]
        late.axhline(0.0, color=INK, linewidth=1.2, label="due")
        step.axhline(1e3 * table.frame, color=INK, linewidth=1.2, label=f"a frame, {1e3 * table.frame:.0f} ms")
        first.set_xlabel("live sessions")
        late.set_title("\n".join(textwrap.wrap(printable(table.title, 200), 95)))
    return file
