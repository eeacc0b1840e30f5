"""What sessions have in common, wherever their engine is: one answer at a time, whose events its listener takes.

read: check, listen --> lay_out --> begin --> events_of: take, take, ... --> settle: the taken part is in the history
                         cancel, let_go: end it before
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.config import ModelConfig
from omni.errors import UserError
from omni.generate.answer_stream import AnswerStream
from omni.generate.bounds import check_number
from omni.generate.feature_stream import FeatureStream, KnownFeatures
from omni.generate.incoming import Withdrawn, is_coming
from omni.generate.listener import AnswerReader, Listened
from omni.generate.listening import AudioSoFar, Listening
from omni.generate.messages import Message
from omni.generate.question import Asked, Coming, Question
from omni.generate.results import Answer, Clock, Ended, Event
from omni.generate.turn_end import TurnFrames
from omni.tasks import Task, find_task

if TYPE_CHECKING:
    from typing_extensions import Self

A = TypeVar("A", bound=Listened)


class Conversation(ABC, Generic[A]):
    """Base of `omni.generate.session.Session` and of `omni.engine.remote.RemoteSession`.

    Args:
        stop: ends an answer, see `omni.generate.listener.AnswerReader`.
    """

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
        """An answer to a question, for `begin`; the last one is settled first.

        Args:
            clock: started when the question came.
        """

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
        """Of the answers' sound, in Hz; 0 without a codec."""

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
        """Listen to the next question; None where the encoder makes all features of the whole sound.

        Args:
            turn: is given what the model's turn head says of its frames.
        """

    @abstractmethod
    def hear(self, sound: Any, samples: Tensor) -> None:
        """Take the next samples [S] at 16 kHz of the sound that `open_sound` returned."""

    @abstractmethod
    def peek(self, sound: Any, samples: Tensor) -> None:
        """Take samples [S] at 16 kHz behind those, which may not belong to the question."""

    @abstractmethod
    def sound_so_far(self, sound: Any) -> KnownFeatures | tuple[int, int]:
        """What is known of a sound that is still coming, for a question of another session; UserError where nothing is."""

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
        delivered. Closing the stream, or asking before its end, cancels the answer; see `AnswerStream`.

        Args:
            question: a text or sound, as the task asks; see `omni.generate.question.Question`. Or sound that is still coming:
                an iterator of its pieces (in a loop of asyncio an asynchronous one, too), samples at `sample_rate`, which is
                read to its end first, and heard meanwhile where the encoder hears in chunks; or what `listen` returned.
            sample_rate: of samples that come without their own, in Hz; files have their own.
            seed: of this answer's draws; by default derived from the session's seed and the turn's number.

        Raises:
            UserError: a bad question or seed, features of it that are not finite, no room left in the cache (see
                `AnswerOptions.overflow`), another answer being made in another thread, an adapter that was removed or
                merged meanwhile, or a closed session.
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
        """Read a question and lay it out, for `begin`.

        Args:
            gone: whether nobody wants the answer any more; asked once the question was read.

        Raises:
            UserError: as of `ask`.
            Withdrawn: nobody wants it any more; nothing has changed then.
        """
        if seed is not None:
            check_number("seed", seed)
        self.check()
        self._commit(self._last)
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

    def _read(
        self,
        question: Question | Coming | Listening | AudioSoFar,
        task: Task | str,
        sample_rate: int,
        seed: int | None,
        gone: Callable[[], bool] | None,
    ) -> A:
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
        one before is only gathered from then on.

        Args:
            task: that it is going to be asked as.
            sample_rate: of its pieces, in Hz.
            turn: hear where it ends, too, where the model has a turn head (`Listening.turn`).

        Raises:
            UserError: a task that asks in writing, a bad sample rate, or a closed session.
        """
        self.check()
        return Listening(self, task, sample_rate, turn)

    def begin_reading(self, task: Task | str, sample_rate: int) -> Listening:
        """Listen to an iterator: until `end_reading` another question is refused, and `cancel` and `close` end it."""
        with self._lock:
            self._commit(self._last)
            self._incoming = listening = self.listen(task, sample_rate=sample_rate)
            return listening

    def end_reading(self, listening: Listening) -> None:
        """The iterator has ended, or nobody wants its sound; waits for nobody."""
        if self._incoming is listening:
            self._incoming = None

    def commit(self) -> None:
        """Settle the last answer before a question is read; UserError where another thread waits for it."""
        self.check()
        self._commit(self._last)

    def _commit(self, answer: A | None) -> None:
        """Settle an answer, unless another thread waits for it."""
        with self._lock:
            under = answer is not None and not answer.settled and answer.reader not in (0, threading.get_ident())
            if under or self._incoming is not None:
                raise UserError(
                    "another answer of this session is being made in another thread or task; cancel it, or wait for its end"
                )
            if answer is not None:
                self._settle(answer)

    # --- its answer ---------------------------------------------------------------------------------------------------

    def listener(self, answer: A) -> AnswerReader:
        """Who takes an answer's events."""
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

        May be called from any thread, between events, or after the answer has ended (a listener interrupts what
        is still playing). An answer under way ends with `Ended("cancelled")`; it is in the history at once.

        Args:
            played_seconds: seconds of the sound that were heard; only its whole frames stay in the history, and of the
                text the words that were heard by then, placed by the model's speaking time (`omni.generate.heard`).
                By default all sound and text that was handed over.
            shown_characters: characters of the text that were shown: they stay, whatever was heard.

        Raises:
            UserError: one of them is negative or no number; nothing is cancelled then.
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
