"""The calls that start sessions, or answer one question in a session of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from omni.audio.io import SAMPLE_RATE
from omni.engine.client import Pace, WhenFull
from omni.errors import UserError
from omni.generate.conversation import Conversation
from omni.generate.messages import History
from omni.generate.options import Keywords, SessionOptions
from omni.generate.question import Question, several
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
        """Answer one question, or each of a list of them, and return when the answers are whole.

        Args:
            question: as for `stream`, or a list of independent questions, each of which is answered as it would be alone. (A
                list of numbers, or of rows of numbers, is sound.)
            task: as for `stream`; of a list of questions one for all, or one each.
            options: those of `session`, by name. Of a list of questions seed, adapter, edits and system are one for all, or one
                each; there are also `batch_size` (questions under way at a time; 64) and `sound` (False: answers carry codes
                only). They have no context, history, text_assist or overflow, and a `stop` that is a function is asked when an
                answer is complete.

        Raises:
            TypeError: an unknown keyword.
            UserError: a bad question, option or task; a list, where the engine is in another process.
        """
        if several(question):
            return self._answer_all(question, task, sample_rate=sample_rate, **options)
        with self._session_of(options, context=options.pop("context", None), pace="whole") as session:
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
