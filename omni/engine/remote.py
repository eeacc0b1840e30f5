"""Sessions of an engine in another process: the faces of `omni.generate.session.Session`.

Events come in one reader thread (`omni.engine.process`) and wait here until their listener takes them. What was taken is what
was delivered: its number goes to the engine's process now and then, so that rows whose listener is behind rest, and with each
cancel, so that the history is cut there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from omni.audio.io import SAMPLE_RATE
from omni.engine.client import Pace
from omni.engine.wire import EngineLost
from omni.errors import UserError
from omni.generate.bounds import check_number
from omni.generate.listener import joined
from omni.generate.messages import Message
from omni.generate.options import refuse_keywords
from omni.generate.question import Asked, Question
from omni.generate.results import Answer, AudioChunk, Ended, Event, Timings
from omni.tasks import Task, Turn

EVERY = 16
"""Events after which their number is told to the engine's process; a quarter of what a row is written ahead."""


class Host(Protocol):
    """The process of an engine, as its sessions see it."""

    sample_rate: int

    def request(self, name: str, *args: Any) -> Any: ...

    def tell(self, name: str, *args: Any) -> None: ...

    def read(self, question: Question, task: Task | str, sample_rate: int) -> Asked: ...

    def register(self, answer: RemoteAnswer) -> None: ...


class RemoteAnswer:
    """An answer under way; `take`, `poll` and `wake` are those of `omni.engine.client.Running`.

    Attributes:
        number: its number among all answers of the process.
        taken: number of events that were taken.
        cancelled, settled: whether it is to stop; whether it is in the history.
        speaks: whether its task speaks and there is a codec.
        wake: called when there is an event.
        reader: thread that waits for an event, 0 for none.
    """

    def __init__(self, host: Host, number: int, speaks: bool) -> None:
        self.host, self.number, self.speaks = host, number, speaks
        self.taken = self.told = self.samples = self.reader = 0
        self.cancelled = self.settled = False
        self.wake: Callable[[], None] | None = None
        self.changed = threading.Condition(threading.RLock())
        self._eager = False
        self._events: deque[Event] = deque()
        self._failure: BaseException | None = None

    # --- the reader thread --------------------------------------------------------------------------------------------

    def put(self, events: list[Event]) -> None:
        with self.changed:
            if not self.cancelled:
                self._events += events
                self._notify()

    def fail(self, error: BaseException) -> None:
        """Raise an exception for the listener, after the events that have come."""
        with self.changed:
            self._failure = error
            self._notify()

    def end(self, ended: Ended) -> None:
        """Give the listener an end, where it has none."""
        with self.changed:
            if not self.settled and not any(isinstance(event, Ended) for event in self._events):
                self._events.append(ended)
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
        """The next event, where there is one."""
        with self.changed:
            if self._events:
                event = self._events.popleft()
                if isinstance(event, AudioChunk):
                    self.samples += len(event.samples)
                if isinstance(event, Ended):
                    self._events.append(event)  # whoever asks again gets it again
                    rate = self.host.sample_rate
                    event = replace(event, timings=replace(event.timings, audio=self.samples / rate if self.speaks else 0.0))
                if not self.cancelled:
                    self.taken += 1
                    if self.taken - self.told >= EVERY or self._eager:
                        self._tell()
                return event
            if self._failure is not None:
                raise self._failure
            return None

    def _tell(self) -> None:
        if self.taken > self.told:
            self.told = self.taken
            self.host.tell("taken", self.number, self.taken)
        self._eager = self._eager and bool(self._events)

    def stop(self) -> None:
        """The listener gets nothing more of it but its end, which `end` brings."""
        with self.changed:
            self.cancelled = True
            self._events.clear()


class RemoteSession:
    """One conversation. Made by `EngineProcess.session`; close it (or use `with`) to free its slot.

    Its calls are those of `omni.generate.session.Session`, which documents them. Questions are read in this process.
    """

    def __init__(self, host: Host, number: int, pace: Pace, numbers: Iterator[int], speaks: bool) -> None:
        self._host, self._number, self._pace, self._numbers, self._speaks = host, number, pace, numbers, speaks
        self._last: RemoteAnswer | None = None
        self._closed = False
        self._lock = threading.RLock()  # guards the last answer
        self._dropped = weakref.finalize(self, host.tell, "close", 0, number)
        self._dropped.atexit = False

    def ask(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
        **more: NoReturn,
    ) -> Iterator[Event]:
        """Ask, and get the answer as events; see `Session.ask`."""
        refuse_keywords("ask", more, ("sample_rate", "seed"))
        return self._events(self.open(question, task, sample_rate, seed))

    def open(
        self, question: Question, task: Task | str, sample_rate: int, seed: int | None, pace: Pace | None = None
    ) -> RemoteAnswer:
        """Ask; the answer's events are to be taken, and `settle` called after the last of them."""
        start = time.perf_counter()
        if seed is not None:
            check_number("seed", seed)
        self._open()
        self._commit(self._last)
        asked = self._host.read(question, task, sample_rate)
        turn = replace(asked.turn, task=asked.task.name)
        clip = None if asked.clip is None else asked.clip.numpy()
        with self._lock:
            self._open()
            self._commit(self._last)  # once more: another thread may have asked meanwhile
            answer = RemoteAnswer(self._host, next(self._numbers), self._speaks and asked.task.audio)
            self._host.register(answer)
            waited = time.perf_counter() - start
            self._host.request("ask", self._number, answer.number, turn, clip, seed, pace or self._pace, waited)
            self._last = answer
        return answer

    def answer(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
        **more: NoReturn,
    ) -> Answer:
        """Ask, and wait for the whole answer; see `Session.answer`."""
        refuse_keywords("answer", more, ("sample_rate", "seed"))
        answer = self.open(question, task, sample_rate, seed, "whole")
        text, sound, ended = joined(self._events(answer))
        tokens, codes = self._delivered()
        return Answer(
            text=text,
            audio=sound if answer.speaks and codes is not None else None,
            sample_rate=self._host.sample_rate,
            tokens=tuple(tokens or ()),
            codes=codes,
            timings=ended.timings,
            ended=ended.reason,
            error=ended.error,
        )

    def cancel(self, played_seconds: float | None = None, shown_characters: int | None = None) -> None:
        """Stop the answer that is being made, and cut the last answer in the history to the delivered part; see
        `Session.cancel`."""
        for name, value in (("played_seconds", played_seconds), ("shown_characters", shown_characters)):
            if value is not None:
                check_number(name, value)
        with self._lock:
            if self._last is not None:
                self._settle(self._last, "cancel", played_seconds, shown_characters)

    @property
    def history(self) -> list[Message]:
        """See `Session.history`."""
        found: list[Message] = self._host.request("history", self._number)
        return found

    @property
    def turns(self) -> tuple[Turn, ...]:
        """See `Session.turns`."""
        found: tuple[Turn, ...] = self._host.request("turns", self._number)
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """See `Session.save`."""
        with self._lock:
            self._host.request("save", self._number, os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else path)
        return Path(path)

    def close(self) -> None:
        """End the session and free its slot; from any thread. An answer under way is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._dropped.detach()
            if self._last is not None:
                self._settle(self._last)
            with suppress(EngineLost):  # its slot went with it
                self._host.request("close", self._number)

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one answer ---------------------------------------------------------------------------------------------------

    def _events(self, answer: RemoteAnswer) -> Iterator[Event]:
        try:
            while True:
                event = answer.take()
                if isinstance(event, Ended):
                    break
                yield event
        finally:
            with self._lock:
                self._settle(answer)
        yield event

    def _delivered(self) -> tuple[Any, Any]:
        """Ids and codes of the delivered part of the last answer."""
        try:
            found: tuple[Any, Any] = self._host.request("delivered", self._number)
        except EngineLost:
            return None, None
        return found

    def _commit(self, answer: RemoteAnswer | None) -> None:
        """Settle an answer, unless another thread waits for it."""
        with self._lock:
            if answer is None or answer.settled:
                return
            if answer.reader not in (0, threading.get_ident()):
                raise UserError(
                    "another answer of this session is being made in another thread; cancel it, or wait for its end"
                )
            self._settle(answer)

    def _settle(self, answer: RemoteAnswer, *interrupted: Any) -> None:
        """Put the delivered part of an answer into the history (once), or cut it again where it was interrupted."""
        if answer.settled and not interrupted:
            return
        if not answer.settled:
            answer.stop()
        try:
            ended = self._host.request("settle", self._number, answer.number, answer.taken, *interrupted[1:])
        except EngineLost as error:
            if interrupted:
                raise
            ended = Ended("error", Timings(), str(error))
        answer.end(ended or Ended("cancelled", Timings()))
        answer.settled = True

    def _open(self) -> None:
        if self._closed:
            raise UserError("this session is closed; start a new one")
