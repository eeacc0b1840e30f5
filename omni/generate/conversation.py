"""What sessions have in common, wherever their engine is: one answer at a time, whose events its listener takes; and the calls
that start them, or answer one question in a session of its own.

read: check, listen --> lay_out --> begin --> events_of: take, take, ... --> settle: the taken part is in the history
                         cancel, let_go: end it before
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.config import ModelConfig
from omni.engine.client import Pace, WhenFull
from omni.errors import UserError
from omni.generate.answer_stream import AnswerReader, AnswerSource, AnswerStream
from omni.generate.feature_stream import FeatureStream, KnownFeatures
from omni.generate.listening import AudioSoFar, Listening
from omni.generate.messages import History, Message
from omni.generate.options import Keywords, SessionOptions, check_number
from omni.generate.question import Asked, Coming, Question, Withdrawn, is_coming, several
from omni.generate.results import Answer, Clock, Ended, Event
from omni.generate.turn_end import TurnFrames
from omni.tasks import Task, find_task

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

A = TypeVar("A", bound=AnswerSource)


class Conversation(ABC, Generic[A]):
    """Base of `omni.generate.session.Session` and of `omni.engine.process.RemoteSession`; `stop` ends an answer, see
    `AnswerReader`."""

    def __init__(self, stop: Callable[[str], bool] | None) -> None:
        self._stop = stop
        self._last: A | None = None
        self._incoming: Listening | None = None  # of an iterator that is read
        self._lock = threading.RLock()  # guards the history and the last answer

    # --- defined by those two -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """The model's."""

    @abstractmethod
    def check(self) -> None:
        """UserError where no question is taken: the engine or the session is closed."""

    @abstractmethod
    def lay_out(self, asked: Asked, seed: int | None = None, clock: Clock | None = None) -> A:
        """An answer to a question, for `begin`; the last one is settled first. `clock` was started when the question came."""

    @abstractmethod
    def begin(self, answer: A) -> None:
        """Give the engine a question that was laid out; UserError where it does not take it, and nothing is left of it then."""

    @abstractmethod
    def whole(self, events: Iterable[Event], answer: A | None) -> Answer:
        """The answer of all its events; None for one that was cancelled before its question was whole."""

    async def aside(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call what may wait for an engine in another process without holding the loop; nothing is waited for here."""
        return call(*args)

    @property
    @abstractmethod
    def sample_rate(self) -> int:
        """Sample rate of the answers' sound, in Hz; 0 without a codec."""

    @abstractmethod
    def withdraw(self, answer: A) -> None:
        """Continue as if a question had not been asked."""

    @abstractmethod
    def let_go(self, answer: A) -> None:
        """Cancel an answer without waiting for anybody. It is in the history at once, unless another thread is asking or
        cancelling: that one puts it there."""

    @property
    @abstractmethod
    def last_answer(self) -> Message | None:
        """The newest answer of the history, as far as it was delivered; None in a new conversation."""

    @abstractmethod
    def close(self) -> None:
        """End the session."""

    @abstractmethod
    def _read_question(self, question: Question | Coming, task: Task | str, sample_rate: int) -> Asked:
        """Read and check a question."""

    @abstractmethod
    def _settle(self, answer: A) -> None:
        """Put the delivered part of an answer into the history (once); its iterator gives no more of it."""

    @abstractmethod
    def _interrupt(self, answer: A, played: float | None, shown: int | None) -> None:
        """Settle an answer, or cut it in the history once more, where less of it was heard or seen than was delivered."""

    @abstractmethod
    def open_sound(self, task: Task, turn: TurnFrames | None = None) -> FeatureStream | int | None:
        """Listen to the next question; None where the encoder makes all features of the whole sound. `turn` is given what the
        model's turn head says of its frames."""

    @abstractmethod
    def hear(self, sound: Any, samples: Tensor) -> None:
        """Take the next samples [S] at 16 kHz of the sound that `open_sound` returned."""

    @abstractmethod
    def peek(self, sound: Any, samples: Tensor) -> None:
        """Take samples [S] at 16 kHz behind those, which may not belong to the question."""

    @abstractmethod
    def sound_so_far(self, sound: Any) -> KnownFeatures | tuple[int, int]:
        """Features so far of a sound still coming, for a question of another session; UserError where there are none."""

    @abstractmethod
    def drop_sound(self, sound: Any) -> None:
        """Listen no more; waits for nobody."""

    def _make_room(self) -> None:
        """Prepare for the next question."""

    # --- the question -------------------------------------------------------------------------------------------------

    def ask(
        self,
        question: Question | Coming | Listening | AudioSoFar | AsyncIterable[Any],
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> AnswerStream:
        """Ask, and get the answer as events: text and sound as they come, `Ended` last; `for event in session.ask(question)`,
        or `async for` in a loop of asyncio, or all of it by `session.ask(question).answer()`. Events that were taken count as
        delivered. Closing the stream, or asking before its end, cancels the answer; see `AnswerStream`. UserError: a bad
        question or seed, features of it that are not finite, no room left in the cache (see `AnswerOptions.overflow`), another
        answer being made in another thread, an adapter that was removed meanwhile, or a closed session.

        Args:
            question: a text or sound, as the task asks; see `omni.generate.question.Question`. Or sound that is still coming:
                an iterator of its pieces (in a loop of asyncio an asynchronous one, too), samples at `sample_rate`, which is
                read to its end first, and heard meanwhile where the encoder hears in chunks; or what `listen` returned.
            sample_rate: of samples that come without their own, in Hz; files have their own.
            seed: of this answer's draws; by default derived from the session's seed and the turn's number.
        """
        return AnswerStream(self, question, task, sample_rate, seed)

    def read(
        self,
        question: Question | Coming | Listening | AudioSoFar,
        task: Task | str,
        sample_rate: int,
        seed: int | None = None,
        gone: Callable[[], bool] | None = None,
    ) -> A:
        """Read a question and lay it out, for `begin`. UserError: as of `ask`. Withdrawn: nobody wants it any more; nothing
        has changed then. `gone`: whether nobody wants the answer any more; asked once the question was read."""
        if seed is not None:
            check_number("seed", seed)
        self.check()
        self.commit()
        if isinstance(question, Iterator) and is_coming(question) and find_task(task).question != "text":
            listening = self.begin_reading(task, sample_rate)
            try:
                try:
                    listening.take(question)
                finally:
                    self.end_reading(listening)
                return self._read(listening, task, sample_rate, seed, gone)
            except BaseException:
                listening.drop()
                raise
        return self._read(question, task, sample_rate, seed, gone)

    def _read(self, question: Any, task: Task | str, sample_rate: int, seed: int | None, gone: Callable[[], bool] | None) -> A:
        """`read` of what has come."""
        clock = Clock()
        if isinstance(question, Listening):
            asked = question.asked(self, find_task(task))
        elif isinstance(question, AudioSoFar):
            asked = question.listening.known(find_task(task))
        else:
            asked = self._read_question(question, task, sample_rate)
        with self._lock:
            if gone is not None and gone():
                raise Withdrawn
            return self.lay_out(asked, seed, clock)

    def listen(self, task: Task | str = "A1A2", *, sample_rate: int = SAMPLE_RATE, turn: bool = False) -> Listening:
        """Listen to the next question while its sound comes; see `omni.generate.listening`. A session listens to one at a time;
        one before is only gathered from then on. UserError: a task that asks in writing, a bad sample rate, or a closed
        session.

        Args:
            task: that it is going to be asked as.
            sample_rate: of its pieces, in Hz.
            turn: hear where it ends, too, where the model has a turn head (`Listening.turn`).
        """
        self.check()
        return Listening(self, task, sample_rate, turn)

    def begin_reading(self, task: Task | str, sample_rate: int) -> Listening:
        """Listen to an iterator: until `end_reading` another question is refused, and `cancel` and `close` end it."""
        with self._lock:
            self.commit()
            self._incoming = listening = self.listen(task, sample_rate=sample_rate)
            return listening

    def end_reading(self, listening: Listening) -> None:
        """The iterator has ended, or nobody wants its sound; waits for nobody."""
        if self._incoming is listening:
            self._incoming = None

    def commit(self) -> None:
        """Takes the last answer into the history, as far as it was delivered. UserError where another thread waits for it."""
        with self._lock:
            answer = self._last
            under = answer is not None and not answer.settled and answer.reader not in (0, threading.get_ident())
            if under or self._incoming is not None:
                raise UserError(
                    "another answer of this session is being made in another thread or task; cancel it, or wait for its end"
                )
            if answer is not None:
                self._settle(answer)

    # --- its answer ---------------------------------------------------------------------------------------------------

    def listener(self, answer: A) -> AnswerReader:
        """The reader of an answer's events."""
        return AnswerReader(answer, self._stop)

    def events_of(self, answer: A) -> Iterator[Event]:
        """The events of an answer that was begun; closing the iterator cancels it."""
        listener = self.listener(answer)
        try:
            while True:
                event = listener.take()
                if isinstance(event, Ended):
                    break
                yield event
        finally:
            with self._lock:
                self._settle(answer)
                self._make_room()
        yield event

    def cancel(self, played_seconds: float | None = None, shown_characters: int | None = None) -> None:
        """Stop the answer that is being made, and cut the last answer in the history to the delivered part.

        May be called from any thread, between events, or after the answer has ended (a listener interrupts what is still
        playing). An answer under way ends with `Ended("cancelled")`; it is in the history at once. UserError: one of them is
        negative or no number; nothing is cancelled then.

        Args:
            played_seconds: seconds of the sound that were heard; only its whole frames stay in the history, and of the
                text the words that were heard by then, placed by the model's speaking time (`omni.generate.speech_time`).
                By default all sound and text that was handed over.
            shown_characters: characters of the text that were shown: they stay, whatever was heard.
        """
        for name, value in (("played_seconds", played_seconds), ("shown_characters", shown_characters)):
            if value is not None:
                check_number(name, value)
        self.cancel_last(None, played_seconds, shown_characters)

    def cancel_last(self, only: A | None, played_seconds: float | None, shown_characters: int | None) -> None:
        """`cancel`, unless the last answer is another than `only`, where that is given."""
        if (incoming := self._incoming) is not None:
            incoming.withdraw()
            return
        with self._lock:
            last = self._last
            if last is None or only not in (None, last):
                return
            self._interrupt(last, played_seconds, shown_characters)
            self._make_room()

    # --- the end ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


S = TypeVar("S", bound=Conversation[Any])


class Sessions(ABC, Generic[S]):
    """Base of `omni.generate.speech_lm.SpeechLM` and `omni.engine.process.EngineProcess`: starts sessions."""

    @abstractmethod
    def _session_of(self, values: Any, context: int | None, history: History | None, pace: Pace, when_full: WhenFull) -> S:
        """A session; `values` are keywords of `AnswerOptions`, the others those of `session`."""

    def session(
        self,
        *,
        context: int | None = None,
        history: History | None = None,
        pace: Pace = "read",
        when_full: WhenFull = "wait",
        **values: Unpack[Keywords],
    ) -> S:
        """Start a conversation over a cache of `context` positions (at most the decoder's; 4096 by default). TypeError: an
        unknown keyword. UserError: a bad value, a history of another layout or codec, or one that finds no room.

        Args:
            history: the conversation before: the `.history` of another session, messages as in chat templates
                (`{"role": "user", "content": "a text, or sound"}`), or the path of a file that `Session.save` wrote.
            pace: `read` writes an answer as fast as its events are read; `live` for somebody who hears it as it comes: sound is
                made in time, and a little ahead; `whole` writes all of it at once.
            when_full: what becomes of a live listener's question while one more would make others' sound late: `wait` (its
                place is `Session.place`), or `refuse` with a `BusyError`.
            values: the fields of `Options` by name (sampling, seed, max_seconds, max_tokens, max_new_tokens, stop, max_silence,
                logprobs, text_assist, overflow, adapter, edits, system), or, instead of sampling, its own fields (temperature,
                top_k, top_p, repetition_penalty, do_sample).
        """
        return self._session_of(values, context, history, pace, when_full)

    def stream(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        **options: Unpack[SessionOptions],
    ) -> Iterator[Event]:
        """Answer one question with events: `TextDelta` and `AudioChunk` as they come, `Ended` last. TypeError: an unknown
        keyword. UserError: a bad question, option or task, at once.

        Args:
            question: a text where the task asks in writing; else sound (see `omni.generate.question.Question`).
            task: a name of the task table (`omni.tasks`).
            sample_rate: of samples that come without their own, in Hz; files have their own.
            options: those of `session`, by name.
        """
        session = self._session_of(options, options.pop("context", None), None, "read", "wait")
        try:
            events = iter(session.ask(question, task, sample_rate=sample_rate))
        except BaseException:
            session.close()
            raise
        return _closing(session, events)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, question: list[Any], task: Task | str | Sequence[Task | str] = ..., *, sample_rate: int = ..., **options: Any
    ) -> list[Answer]: ...

    @overload
    def generate(
        self, question: Question, task: Task | str = ..., *, sample_rate: int = ..., **options: Unpack[SessionOptions]
    ) -> Answer: ...

    def generate(self, question: Any, task: Any = "A1A2", *, sample_rate: int = SAMPLE_RATE, **options: Any) -> Any:
        """Answer one question, or each of a list of them, and return when the answers are whole. TypeError: an unknown keyword.
        UserError: a bad question, option or task; a list, where the engine is in another process.

        Args:
            question: as for `stream`, or a list of independent questions, each of which is answered as it would be alone. (A
                list of numbers, or of rows of numbers, is sound.)
            task: as for `stream`; of a list of questions one for all, or one each.
            options: those of `session`, by name. Of a list of questions seed, adapter, edits and system are one for all, or one
                each; there are also `batch_size` (questions under way at a time; 64) and `sound` (False: answers carry codes
                only). They have no context, history, text_assist or overflow, and a `stop` that is a function is asked when an
                answer is complete.
        """
        if several(question):
            return self._answer_all(question, task, sample_rate=sample_rate, **options)
        with self._session_of(options, options.pop("context", None), None, "whole", "wait") as session:
            return session.ask(question, task, sample_rate=sample_rate).answer()

    def _answer_all(self, questions: list[Any], task: Any, **options: Any) -> list[Answer]:
        raise UserError("an engine in another process answers one question a call; ask several in sessions of their own")


def _closing(session: Conversation[Any], events: Iterator[Event]) -> Iterator[Event]:
    """Passes events on and closes the session when they end, even if none of them is ever taken."""

    def run() -> Iterator[Any]:
        with session:
            yield None  # taken at once: from now on, closing or dropping the iterator ends the session
            yield from events

    running = run()
    next(running)
    return running
