"""Reads an answer: takes its events, in a plain loop or one of asyncio, and makes the whole answer of them. In asyncio events
come by `call_soon_threadsafe`, and nothing here holds the loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from omni.errors import UserError
from omni.generate.question import Listening, Withdrawn, is_coming
from omni.generate.results import Answer, AudioChunk, Ended, Event, TextDelta, Timings
from omni.tasks import Task, find_task

if TYPE_CHECKING:
    from omni.engine.listener import Listener


def joined(events: Iterable[Event]) -> tuple[str, Tensor, Ended]:
    """Text and sound [S] of the events of an answer up to its end, and the end."""
    text, sound = [], [torch.zeros(0)]
    for event in events:
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, AudioChunk):
            sound.append(event.samples)
        elif isinstance(event, Ended):
            return "".join(text), torch.cat(sound), event
    return "".join(text), torch.cat(sound), Ended("cancelled", Timings())


TASK = -1
"""`Listener.reader` of an answer that a task waits for."""

_TURNS = 3
"""Turns of the loop in which a task that was cancelled may let go of the answer before it counts as another's."""


class AnswerStream(AsyncIterator[Event], AbstractAsyncContextManager["AnswerStream"]):
    """The events of one answer, as a plain iterator or (in one task at a time) an asynchronous one; or all of it, by `answer`.
    `Session.ask` makes it.

    Outside of a loop of asyncio the question is asked at once. In one it is read in a thread when the first event is awaited,
    or by `iter`. The answer is cancelled when the stream is closed or dropped by leaving the loop. An asynchronous one is
    cancelled too when the task that took its last event is cancelled, and when its loop is closed: at once, without waiting.
    What was taken is in the history. UserError: see `Session.ask`; in a loop of asyncio it is raised where the first event is
    taken.

    Args:
        session: an `omni.generate.session.Session`.
        question: as for `Session.ask`.
        ends_session: end the session with the answer.

    Attributes:
        running: the answer, None before its question was read.
    """

    def __init__(
        self, session: Any, question: Any, task: Task | str, sample_rate: int, seed: int | None, ends_session: bool = False
    ) -> None:
        self._session, self._question, self._task = session, question, task
        self._rate, self._seed, self._ends_session = sample_rate, seed, ends_session
        self.running: Listener | None = None
        self._begun = False
        self._incoming: Listening | None = None
        self._bell: asyncio.Event | None = None  # set in the loop where an event may have come
        self._over = self._busy = False
        self._guard = threading.RLock()  # between the loop and the thread that reads the question; never held while one waits
        self._reader: asyncio.Task[Any] | None = None
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            return
        self._ask()

    # --- a plain iterator ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Read the question and give it to the engine."""
        self._begun = True
        try:
            if self._is_coming:
                listening = self._listen()
                listening.take(self._question)
                self._question = listening
            self._session.begin(self._read())
        except Withdrawn:
            self.running = None
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> AnswerStream:
        if not (self._begun or self._over):
            self._ask()
        return self

    def __next__(self) -> Event:
        if iter(self)._over:
            raise StopIteration
        try:
            event = Ended("cancelled", Timings()) if self.running is None else self._session.take(self.running)
        except BaseException:
            self.close()
            raise
        if isinstance(event, Ended):
            self.close()
        return event

    def answer(self) -> Answer:
        """Wait for the whole answer, of which no event was taken; `Answer.error` says so where it broke."""
        return cast(Answer, self._session.whole([*self], self.running))

    # --- an asynchronous one ------------------------------------------------------------------------------------------

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        if self._busy:
            raise UserError("another task waits for the next event of this answer; one takes them at a time")
        self._busy = True
        try:
            self._watch()
            if self._bell is None:
                try:
                    await self._begin()
                except Withdrawn:
                    self.close()
                    return Ended("cancelled", Timings())
            event = await self._next()
        except BaseException:
            self.close()
            raise
        finally:
            self._busy = False
        if isinstance(event, Ended):
            self.close()
        return event

    async def aclose(self) -> None:
        """Cancel what is left of the answer."""
        self.close()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.running is None or not self.running.settled:
            self.close()

    # --- the question -------------------------------------------------------------------------------------------------

    @property
    def _is_coming(self) -> bool:
        return is_coming(self._question) and find_task(self._task).question != "text"

    async def _begin(self) -> None:
        """Read the question and give it to the engine."""
        for _ in range(_TURNS):
            last = self._session._last
            if last is not None and last.reader == TASK:  # of a task that was perhaps cancelled just now
                await asyncio.sleep(0)
        self._begun, self._bell = True, asyncio.Event()
        if self.running is not None:  # asked before the loop ran
            _ring(self._bell, self.running, self._session)
            return
        if self._is_coming:  # an asynchronous iterator is read here, another in a thread
            self._session.check()
            listening, pieces = await asyncio.to_thread(self._listen), self._question
            if isinstance(pieces, AsyncIterable):
                await listening.take_async(pieces)
            else:
                await asyncio.to_thread(listening.take, pieces)
            self._question = listening
        running = await asyncio.to_thread(self._read)
        _ring(self._bell, running, self._session)
        await asyncio.to_thread(self._session.begin, running)

    def _listen(self) -> Listening:
        with self._session._lock:  # in a thread, as `_read`; another question sees no sound that nobody wants any more
            listening: Listening = self._session.begin_reading(self._task, self._rate)
            with self._guard:
                self._incoming = listening
                if not self._over:
                    return listening
            listening.withdraw()
            self._session.end_reading(listening)
        raise Withdrawn

    def _read(self) -> Listener:
        # in a thread, which goes on where the task is cancelled meanwhile
        running: Listener = self._session.read(self._question, self._task, self._rate, self._seed, lambda: self._over)
        with self._guard:
            self.running = running
            if not self._over:
                return running
        self._session.end(running, "withdraw")
        raise Withdrawn

    # --- its answer ---------------------------------------------------------------------------------------------------

    async def _next(self) -> Event:
        running, bell = self.running, self._bell
        assert running is not None and bell is not None
        while (event := running.poll()) is None:
            bell.clear()
            running.reader = TASK
            try:
                await bell.wait()
            finally:
                running.reader = 0
        return event

    def _watch(self) -> None:
        """Have the answer cancelled when the task that takes its events is cancelled between two of them."""
        task, stream = asyncio.current_task(), weakref.ref(self)
        if task is None or task is self._reader:
            return

        def done(task: asyncio.Task[Any]) -> None:
            own = stream()
            if own is not None and task.cancelled() and own._reader is task:
                own.close()

        self._reader = task
        task.add_done_callback(done)

    def close(self) -> None:
        """Cancel what is left of the answer, once, from any thread; waits for nobody."""
        with self._guard:
            if self._over:
                return
            self._over, running = True, self.running
        if self._incoming is not None:
            self._incoming.withdraw()
            self._session.end_reading(self._incoming)
        if running is not None:
            self._session.let_go(running)
        if self._ends_session:
            self._session.abandon()


def _ring(bell: asyncio.Event, running: Listener, session: Any) -> None:
    """Has an answer, in any thread, set `bell` in this loop where it has an event; with a closed loop that ends the answer."""
    loop, rung = asyncio.get_running_loop(), False
    leave = weakref.WeakMethod(session.let_go)  # its conversation, which ends with it, holds the answer

    def wake() -> None:
        nonlocal rung
        rung = False
        bell.set()

    def ring() -> None:
        nonlocal rung
        if rung:
            return
        rung = True
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            running.wake = None
            running.stop()
            if (let_go := leave()) is not None:
                let_go(running)

    running.wake = ring
