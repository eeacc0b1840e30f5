"""Calls that answer one question, in a session of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from omni.audio.io import SAMPLE_RATE
from omni.generate.conversation import Conversation
from omni.generate.options import SessionOptions
from omni.generate.question import Question
from omni.generate.results import Answer, Event
from omni.tasks import Task

if TYPE_CHECKING:
    from typing_extensions import Unpack

_QUESTION = ("question", "task", "sample_rate", "context")


class SingleQuestions:
    """What `omni.generate.speech_lm.SpeechLM` and `omni.engine.process.EngineProcess` inherit."""

    def _session_of(self, call: str, also: Sequence[str], values: Any, *, context: int | None = None) -> Conversation[Any]:
        """The session of a call, whose name is for errors, and which takes keywords `also` besides those of `AnswerOptions`.

        Args:
            values: these keywords.
            context: as for `session`.
        """
        raise NotImplementedError

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
        session = self._session_of("stream", _QUESTION, options, context=options.pop("context", None))
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
        with self._session_of("generate", _QUESTION, options, context=options.pop("context", None)) as session:
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
