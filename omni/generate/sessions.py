"""The calls that start sessions, or answer one question in a session of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omni.audio.io import SAMPLE_RATE
from omni.engine.client import Pace, WhenFull
from omni.generate.conversation import Conversation
from omni.generate.messages import History
from omni.generate.options import Keywords, SessionOptions
from omni.generate.question import Question
from omni.generate.results import Answer, Event
from omni.tasks import Task

if TYPE_CHECKING:
    from typing_extensions import Unpack

S = TypeVar("S", bound=Conversation[Any])


class Sessions(ABC, Generic[S]):
    """What `omni.generate.speech_lm.SpeechLM` and `omni.engine.process.EngineProcess` inherit."""

    @abstractmethod
    def _session_of(
        self,
        values: Any,
        *,
        context: int | None = None,
        history: History | None = None,
        pace: Pace = "read",
        when_full: WhenFull = "wait",
    ) -> S:
        """A session.

        Args:
            values: keywords of `AnswerOptions`.
            context, history, pace, when_full: as for `session`.
        """

    def session(
        self,
        *,
        context: int | None = None,
        history: History | None = None,
        pace: Pace = "read",
        when_full: WhenFull = "wait",
        **values: Unpack[Keywords],
    ) -> S:
        """Start a conversation over a cache of `context` positions (at most the decoder's; 4096 by default).

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

        Raises:
            TypeError: an unknown keyword.
            UserError: a bad value, a history of another layout or codec, or one that finds no room.
        """
        return self._session_of(values, context=context, history=history, pace=pace, when_full=when_full)

    def stream(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        **options: Unpack[SessionOptions],
    ) -> Iterator[Event]:
        """Answer one question with events: `TextDelta` and `AudioChunk` as they come, `Ended` last.

        Args:
            question: a text where the task asks in writing; else sound (see `omni.generate.question.Question`).
            task: a name of the task table (`omni.tasks`).
            sample_rate: of samples that come without their own, in Hz; files have their own.
            options: those of `session`, by name.

        Raises:
            TypeError: an unknown keyword.
            UserError: a bad question, option or task, at once.
        """
        session = self._session_of(options, context=options.pop("context", None))
        try:
            events = session.ask(question, task, sample_rate=sample_rate)
        except BaseException:
            session.close()
            raise
        return _closing(session, events)

    def generate(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        **options: Unpack[SessionOptions],
    ) -> Answer:
        """Answer one question and return when the answer is whole; arguments as for `stream`."""
        with self._session_of(options, context=options.pop("context", None)) as session:
            return session.answer(question, task, sample_rate=sample_rate)


def _closing(session: Conversation[Any], events: Iterator[Event]) -> Iterator[Event]:
    """Passes events on and closes the session when they end, even if none of them is ever taken."""

    def run() -> Iterator[Any]:
        with session:
            yield None  # taken at once: from now on, closing or dropping the iterator ends the session
            yield from events

    running = run()
    next(running)
    return running
