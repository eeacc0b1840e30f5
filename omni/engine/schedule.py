"""Which rows step next: deadlines belong to listeners.

A listener who has heard nothing yet, or only the first frames, is served at once, as is one who holds less than `low` frames.
When somebody is low, rows that hold less than `high` come along, until most hold so much; then all rest until somebody is low
again, so that rows stay together, and the time between belongs to questions that come in. Answers that nobody plays (a program
reads them) are written whenever nothing else is due.
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
    """

    low: float = 2.0
    high: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise UserError(f"watermarks: low is {self.low} and high is {self.high}; low must be above 0 and below high")


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
        elif running.unread > marks.high + TOLD + unread * running.frame_rate:
            found.lost.append(talk)
        elif running.plays is None and not talk.exact:
            found.new.append(talk)
        else:
            held = talk.exact if running.plays is None else running.held(now, talk.exact)  # it is about to play
            found.late |= held <= 0
            if talk.exact <= marks.low or running.plays is None:
                found.new.append(talk)
            elif held < marks.low:
                found.low.append(talk)
            elif held < marks.high:
                found.along.append(talk)
            else:
                found.full += 1
            if (seconds := held / running.frame_rate) < least:
                least, found.slack = seconds, seconds - marks.low / running.frame_rate
    found.spare = least
    return found
