"""What each process of a run is doing, and which of them holds up the others.

All processes run the same program. One that is further behind in it than the others, or that sends no notes, holds them up.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

NAMED = 4
"""Most processes that a line names."""


class Activity(NamedTuple):
    """What a process is doing.

    Attributes:
        step: of the training, the present one.
        phase: its name, for messages.
        long: it may take any time, as validation by the first process does.
        since: `time.monotonic()` at its beginning.
        exchanges, mark: place in the program: exchanges of the process group entered so far, and phases since the last one.
        waiting: in an exchange.
    """

    step: int = 0
    phase: str = "start"
    long: bool = True
    since: float = 0.0
    exchanges: int = 0
    mark: int = 0
    waiting: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.exchanges, self.mark

    def phased(self, phase: str, long: bool, step: int) -> Activity:
        """The next phase."""
        return Activity(step, phase, long, time.monotonic(), self.exchanges, self.mark + 1)

    def exchanging(self) -> Activity:
        """The same phase, in an exchange."""
        return Activity(self.step, self.phase, self.long, time.monotonic(), self.exchanges + 1, 0, True)


class Identity(NamedTuple):
    """Where a process runs: host, process id, and a text that two processes share where they see each other's ids."""

    host: str
    pid: int
    space: str

    @classmethod
    def own(cls) -> Identity:
        space = ""
        with suppress(OSError):
            space = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), os.getpid(), space)

    @property
    def state(self) -> str:
        """State of the process by the letter of Linux, `X` for none; empty where it cannot be asked."""
        mine = Identity.own()
        if not mine.space or (self.host, self.space) != (mine.host, mine.space):
            return ""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "X"

    @property
    def dead(self) -> bool:
        return self.state in ("X", "Z")


STATES = {
    "T": "it is stopped",
    "t": "it is stopped",
    "D": "it waits for a disk or a device",
    "X": "it is dead",
    "Z": "it is dead",
}
"""What a process's state adds to a message."""


@dataclass
class Note:
    """The last note of a process, and when (by this process's clock) it came.

    Attributes:
        beat: number of the note.
        age: seconds in the phase when the note was sent.
        ended: why the process has ended; None while it goes on.
    """

    beat: int
    activity: Activity
    age: float
    ended: str | None
    came: float

    def seconds(self, now: float) -> float:
        """Seconds in the phase."""
        return self.age + now - self.came


@dataclass
class Standstill:
    """Which processes hold up the others, the line that says so, and whether that may end the run."""

    culprits: Sequence[int]
    line: str
    final: bool


def judge(
    rank: int, own: Activity, notes: Sequence[Note | None], who: Sequence[Identity], now: float, silence: float
) -> Standstill:
    """Finds the processes that hold up the others.

    Args:
        rank, own: this process, and what it is doing for too long.
        notes: of all processes; its own does not matter.
        silence: seconds without a note after which a process is silent.
    """
    known = {r: note.activity for r, note in enumerate(notes) if note is not None} | {rank: own}
    silent = [r for r, note in enumerate(notes) if r != rank and (note is None or now - note.came > silence)]
    last = min(activity.place for activity in known.values())
    behind = [r for r in sorted(known) if known[r].place == last]
    culprits = [r for r in silent if r in behind or r not in known] or behind
    waited = round(now - own.since)
    if len(culprits) == len(who):
        phases = [f'process {r} in "{known[r].phase}"' for r in culprits]
        same = len({activity.phase for activity in known.values()}) == 1
        doing = f'all processes are in "{own.phase}"' if same else listed(phases)
        return Standstill(culprits, f"step {own.step}: no process goes on for {waited} s: {doing}", own.waiting or not own.long)
    others = [r for r in culprits if r != rank]
    texts = listed([named(r, notes[r], who[r], now, r in silent) for r in others])
    if others and all(r in known and known[r].long and r not in silent for r in others):
        return Standstill(culprits, f"step {own.step}: waiting {waited} s for {texts}; that may take any time", False)
    return Standstill(culprits, f'step {own.step}: waiting {waited} s in "{own.phase}" for {texts}', True)


def named(rank: int, note: Note | None, who: Identity, now: float, silent: bool) -> str:
    """Names a process, what it is doing and since when, and where it runs."""
    state = who.state
    more = f"; {STATES[state]}" if state in STATES and (silent or state == "D") else ""
    where = f"(host {who.host}, pid {who.pid}{more})"
    if note is None:
        return f"process {rank}, which has not been heard of {where}"
    phase = f'"{note.activity.phase}"'
    if silent:
        return f"process {rank}, which was last heard of {round(now - note.came)} s ago, in {phase} {where}"
    return f"process {rank}, which has been in {phase} for {round(note.seconds(now))} s {where}"


def listed(texts: Sequence[str]) -> str:
    """Lists the first of some texts, and counts the others."""
    more = len(texts) - NAMED
    return "; ".join(texts[:NAMED]) + (f"; and {more} more" if more > 0 else "")
