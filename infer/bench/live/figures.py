"""Figures of live sessions: one line for each number of them, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from infer.bench.live.manner import Heard
from omni.engine.stats import Percentiles

Loop = Literal["closed", "nonstop", "open"]


def percentiles(values: Sequence[float]) -> Percentiles:
    """Of all values, in seconds."""
    if not values:
        return Percentiles()
    p50, p95, p99 = (float(x) for x in np.percentile(values, (50, 95, 99)))
    return Percentiles(p50, p95, p99, len(values))


@dataclass(frozen=True)
class BareFigures:
    """What as many people heard of the bare loop (`infer.bench.live.bare_people`); see `LiveFigures`.

    Attributes:
        cpu: share of a core that it took, with its decoding.
        written: columns of all rows that it wrote in a second.
    """

    lateness: Percentiles
    underruns: int
    first_audio: Percentiles
    active: float
    cpu: float
    written: float


@dataclass(frozen=True)
class LiveFigures:
    """What a number of sessions gave. Times in seconds; shares of one core.

    Attributes:
        loop: `closed` for people, `nonstop` for rows that speak all the time, `open` for callers at random.
        sessions: number of people, or, of callers, the number by which their rate was multiplied.
        seconds: for which they were measured.
        lateness: when a chunk of sound came to its listener, less when it was due.
        underruns: chunks that came late, as listeners note it.
        lateness_in_engine, underruns_in_engine: the same as the engine notes it, before the way to the listener; lateness of
            the newest 4,096 chunks.
        step: seconds of a step, of the newest 4,096.
        first_audio: from the end of a question to the first sound.
        active: mean number of answers under way; `rows`, mean number of rows of a step; `written`, columns of all rows that
            were written in a second.
        engine_cpu, generator_cpu: shares of a core that the engine took, with what it had decoded in this process, and that the
            load took.
        cost: CPU seconds of the engine for a second of a session.
        overhead: the engine's CPU time for a row's step over that of a bare runner and codec with as many rows; None where no
            step was taken.
        questions, answers, interrupted, refused, errors: numbers of them; `waiting`, mean number of questions that waited.
        bare: of as many people whom a bare loop answered; None where it was not asked for.
    """

    loop: Loop
    sessions: int
    seconds: float
    lateness: Percentiles
    underruns: int
    lateness_in_engine: Percentiles
    underruns_in_engine: int
    step: Percentiles
    first_audio: Percentiles
    active: float
    rows: float
    written: float
    engine_cpu: float
    generator_cpu: float
    cost: float
    overhead: float | None
    questions: int
    answers: int
    interrupted: int
    refused: int
    waiting: float
    errors: int
    bare: BareFigures | None = None

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def over_loop(self) -> float | None:
        """The engine's CPU time for a row's column over that of the bare loop; None where there is none."""
        if self.bare is None or not self.written or not self.bare.written:
            return None
        return self.engine_cpu / self.written / (self.bare.cpu / self.bare.written)


def counted(heard: Heard) -> dict[str, Any]:
    """The figures that listeners noted, by name."""
    return {
        "lateness": percentiles(heard.lateness),
        "first_audio": percentiles(heard.first_audio),
        "underruns": heard.underruns,
        "questions": heard.questions,
        "answers": heard.answers,
        "interrupted": heard.interrupted,
        "refused": heard.refused,
        "errors": len(heard.errors),
    }


@dataclass(frozen=True)
class LiveTable:
    """Figures of one model.

    Attributes:
        frame: seconds that a frame of sound plays.
    """

    title: str
    frame: float
    runs: list[LiveFigures]

    def plain(self) -> dict[str, Any]:
        """The table for JSON."""
        return {"title": self.title, "frame_seconds": self.frame, "runs": [run.plain() for run in self.runs]}


def largest_without_underrun(runs: Sequence[LiveFigures], loop: Loop) -> int | None:
    """The largest number of sessions of a kind up to which nobody heard a gap, and nobody was refused; None for none.
    Numbers at which nothing was heard do not count."""
    best = None
    for run in sorted((run for run in runs if run.loop == loop), key=lambda run: run.sessions):
        if run.underruns or run.refused or run.errors:
            break
        if run.first_audio.count:
            best = run.sessions
    return best


COLUMNS = (
    *("sessions", "loop", "late\nms", "under-\nruns", "step\nms", "first audio\nms", "active", "engine\nCPU", "load\nCPU"),
    *("a session\nCPU", "/ bare\nCPU", "waiting", "refused"),
)


def cells(run: LiveFigures) -> list[str]:
    """A line of the table; three times are the 50th, 95th and 99th percentile."""
    return [
        str(run.sessions),
        run.loop,
        _three(run.lateness),
        str(run.underruns),
        _three(run.step),
        _three(run.first_audio),
        f"{run.active:.1f}",
        f"{run.engine_cpu:.2f}",
        f"{run.generator_cpu:.2f}",
        f"{run.cost:.4f}",
        "" if run.overhead is None else f"{run.overhead:.2f}",
        f"{run.waiting:.1f}",
        str(run.refused),
    ]


def _three(found: Percentiles) -> str:
    values = (found.p50, found.p95, found.p99)
    return " ".join(
        "-" if value is None else f"{1e3 * value:.1f}" if abs(value) < 0.01 else f"{1e3 * value:.0f}" for value in values
    )


BARE_COLUMNS = ("sessions", "loop", "late\nms", "under-\nruns", "first audio\nms", "active", "CPU", "engine's /\nits CPU")


def bare_cells(run: LiveFigures) -> list[str]:
    """A line of the table of bare loops; none for a run without."""
    bare, over = run.bare, run.over_loop
    if bare is None:
        return []
    shares = f"{bare.active:.1f}", f"{bare.cpu:.2f}", "" if over is None else f"{over:.2f}"
    return [str(run.sessions), run.loop, _three(bare.lateness), str(bare.underruns), _three(bare.first_audio), *shares]


def show_live(table: LiveTable) -> None:
    """Print the table, and another of bare loops where there were some."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 132)
    console.print(lined(table.title, COLUMNS, [cells(run) for run in table.runs]))
    if lines := [line for run in table.runs if (line := bare_cells(run))]:
        console.print(lined("as many people whom a bare loop of PyTorch's kernels answers", BARE_COLUMNS, lines))
    console.print(
        f"a frame plays {1e3 * table.frame:.0f} ms; times are 50th, 95th and 99th percentile; CPU in shares of a core"
    )


def lined(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Any:
    """A table for a terminal, whose cells are never wrapped."""
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(title=title, title_justify="left", box=box.SIMPLE, title_style="bold", padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        shown.add_column(name, justify="left" if number == 1 else "right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    return shown
