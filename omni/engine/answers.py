"""Answers of an engine in another process, as their listeners see them.

Events come in one reader thread (`omni.engine.link`) and wait here until their listener takes them. What was taken is what was
delivered: its number goes to the engine's process now and then, so that rows whose listener is behind rest, and with each
cancel, so that the history is cut there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from omni.engine.client import Pace
from omni.engine.wire import EngineLost
from omni.generate.question import Asked
from omni.generate.results import AudioChunk, Clock, Ended, Event, Reason, TextDelta, Timings

EVERY = 16
"""Events after which their number is told to the engine's process; a quarter of what a row is written ahead."""


class Peer(Protocol):
    """What answers need of `omni.engine.link.Link`."""

    lost: EngineLost | None

    def tell(self, name: str, *args: object) -> None: ...


class RemoteAnswer:
    """An answer under way; `take`, `poll`, `stop` and `wake` are those of `omni.engine.client.Running`.

    Args:
        number: its number among all answers of the process.
        asked: the question.
        clock: started when it came.
        rate: of its sound in Hz, 0 where it makes none.

    Attributes:
        taken: number of events that were taken; `told`, of which the engine's process knows.
        started: whether it was asked for.
        cancelled, settled: whether it is to stop; whether it is in the history.
        wake: called when there is an event.
        reader: thread that waits for an event, 0 for none; -1 for a task.
    """

    def __init__(self, link: Peer, number: int, asked: Asked, seed: int | None, clock: Clock, pace: Pace, rate: int) -> None:
        self.number, self.asked, self.seed, self.clock, self.pace, self.rate = number, asked, seed, clock, pace, rate
        self.taken = self.acknowledged = self.samples = self.reader = 0
        self._plays: float | None = None  # when a live listener's sound began, less the time in which it waited
        self._late: list[float] = []  # seconds by which newest chunks were decoded after they were due
        self.cancelled = self.settled = self.started = False
        self.wake: Callable[[], None] | None = None
        self.changed = threading.Condition(threading.RLock())
        self._link = link
        self._eager = self._over = False
        self._events: deque[Event] = deque()
        self._failure: BaseException | None = None
        self._ended: Ended | None = None
        self._known = Timings()  # by its events, for an end that the engine's process does not bring
        self._awaited: tuple[str, ...] = ()  # reasons of the end that `stop` brings

    def start(self) -> bool:
        """Note that it is asked for; False where it was let go before."""
        with self.changed:
            self.started = not self.settled
            return self.started

    # --- the reader thread --------------------------------------------------------------------------------------------

    def put(self, events: list[Event]) -> None:
        """Take events; of an answer that was stopped only the end that this brought, for others may have been on their way."""
        with self.changed:
            for event in events:
                if not isinstance(event, Ended):
                    self._events += [] if self.cancelled else [event]
                    if isinstance(event, TextDelta) and self._known.first_text is None:
                        self._known = replace(self._known, first_text=self.clock.seconds)
                    elif isinstance(event, AudioChunk) and self._known.first_audio is None:
                        self._known = replace(self._known, first_audio=self.clock.seconds)
                elif not self.cancelled or event.reason in self._awaited:
                    self.end(event)
            self._notify()

    def decoded(self, start: float, now: float) -> None:
        """Note that the chunk at `start` was decoded here at the time `now`."""
        if self.pace != "live":
            return
        with self.changed:
            if self._plays is None:
                self._plays = now
                return
            late = now - (self._plays + start)
            self._plays += max(late, 0.0)
            self._late.append(late)

    def fail(self, error: BaseException) -> None:
        """Raise an exception for the listener, after the events that have come."""
        with self.changed:
            self._failure = error
            self._notify()

    def end(self, ended: Ended) -> None:
        """Give the listener an end, where it has none."""
        with self.changed:
            if self._ended is None:
                if ended.timings == Timings():
                    ended = replace(ended, timings=replace(self._known, total=self.clock.seconds))
                self._ended = ended
                self._notify()

    def where(self) -> None:
        """Tell how far the listener has taken events; its row rests until it has taken more."""
        with self.changed:
            self._eager = True
            self._tell()

    def _notify(self) -> None:
        self.changed.notify_all()
        if self.wake is not None:
            self.wake()

    # --- the listener -------------------------------------------------------------------------------------------------

    def take(self) -> Event:
        """Wait for the next event and take it; it counts as delivered. After a cancel there is only the end."""
        with self.changed:
            self.reader = threading.get_ident()
            try:
                while (event := self.poll()) is None:
                    self.changed.wait()
                return event
            finally:
                self.reader = 0

    def poll(self) -> Event | None:
        """The next event, where there is one; whoever asks again after the end gets it again."""
        with self.changed:
            if self._events:
                event = self._events.popleft()
                if isinstance(event, AudioChunk):
                    self.samples += len(event.samples)
                self._count()
                return event
            if self._ended is not None:
                if not self._over:
                    self._over = True
                    self._count()
                return replace(self._ended, timings=self.timings())
            if self._failure is not None:
                raise self._failure
            return None

    def timings(self) -> Timings:
        """Of its end, with the sound that was taken."""
        timings = self._known if self._ended is None else self._ended.timings
        return replace(timings, audio=self.samples / self.rate if self.rate else 0.0)

    def _count(self) -> None:
        if not self.cancelled:
            self.taken += 1
            if self.taken - self.acknowledged >= EVERY or self._eager:
                self._tell()

    def _tell(self) -> None:
        if self.taken > self.acknowledged:
            self.acknowledged = self.taken
            late, self._late = self._late, []
            self._link.tell("taken", self.number, self.taken, late)
        self._eager = self._eager and bool(self._events)

    def stop(self, reason: Reason = "cancelled", error: str | None = None) -> None:
        """Have it stopped: its listener gets nothing more of it but an end for this reason, which comes from the engine."""
        with self.changed:
            if self.quiet():
                self._ended = None
                self._awaited, lost = (reason, "cancelled", "error"), self._link.lost
                self._link.tell("stop", self.number, self.taken, reason, error)
                if lost is not None:
                    self.end(Ended("error", Timings(), str(lost)))

    def quiet(self) -> bool:
        """Drop the events that were not taken; another end is to come. Returns whether this is the first time."""
        with self.changed:
            first, self.cancelled = not self.cancelled, True
            self._events.clear()
            if not self._over:
                self._ended = None
            return first
