"""Which rows step next, and whether one more live answer fits.

Deadlines belong to listeners. A listener who has heard nothing yet, or only the first frames, is served at once, as is one who
holds less than `low` frames: two, or as many as sound for 0.16 s, for which a thread of a busy machine may well have to wait
for its core. When somebody is low, rows that hold less than `high` come along, until most hold so much; then all rest until
somebody is low again, so that rows stay together, and the time between belongs to questions that come in. Answers that nobody
plays (a program reads them) are written whenever nothing else is due.

Admission goes by the lateness that was measured, never by a guess. With n live rows of which the 99th percentile of lateness is
L, and a step that takes c longer with one more row, another is let in while L + c < 0, and while a step with it takes no longer
than a frame plays. What a step takes is known from the engine's own steps; where these had less than half of the rows that are
asked about, from what `Engine.measure` found or kept. Where neither says anything, it is let in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from omni.engine.answer import AHEAD, UNREAD
from omni.engine.entering import Talk
from omni.engine.stats import Recorder
from omni.errors import UserError

TOLD = AHEAD // 4
"""Time steps of which the listener in another process may not have told yet that it has read them."""


@dataclass(frozen=True)
class Watermarks:
    """Frames of sound that live listeners hold.

    Attributes:
        low: a row whose listener holds less is stepped at once.
        high: a row whose listener holds more rests.
        least: seconds that `low` stands for at least, for frames that are short; `high` is raised by as many frames.
    """

    low: float = 2.0
    high: float = 8.0
    least: float = 0.16

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise UserError(f"watermarks: low is {self.low} and high is {self.high}; low must be above 0 and below high")
        if not self.least >= 0:
            raise UserError(f"watermarks: least is {self.least}; it must be a number of seconds from 0 on")

    def at(self, frame_rate: float) -> tuple[float, float]:
        """Both marks in frames, of which as many sound a second."""
        low = max(self.low, self.least * frame_rate)
        return low, self.high + low - self.low


@dataclass
class Due:
    """Talks by what their listeners hold.

    Attributes:
        new: of live listeners who have heard nothing yet, or the first frames only, to be stepped at once.
        low: of those who hold little, to be stepped at once.
        along: of others, to be stepped with the low ones; full, the number of those that hold enough.
        read: of programs that read.
        behind: of programs that do not.
        lost: of live listeners who do not, for too long.
        slack: seconds until another live listener is low; infinite where there is none.
        spare: seconds until one of them has run out of sound; infinite where there is none.
        late: somebody has run out of sound.
    """

    new: list[Talk] = field(default_factory=list)
    low: list[Talk] = field(default_factory=list)
    along: list[Talk] = field(default_factory=list)
    full: int = 0
    read: list[Talk] = field(default_factory=list)
    behind: list[Talk] = field(default_factory=list)
    lost: list[Talk] = field(default_factory=list)
    slack: float = float("inf")
    spare: float = float("inf")
    late: bool = False


def choose(talks: Iterable[Talk], now: float, marks: Watermarks, unread: float = UNREAD) -> Due:
    """Sort the talks whose rows have started by what their listeners hold at the time `now` of `time.perf_counter`.
    `unread`: seconds of sound that a live listener may leave unread, besides what is written ahead of it."""
    due, least = Due(), float("inf")
    for talk in talks:
        running = talk.running
        if not running.live:
            whole = running.pace == "whole" or (running.ahead < AHEAD and not running.resting)
            (due.read if whole else due.behind).append(talk)
            continue
        low, high = marks.at(running.frame_rate)
        if running.unread > high + TOLD + unread * running.frame_rate:
            due.lost.append(talk)
        elif running.plays is None and not talk.exact:
            due.new.append(talk)
        else:
            held = talk.exact if running.plays is None else running.held(now, talk.exact)  # it is about to play
            due.late |= held <= 0
            if talk.exact <= low or running.plays is None:
                due.new.append(talk)
            elif held < low:
                due.low.append(talk)
            elif held < high:
                due.along.append(talk)
            else:
                due.full += 1
            if (seconds := held / running.frame_rate) < least:
                least, due.slack = seconds, seconds - low / running.frame_rate
    due.spare = least
    return due


RECENT = 512
"""Newest chunks whose lateness counts."""

FEW = 32
"""Chunks before which their lateness says nothing."""

SHARE = 0.9
"""Part of a frame's time that steps may take; the rest is for questions that come in."""


@dataclass(frozen=True)
class Verdict:
    """Attributes: fits: whether one more does; why: what speaks against it, "" where nothing does."""

    fits: bool
    why: str = ""


def admit(recorder: Recorder, live: int, frame: float) -> Verdict:
    """Judge one more live answer.

    Args:
        live: answers that somebody hears at present.
        frame: seconds of a frame of sound.
    """
    if not live:
        return Verdict(True)
    step, each = _step(recorder, live + 1)
    if step > SHARE * frame:
        return Verdict(False, f"a step of {live + 1} rows takes {1e3 * step:.0f} ms, a frame plays {1e3 * frame:.0f} ms")
    measured = recorder.late(RECENT, FEW)
    if measured is not None and (late := measured + each) >= 0:
        return Verdict(False, f"1 % of the sound of {live} listeners is {1e3 * late:.0f} ms late or more with one more")
    return Verdict(True)


def _step(recorder: Recorder, rows: int) -> tuple[float, float]:
    """Seconds of a step of that many rows, and of the last of them; 0 where nothing is known."""
    cost = recorder.cost()
    known = None if recorder.known is None else recorder.known.costs
    if known is not None and (cost is None or 2 * recorder.most_rows() < rows):
        step = known.seconds(rows)
        return step, max(step - known.seconds(rows - 1), 0.0)
    fixed, each = cost or (0.0, 0.0)
    return fixed + each * rows, each
