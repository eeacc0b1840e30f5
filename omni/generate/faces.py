"""The calls of a session that ask: for an iterator of events, an asynchronous one, a function, or the whole answer."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from omni.audio.io import SAMPLE_RATE
from omni.errors import UserError
from omni.generate.answer_stream import AsyncAnswer
from omni.generate.callbacks import Started
from omni.generate.incoming import Withdrawn, is_coming
from omni.generate.listener import Listened
from omni.generate.listening import HeardSoFar, Listening
from omni.generate.question import Coming, Question
from omni.generate.results import Answer, Ended, Event, Timings
from omni.tasks import Task

A = TypeVar("A", bound=Listened)


class Faces(Generic[A]):
    """What `omni.generate.conversation.Conversation` inherits; it documents the rest."""

    read: Callable[..., A]
    events_of: Callable[[A], Iterator[Event]]

    def begin(self, answer: A) -> None:
        """Give the engine a question that was laid out; UserError where it does not take it, and nothing is left of it then."""
        raise NotImplementedError

    def whole(self, events: Iterable[Event], answer: A | None) -> Answer:
        """The answer of all its events; None for one that was cancelled before its question was whole."""
        raise NotImplementedError

    async def aside(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call what may wait for an engine in another process without holding the loop; nothing is waited for here."""
        return call(*args)

    @property
    def sample_rate(self) -> int:
        """Of the answers' sound, in Hz; 0 without a codec."""
        raise NotImplementedError

    def ask(
        self,
        question: Question | Coming | Listening | HeardSoFar,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> Iterator[Event]:
        """Ask, and get the answer as events: text and sound as they come, `Ended` last. Events that were taken from the
        iterator count as delivered. Closing it, or asking before its end, cancels the answer.

        Args:
            question: a text or sound, as the task asks; see `omni.generate.question.Question`. Or sound that is still coming:
                an iterator of its pieces, samples at `sample_rate`, which is read to its end first, and heard meanwhile where
                the encoder hears in chunks; or what `listen` returned.
            sample_rate: of samples that come without their own, in Hz; files have their own.
            seed: of this answer's draws; by default derived from the session's seed and the turn's number.

        Raises:
            UserError: a bad question or seed, features of it that are not finite, no room left in the cache (see
                `AnswerOptions.overflow`), another answer being made in another thread, an adapter that was removed or
                merged meanwhile, or a closed session.
        """
        try:
            running = self.read(question, task, sample_rate, seed)
        except Withdrawn:
            return iter([Ended("cancelled", Timings())])
        self.begin(running)
        return self.events_of(running)

    def ask_async(
        self,
        question: Question | Coming | Listening | HeardSoFar | AsyncIterable[Any],
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> AsyncAnswer:
        """`ask` for a loop of asyncio: `async for event in session.ask_async(question)`. The question is read in a thread, when
        the first event is awaited, and its errors are raised there. Sound that is still coming may also come from an
        asynchronous iterator. Cancelling the task that reads, or leaving the loop, cancels the answer; see `AsyncAnswer`."""
        return AsyncAnswer(self, question, task, sample_rate, seed)

    def start(
        self,
        question: Question | Coming | Listening | HeardSoFar,
        task: Task | str = "A1A2",
        *,
        on_event: Callable[[Event], object],
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> Started:
        """Ask, and return at once; `on_event` is called with each event in a thread of this answer, as `Started` says. Sound
        that is still coming is read in that thread too; the errors of other questions are raised here, as by `ask`."""
        if not callable(on_event) or inspect.iscoroutinefunction(on_event):
            raise UserError(
                f"on_event is {repr(on_event)[:80]}; give a function that takes an event (ask_async is for asyncio)"
            )

        def begun(running: A) -> A:
            self.begin(running)
            return running

        if is_coming(question):
            return Started(self, lambda: begun(self.read(question, task, sample_rate, seed)), on_event)
        running = begun(self.read(question, task, sample_rate, seed))
        return Started(self, lambda: running, on_event)

    def answer(
        self,
        question: Question | Coming | Listening | HeardSoFar,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> Answer:
        """Ask, and wait for the whole answer; `Answer.error` says so where it broke."""
        try:
            running = self.read(question, task, sample_rate, seed, pace="whole")
        except Withdrawn:
            return self.whole((), None)
        self.begin(running)
        return self.whole(self.events_of(running), running)

    async def answer_async(
        self,
        question: Question | Coming | Listening | HeardSoFar | AsyncIterable[Any],
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> Answer:
        """`answer` for a loop of asyncio; cancelling the task cancels the answer."""
        async with AsyncAnswer(self, question, task, sample_rate, seed, "whole") as events:
            taken = [event async for event in events]
        answer: Answer = await self.aside(self.whole, taken, events.running)
        return answer
