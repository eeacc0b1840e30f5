"""An answer as who asked sees it: its events as they come, and what of them was taken, which counts as delivered."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from omni.engine.answer import CodedSound, Pace, lateness, milestone
from omni.errors import EngineLost
from omni.generate.listening import TurnFrames
from omni.generate.question import Asked
from omni.generate.results import AudioChunk, Clock, Ended, Event, Reason, TextDelta, Timings

EVERY = 16
"""Events after which their number is told to an engine in another process; a quarter of what a row is written ahead."""


class Link(ABC):
    """A way to an engine: calls that sessions make, and the listeners that what comes is for.

    Attributes:
        every: number of events after which it is told how many were taken.
        remote: whether the engine is in another process.
        lost: why nothing is answered any more; None while the engine lives.
        answers: take the events that come for them; turns: take what the engine's turn head says of sounds, by number.
        numbers: that no session, answer or sound of the engine has.
    """

    every, remote = EVERY, True
    lost: EngineLost | None = None

    def __init__(self) -> None:
        self.answers: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
        self.turns: weakref.WeakValueDictionary[int, TurnFrames] = weakref.WeakValueDictionary()
        self.numbers = count(1)

    @abstractmethod
    def check(self, session: int) -> None:
        """UserError where a session's engine takes no question; EngineLost where its process has ended."""

    @abstractmethod
    def request(self, name: str, *args: Any) -> Any:
        """Start a conversation (`session`), or have a method of `omni.engine.conversation.Conversation` called, or a property
        read; waits for the result."""

    @abstractmethod
    def tell(self, name: str, *args: Any) -> None:
        """`request` of something that has no result; waits for nobody."""


class Listener:
    """An answer as who asked sees it, in any one thread at a time.

    Args:
        link: to its engine.
        session, number: numbers of its conversation, and of itself, among all of the engine's clients.
        rate: of its sound in Hz, 0 where it makes none.
        stop_when: asked about the text so far, after each piece of it; true ends the answer.

    Attributes:
        taken: number of events that were taken; `reported`, of which the engine knows.
        started: whether it was asked for; cancelled: is to stop; settled: is in the history.
        wake: called when there is an event.
        reader: thread that waits for an event, 0 for none; -1 for a task.
    """

    decodes = False

    def __init__(
        self,
        link: Link,
        session: int,
        number: int,
        asked: Asked,
        seed: int | None,
        clock: Clock,
        pace: Pace,
        rate: int,
        stop_when: Callable[[str], bool] | None = None,
    ) -> None:
        self.session, self.number, self.asked, self.seed, self.clock = session, number, asked, seed, clock
        self.pace, self.rate, self.stop_when = pace, rate, stop_when
        self.taken = self.reported = self.reader = 0
        self.cancelled = self.settled = self.started = False
        self.wake: Callable[[], None] | None = None
        self.changed = threading.Condition(threading.RLock())
        self._link = link
        self._text, self._samples = "", 0
        self._plays: float | None = None  # when a live listener's sound began, less the time in which it waited
        self._late: list[float] = []  # seconds by which newest chunks were decoded after they were due
        self._eager = self._over = False
        self._events: deque[Event] = deque()
        self._failure: BaseException | None = None
        self._ended: Ended | None = None
        self._known = Timings()  # by its events, for an end that the engine does not bring
        self._awaited: tuple[str, ...] = ()  # reasons of the end that `stop` brings

    @property
    def ended(self) -> bool:
        """Whether its end has come, or its failure."""
        return self._ended is not None or self._failure is not None

    def start(self) -> bool:
        """Note that it is asked for; False where it was let go before."""
        with self.changed:
            self.started = not self.settled
            return self.started

    # --- what comes ---------------------------------------------------------------------------------------------------

    def put(self, event: Event | CodedSound, notify: bool = True) -> None:
        """Take an event; of an answer that was stopped only the end that this brought: others were on their way. Who reads it
        whole is woken by its end alone: of many side by side, each would take the interpreter from the engine at every step."""
        notify = notify and (self.pace != "whole" or self.stop_when is not None)
        with self.changed:
            if not isinstance(event, Ended):
                if not self.cancelled:
                    assert not isinstance(event, CodedSound)  # it was decoded on its way
                    self._events.append(event)
                    self._known = milestone(self._known, event, self.clock.seconds)
            elif not self.cancelled or event.reason in self._awaited:
                self.end(event)
            if notify:
                self.notify()

    def decoded(self, start: float) -> None:
        """Note that the chunk at `start` was decoded in this process."""
        if self.pace == "live":
            with self.changed:
                self._plays, late = lateness(self._plays, start)
                self._late += [] if late is None else [late]

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self._failure = error
            self.notify()

    def end(self, ended: Ended) -> None:
        """Give the listener an end, where it has none."""
        with self.changed:
            if self._ended is None:
                if ended.timings == Timings():
                    ended = replace(ended, timings=replace(self._known, total=self.clock.seconds))
                self._ended = ended
                self.notify()

    def where(self) -> None:
        with self.changed:
            self._eager = True
            self._tell()

    def notify(self) -> None:
        self.changed.notify_all()
        if self.wake is not None:
            self.wake()

    # --- what is taken ------------------------------------------------------------------------------------------------

    def take(self) -> Event:
        """Wait for the next event and take it; it counts as delivered. After a cancel there is only the end."""
        with self.changed:
            self.reader = threading.get_ident()
            try:
                while (event := self._next()) is None:
                    self.changed.wait(1.0)  # a handler of signals may have ended it just before this waits
            finally:
                self.reader = 0
        self._judge(event)
        return event

    def poll(self) -> Event | None:
        """The next event, where there is one; whoever asks again after the end gets it again."""
        with self.changed:
            event = self._next()
        self._judge(event)
        return event

    def _next(self) -> Event | None:
        if self._events:
            event = self._events.popleft()
            if isinstance(event, AudioChunk):
                self._samples += len(event.samples)
            self._count()
            return event
        if self._ended is not None:
            if not self._over:
                self._over = True
                self._count()
            audio = self._samples / self.rate if self.rate else 0.0
            return replace(self._ended, timings=replace(self._ended.timings, audio=audio))
        if self._failure is not None:
            raise self._failure
        return None

    def _judge(self, event: Event | None) -> None:
        """Ask the function about the text."""
        if self.stop_when is None or not isinstance(event, TextDelta):
            return
        self._text += event.text
        try:
            if self.stop_when(self._text):
                self.stop("stop")
        except (Exception, SystemExit) as error:  # Ctrl-C is not the function's
            self.stop("error", f"the function `stop` raised {type(error).__name__}: {error}")

    def _count(self) -> None:
        if not self.cancelled:
            self.taken += 1
            if self.taken - self.reported >= self._link.every or self._eager:
                self._tell()

    def _tell(self) -> None:
        if self.taken > self.reported:
            self.reported = self.taken
            late, self._late = self._late, []
            self._link.tell("taken", self.session, self.number, self.taken, late)
        self._eager = self._eager and bool(self._events)

    def stop(self, reason: Reason = "cancelled", error: str | None = None) -> None:
        """Have it stopped: its listener gets nothing more of it but an end for this reason, which comes from the engine."""
        with self.changed:
            if self.quiet():
                self._ended = None
                self._awaited, lost = (reason, "cancelled", "error"), self._link.lost
                self._link.tell("stop", self.session, self.number, self.taken, reason, error)
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
