"""Which rows step next: deadlines belong to listeners.

A listener who has heard nothing yet, or only the first frames, is served at once, as is one who holds less than `low` frames:
two, or as many as sound for 0.16 s, for which a thread of a busy machine may well have to wait for its core. When somebody is
low, rows that hold less than `high` come along, until most hold so much; then all rest until somebody is low again, so that
rows stay together, and the time between belongs to questions that come in. Answers that nobody plays (a program reads them) are
written whenever nothing else is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from omni.engine.client import AHEAD, UNREAD
from omni.engine.entering import Talk
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

    Args:
        unread: seconds of sound that a live listener may leave unread, besides what is written ahead of it.
    """
    found, least = Due(), float("inf")
    for talk in talks:
        running = talk.running
        if not running.live:
            whole = running.pace == "whole" or (running.ahead < AHEAD and not running.resting)
            (found.read if whole else found.behind).append(talk)
            continue
        low, high = marks.at(running.frame_rate)
        if running.unread > high + TOLD + unread * running.frame_rate:
            found.lost.append(talk)
        elif running.plays is None and not talk.exact:
            found.new.append(talk)
        else:
            held = talk.exact if running.plays is None else running.held(now, talk.exact)  # it is about to play
            found.late |= held <= 0
            if talk.exact <= low or running.plays is None:
                found.new.append(talk)
            elif held < low:
                found.low.append(talk)
            elif held < high:
                found.along.append(talk)
            else:
                found.full += 1
            if (seconds := held / running.frame_rate) < least:
                least, found.slack = seconds, seconds - low / running.frame_rate
    found.spare = least
    return found
