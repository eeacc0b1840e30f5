"""A session: a conversation of several turns as who asks sees it, wherever its engine is; and the calls that start sessions, or
answer one question in a session of its own.

A session says what it wants to its engine in messages (`omni.engine.conversation`), through a link
(`omni.engine.listener`), and takes the events of one answer at a time.

read: check, listen --> lay_out --> begin --> take, take, ... --> settle: the taken part is in the history
                         cancel, let_go: end it before
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from omni.audio.io import SAMPLE_RATE
from omni.config import ModelConfig
from omni.engine.answer import Pace, WhenFull, check_pace
from omni.engine.listener import Link, Listener
from omni.errors import EngineLost, UserError
from omni.generate.answer_stream import AnswerStream, joined
from omni.generate.history import History, Message
from omni.generate.listening import TurnFrames
from omni.generate.options import Keywords, SessionOptions, check_numbers, make_options
from omni.generate.question import Asked, AudioSoFar, Coming, Listening, Question, Withdrawn, read_question, several
from omni.generate.results import Answer, Clock, Ended, Event, Timings
from omni.tasks import Task, Turn, find_task
from omni.text import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Session(AbstractContextManager["Session"], AbstractAsyncContextManager["Session"]):
    """One conversation. Made by `SpeechLM.session` or `EngineProcess.session`; close it (or use `with`) to free its slot.

    One answer at a time: `ask` gives its events as they come, also in a loop of asyncio; `cancel` stops it from any thread.

    Args:
        source: a `Sessions`, of which its questions are asked.
        stop_when: ends an answer, see `omni.engine.listener.Listener`.
        sound: whether the answers' codes are decoded.

    Attributes:
        number: its number in the engine; config: the model's.
        sample_rate: of the answers' sound, in Hz; 0 without a codec.
    """

    def __init__(
        self,
        source: Sessions,
        number: int,
        pace: Pace = "read",
        stop_when: Callable[[str], bool] | None = None,
        sound: bool = True,
    ) -> None:
        self.number, self._pace, self._stop_when = number, pace, stop_when
        self.link, self.config = source._link, source.config
        self.tokenizer, self.sample_rate = source.tokenizer, source.sample_rate
        self._rate = self.sample_rate if sound else 0
        self._last: Listener | None = None
        self._incoming: Listening | None = None  # of an iterator that is read
        self._sound: int | None = None  # that is listened to
        self._closed = False
        self._lock = threading.RLock()  # guards the last answer
        _OPEN.add(self)
        self._dropped = weakref.finalize(self, self.link.tell, "abandon", number)
        self._dropped.atexit = False

    def check(self) -> None:
        """UserError where no question is taken: the engine or the session is closed."""
        if self._closed:
            raise UserError("this session is closed; start a new one")
        self.link.check(self.number)

    def __repr__(self) -> str:
        state = "closed"
        if not self._closed:
            try:
                state = self.link.request("shown", self.number)
            except EngineLost:
                state = "lost"
        return f"Session({state})"

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
        question: Question | Listening | AudioSoFar,
        task: Task | str,
        sample_rate: int,
        seed: int | None = None,
        gone: Callable[[], bool] | None = None,
    ) -> Listener:
        """Read a question and lay it out, for `begin`. UserError: as of `ask`. Withdrawn: nobody wants it any more; nothing
        has changed then. `gone`: whether nobody wants the answer any more; asked once the question was read."""
        if seed is not None:
            check_numbers(seed=seed)
        self.check()
        self.commit()
        clock = Clock()
        task = self.config.answers(task)
        if isinstance(question, (Listening, AudioSoFar)) and task.question == "text":
            raise UserError(f"task {task.name} asks in writing, but the question is sound; ask by speech")
        if isinstance(question, Listening):
            asked = question.asked(self, task)
        elif isinstance(question, AudioSoFar):
            asked = question.listening.known(task)
        else:
            asked = read_question(question, task, self.config, self.tokenizer, sample_rate)
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
        """The iterator has ended, or nobody wants its sound."""
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
            if answer is not None and not answer.settled:
                self.end(answer, "settle")

    def lay_out(self, asked: Asked, seed: int | None = None, clock: Clock | None = None) -> Listener:
        """An answer to a question, for `begin`; the last one is settled first. `clock` was started when the question came."""
        link, rate = self.link, self._rate if asked.task.audio else 0
        with self._lock:
            self.check()
            self.commit()  # once more: another thread may have asked meanwhile
            own = (seed, clock or Clock(), self._pace, rate, self._stop_when)
            self._last = answer = Listener(link, self.number, next(link.numbers), asked, *own)
        return answer

    def begin(self, answer: Listener, message: str = "ask") -> Any:
        """Give the engine a question that was laid out, and return its reply; UserError where it does not take it, and nothing
        is left of it then."""
        asked = replace(answer.asked, turn=replace(answer.asked.turn, task=answer.asked.task.name))
        if isinstance(asked.heard, int):
            heard = asked.heard if asked.heard == self._sound else None
            asked = replace(asked, heard=heard, clip=asked.clip if heard is None else None)
        if not answer.start():  # it was cancelled meanwhile
            return None
        self.link.answers[answer.number] = answer
        try:
            if self.link.remote and asked.clip is not None:  # as far as that delays nobody else's sound
                asked = replace(asked, prepared=self.config.encoder.prepare(asked.clip))
            reply = self.link.request(message, self.number, answer.number, asked, answer.seed, answer.clock)
            if isinstance(asked.heard, int):
                self._sound = None
            return reply
        except Exception:  # it was refused, and nothing is left of it there
            answer.settled = True
            answer.end(Ended("cancelled", Timings()))
            raise
        except BaseException:  # Ctrl-C: it is perhaps about to be answered
            self.let_go(answer)
            raise

    def open_sound(self, task: Task, turn: TurnFrames | None = None) -> int | None:
        """Listen to the next question; None where the encoder makes all features of the whole sound. `turn` is given what the
        model's turn head says of its frames."""
        if self.config.encoder.chunk_samples is None:
            return None
        number = next(self.link.numbers)
        if turn is not None:
            self.link.turns[number] = turn
        self.link.request("listen", self.number, number, task.name, turn is not None)
        self._sound = number
        return number

    def drop_sound(self, sound: int | None) -> None:
        """Listen no more; waits for nobody."""
        if sound is not None and self._sound == sound:
            self._sound = None
            self.link.tell("drop_sound", self.number, sound)

    # --- its answer ---------------------------------------------------------------------------------------------------

    def whole(self, events: Iterable[Event], answer: Listener | None) -> Answer:
        """The answer of all its events; None for one that was cancelled before its question was whole."""
        (text, sound, ended), (tokens, codes, logprobs) = joined(events), ((), None, None)
        if answer is not None:
            with suppress(EngineLost):
                tokens, codes, logprobs = self.link.request("delivered", self.number, answer.number)
        return Answer(
            text=text,
            audio=sound if answer is not None and answer.rate > 0 and codes is not None else None,
            sample_rate=self.sample_rate,
            tokens=tokens,
            codes=codes,
            timings=ended.timings,
            ended=ended.reason,
            error=ended.error,
            logprobs=logprobs,
        )

    def take(self, answer: Listener) -> Event:
        """The next event of an answer that was begun; with its end, or where none comes, it is settled."""
        event = None
        try:
            event = answer.take()
            return event
        finally:
            if (event is None or isinstance(event, Ended)) and not answer.settled:
                self.end(answer, "settle")

    def cancel(
        self, played_seconds: float | None = None, shown_characters: int | None = None, *, only: Listener | None = None
    ) -> None:
        """Stop the answer that is being made, and cut the last answer in the history to the delivered part.

        May be called from any thread, between events, or after the answer has ended (a listener interrupts what is still
        playing). An answer under way ends with `Ended("cancelled")`; it is in the history at once. UserError: one of them is
        negative or no number; nothing is cancelled then.

        Args:
            played_seconds: seconds of the sound that were heard; only its whole frames stay in the history, and of the
                text the words that were heard by then, placed by the model's speaking time (`omni.generate.speech_time`).
                By default all sound and text that was handed over.
            shown_characters: characters of the text that were shown: they stay, whatever was heard.
            only: nothing is done where the last answer is another than this one.
        """
        check_numbers(played_seconds=played_seconds, shown_characters=shown_characters)
        if (incoming := self._incoming) is not None:
            incoming.withdraw()
            return
        with self._lock:
            last = self._last
            if last is None or only not in (None, last):
                return
            self.end(last, "settle", played_seconds, shown_characters)

    def let_go(self, answer: Listener) -> None:
        """Cancel an answer without waiting for anybody. It is in the history at once, unless another thread is asking or
        cancelling: that one puts it there."""
        with answer.changed:
            if answer.settled:
                return
            answer.quiet()
            answer.settled = True
            if answer.started:
                self.link.tell("let_go", self.number, answer.number, answer.taken)
            answer.end(Ended("cancelled", Timings()))

    def end(self, answer: Listener, message: Literal["settle", "withdraw"], *delivered: Any) -> None:
        """Have the delivered part of an answer put into the history, or what was heard and seen of it (`settle`), or continue
        as if its question had not been asked (`withdraw`); its iterator gives no more of it."""
        with self._lock:
            answer.quiet()
            try:
                ended = self.link.request(message, self.number, answer.number, answer.taken, *delivered)
            except EngineLost as error:
                if answer.settled:
                    raise
                ended = Ended("error", Timings(), str(error))
            answer.end(ended or Ended("cancelled", Timings()))
            answer.settled = True

    # --- the conversation ---------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """Place of the last question among those that wait for room, from 1; 0 for one that does not wait."""
        return cast(int, self.link.request("place", self.number))

    @property
    def history(self) -> list[Message]:
        """The questions and the delivered part of their answers, to read, or to start another session with; an answer under way
        and its question are not among them."""
        return cast(list[Message], self.link.request("history", self.number))

    @property
    def last_answer(self) -> Message | None:
        """The newest answer of the history, as far as it was delivered; None in a new conversation."""
        return cast(Message | None, self.link.request("last_answer", self.number))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The history as ids, the first turn with the system message."""
        turns: tuple[Turn, ...] = self.link.request("turns", self.number)
        return tuple(replace(turn, task=find_task(turn.task)) for turn in turns)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the history as one file, from which `SpeechLM.session(history=path)` continues, without an answer under way.
        UserError: the place cannot be written."""
        with self._lock:
            self.link.request("save", self.number, os.path.abspath(path))
        return Path(path)

    def close(self) -> None:
        """End the session and free its slot; from any thread. An answer under way is cancelled: its iterator ends with
        `Ended("cancelled")`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._incoming is not None:
                self._incoming.withdraw()
            with suppress(EngineLost):  # its slot went with it
                if self._last is not None and not self._last.settled:
                    self.end(self._last, "settle")
                self.link.request("close", self.number)

    def abandon(self) -> None:
        """End the session without waiting for anybody; nothing of it can be read any more."""
        self._closed = True
        self._dropped()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class Sessions:
    """Base of `omni.generate.speech_lm.SpeechLM` and `omni.engine.process.EngineProcess`: starts sessions.

    Attributes:
        config, layout: the model's.
        sample_rate: of the answers' sound, in Hz, and frame_rate: frames a second; 0 without a codec.
    """

    def __init__(self, link: Link, config: ModelConfig, tokenizer: Tokenizer, sample_rate: int, frame_rate: float) -> None:
        self._link, self.config, self.tokenizer = link, config, tokenizer
        self.layout, self.sample_rate, self.frame_rate = config.layout, sample_rate, frame_rate

    def _session_of(
        self, values: Any, context: int | None, history: History | None, pace: Pace, when_full: WhenFull
    ) -> Session:
        check_pace(pace, when_full)
        stop = make_options(values).stop
        if callable(stop):  # it is called by the listener
            values = {name: value for name, value in values.items() if name != "stop"}
        if isinstance(history, (str, os.PathLike)):
            history = os.path.abspath(history)
        number = next(self._link.numbers)
        own = {"context": context, "history": history, "pace": pace, "when_full": when_full}
        self._link.request("session", number, {**own, **values})
        return Session(self, number, pace, stop if callable(stop) else None)

    def session(
        self,
        *,
        context: int | None = None,
        history: History | None = None,
        pace: Pace = "read",
        when_full: WhenFull = "wait",
        **values: Unpack[Keywords],
    ) -> Session:
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
            return iter(AnswerStream(session, question, task, sample_rate, None, ends_session=True))
        except BaseException:
            session.close()
            raise

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


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all sessions at exit, before the interpreter clears its modules: a held iterator could not end afterwards."""
    for session in list(_OPEN):
        session.close()
