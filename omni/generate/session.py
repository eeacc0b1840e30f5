"""A session: one conversation of several turns over the rows of one cache.

The history holds only what was delivered: an answer that was cancelled, or interrupted while it played, is kept as the offline
layout of the text and the frames that reached the listener. The last column of an answer, and all columns in which the cache
differs from the history, are fed together with the next question. Of an answer that broke (logits that are not finite) nothing
is kept: the session continues as if it had not been asked.

Text assist (mini-omni's batch-parallel decoding, gpt-omni/mini-omni @ 26c31d5 `litgpt/generate/base.py`) couples two rows:
row 0 speaks, and its text input is the text of row 1, which was asked for text only and therefore writes better text. Row 1
leaves as soon as its text has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from omni.codec.base import AudioCodec
from omni.engine.client import Pace, Running, WhenFull, check_pace
from omni.engine.engine import Engine
from omni.engine.forget import plan
from omni.engine.slots import Seat
from omni.errors import UserError
from omni.generate.bounds import check_number
from omni.generate.faces import Faces
from omni.generate.history import Exchange, Past, check_room, fit
from omni.generate.incoming import Incoming, Withdrawn, is_coming
from omni.generate.listener import AnswerReader, whole_answer
from omni.generate.messages import Message, messages
from omni.generate.options import AnswerOptions
from omni.generate.question import Asked, Coming, Question, longest, read_question, read_system
from omni.generate.results import Answer, Clock, Ended, Event
from omni.generate.rows import Start
from omni.generate.sampling import per_stream, seed_key
from omni.generate.speech_time import SpeechTime
from omni.generate.turn import Limits, Reply
from omni.lora.attach import kept, selection_of
from omni.lora.selection import RowSelection
from omni.model.speech_model import SpeechModel
from omni.tasks import Task, Turn, find_task, find_writer, prompt
from omni.text import Tokenizer


class Session(Faces):
    """One conversation. Made by `SpeechLM.session`; close it (or use `with`) to free its cache.

    One answer at a time: `ask` gives its events as they come (`ask_async` in a loop of asyncio, `start` to a function) and
    `answer` and `answer_async` the whole; `cancel` stops it from any thread.

    Args:
        engine: answers its questions.
        context: positions that the conversation may fill.
        past: the conversation before.
        release: called when the session ends.
        edits: the name under which its edits are attached to the model (`omni.edit.attach`).
        time: speaking time of the model's voice.
        pace, when_full: how its listener takes sound, and what becomes of a question where there is no room
            (`omni.engine.client`).
        sound: decode the answers' codes, where there is a codec.
    """

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        codec: AudioCodec | None,
        engine: Engine,
        options: AnswerOptions,
        *,
        context: int,
        past: Past,
        release: Callable[[], None],
        edits: str | None,
        time: SpeechTime,
        pace: Pace = "read",
        when_full: WhenFull = "wait",
        sound: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.codec = model, tokenizer, codec
        self.options, self.time = options, time
        self._selection: RowSelection = options.adapter if edits is None else (options.adapter, edits)
        selection_of(model, [self._selection])
        self.settings = per_stream(model.layout, options.sampling)
        self._system = read_system(options.system, tokenizer)
        self._engine, self._release, self._sound = engine, release, sound
        self._pace, self._when_full = check_pace(pace, when_full)
        first = past.asked - len(past.turns)
        self._past = [Exchange(a.turn, number, a.clip) for number, a in enumerate(past.turns, first)]
        self._asked = past.asked
        if options.overflow == "end":
            check_room(model.layout, self._past, self._system, context, model.config.decoder.context)
        if options.max_silence is not None and (codec is None or not sound):
            raise UserError("max_silence listens to the answer's sound, and no codec makes any here; leave it out")
        self._seat: Seat | None = engine.seat(context)
        self._last: Running | None = None
        self._incoming: Incoming | None = None  # of a question whose sound is still coming
        self._lock = threading.RLock()  # guards the history and the last answer
        _OPEN.add(self)
        self._dropped = weakref.finalize(self, _abandon, engine, self._seat, release)
        self._dropped.atexit = False

    # --- the interface ----------------------------------------------------------------------------------------

    def read(
        self,
        question: Question | Coming,
        task: Task | str,
        sample_rate: int,
        seed: int | None = None,
        gone: Callable[[], bool] | None = None,
        pace: Pace | None = None,
    ) -> Running:
        """Read a question and lay it out, for `begin`.

        Args:
            gone: whether nobody wants the answer any more; asked once the question was read.

        Raises:
            UserError: as of `ask`.
            Withdrawn: nobody wants it any more; nothing has changed then.
        """
        if seed is not None:
            check_number("seed", seed)
        self._engine.check()
        self._open()
        self._commit(self._last)
        if isinstance(question, Iterator) and is_coming(question) and find_task(task).question != "text":
            incoming = Incoming(sample_rate, longest(self.model.config))
            with self.hearing(incoming):
                question = incoming.gather(question)
        clock = Clock()
        asked = read_question(question, task, self.model, self.tokenizer, sample_rate)
        with self._lock:
            if gone is not None and gone():
                raise Withdrawn
            running = self.lay_out(asked, seed, clock)
            running.pace = pace or running.pace
            return running

    def begin(self, running: Running) -> None:
        """Give the engine a question that was laid out; UserError where it does not take it, and nothing is left of it then."""
        try:
            self._engine.ask([running])
        except BaseException:
            self.withdraw(running)
            raise

    def withdraw(self, running: Running) -> None:
        """Continue as if a question had not been asked."""
        with self._lock:
            if self._last is running:
                self._past, self._asked = running.before, running.exchange.number
            running.settled = True
            self._engine.stop(running)

    @contextmanager
    def hearing(self, incoming: Incoming) -> Iterator[None]:
        """While sound is still coming: another question is refused, and `cancel` and `close` end it."""
        with self._lock:
            self._commit(self._last)
            self._incoming = incoming
        try:
            yield
        finally:
            with self._lock:
                self._incoming = None

    def lay_out(self, asked: Asked, seed: int | None = None, clock: Clock | None = None) -> Running:
        """Lay out a question for the engine; the last answer is settled first.

        Args:
            clock: started when the question came.
        """
        with ExitStack() as held:
            held.enter_context(kept(self.model, [self._selection]))
            active = selection_of(self.model, [self._selection])  # its adapter may have been removed, or merged, since
            layout, options, kind = self.model.layout, self.options, asked.task
            frames, most = options.limits(kind, self.codec, layout.max_delay)
            codec = self.codec if self._sound else None
            limits = Limits(frames, most, options.stops, options.max_silence)
            reply = Reply(layout, kind, self.tokenizer, codec, limits, self.time)
            with self._lock:
                seat = self._open()
                self._commit(self._last)  # once more: another thread may have asked meanwhile
                clip = None if asked.clip is None else asked.clip.clone()  # a caller may fill its buffer again
                before, exchange = self._past, Exchange(asked.turn, self._asked, clip)
                room, forget = (seat.limit, self.model.config.decoder.context), options.overflow == "forget"
                self._past, columns, keys = fit(layout, before, exchange, self._system, *room, forget)
                key = seed_key(options.seed, self._asked) if seed is None else seed_key(seed)
                self._asked += 1
                fork = None
                if options.text_assist and kind.text and kind.audio:
                    fork = prompt(layout, replace(exchange.turn, task=find_writer(kind))).tokens[:, -1]
                position, selection = len(keys) - 1, self._selection
                running = Running(
                    exchange=exchange,
                    before=before,
                    said=(*self._past, exchange),
                    columns=columns,
                    keys=keys,
                    reply=reply,
                    codec=codec,
                    seat=seat,
                    start=Start(kind.text, kind.audio, position, self.settings, key, None, selection, options.logprobs),
                    release=held.pop_all().close,
                    clock=clock or Clock(),
                    fork=fork,
                    active=active,
                    pace=self._pace,
                    when_full=self._when_full,
                )
                self._last = running
        return running

    @property
    def sample_rate(self) -> int:
        """Of the answers' sound, in Hz; 0 without a codec."""
        return 0 if self.codec is None else self.codec.sample_rate

    def gather(self, running: Running) -> Answer:
        """Wait for the whole of an answer."""
        return whole_answer(self.events_of(running), running, self.sample_rate)

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

    def cancel_last(self, only: Running | None, played_seconds: float | None, shown_characters: int | None) -> None:
        """`cancel`, unless the last answer is another than `only`, where that is given."""
        self._engine.check_process()
        if (incoming := self._incoming) is not None:
            incoming.withdrawn = True
            return
        with self._lock:
            last = self._last
            if last is None or only not in (None, last):
                return
            last.interrupt(played_seconds, shown_characters)
            if not last.settled:
                self._settle(last)
            elif self._past and last.reply.error is None:
                self._past[-1] = last.delivered()
            self._make_room()

    @property
    def place(self) -> int:
        """Place of the last question among those that wait for room, from 1; 0 for one that does not wait."""
        return 0 if self._last is None else self._engine.place(self._last)

    @property
    def history(self) -> list[Message]:
        """The questions and the delivered part of their answers, to read, or to start another session with; an answer under way
        and its question are not among them."""
        return messages(self._past, self.tokenizer, self.codec)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The history as ids, the first turn with the system message."""
        turns = [exchange.turn for exchange in self._past]
        return tuple(replace(turn, system=() if number else self._system) for number, turn in enumerate(turns))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the history as one file, from which `SpeechLM.session(history=path)` continues, without an answer under way.

        Raises:
            UserError: the place cannot be written.
        """
        from omni.generate.saved import save_conversation

        with self._lock:
            past, asked = list(self._past), self._asked - (self._last is not None and not self._last.settled)
        return save_conversation(path, past, asked, self.model, self.tokenizer)

    def __repr__(self) -> str:
        seat, turns = self._seat, len(self._past)
        place = "closed" if seat is None else f"{len(seat.held.keys)} of {seat.limit} positions"
        adapter = f", adapter={self.options.adapter!r}" if self.options.adapter else ""
        return f"Session({turns} turn{'' if turns == 1 else 's'}, {place}{adapter})"

    def close(self) -> None:
        """End the session and free its slot; from any thread. An answer under way is cancelled: its iterator ends with
        `Ended("cancelled")`."""
        if self._engine.forked:
            return
        with self._lock:
            seat, self._seat = self._seat, None
            if seat is None:
                return
            if self._incoming is not None:
                self._incoming.withdrawn = True
            if self._last is not None:
                self._settle(self._last)
            self._engine.vacate(seat)
            self._dropped.detach()
        self._release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- one answer ------------------------------------------------------------------------------------------

    def listener(self, running: Running) -> AnswerReader:
        """Who takes an answer's events."""
        return AnswerReader(running, self.options.stop_when)

    def events_of(self, running: Running) -> Iterator[Event]:
        """The events of an answer that was begun; closing the iterator cancels it."""
        listener = self.listener(running)
        try:
            while True:
                self._engine.check_process()
                event = listener.take()
                if isinstance(event, Ended):
                    break
                yield event
        finally:
            if not self._engine.forked:
                with self._lock:
                    self._settle(running)
                    self._make_room()
        yield event

    def let_go(self, running: Running) -> None:
        """Cancel an answer without waiting for anybody. It is in the history at once, unless another thread is asking or
        cancelling: that one puts it there."""
        self._engine.stop(running, wait=False)
        if self._lock.acquire(blocking=False):
            try:
                self._settle(running, wait=False)
            finally:
                self._lock.release()

    def break_off(self, running: Running, error: str) -> None:
        """End an answer with an error of its listener; it does not stay in the history."""
        running.stop("error", error)
        self.withdraw(running)

    # --- the history ------------------------------------------------------------------------------------------

    def _commit(self, running: Running | None) -> None:
        """Settle an answer, unless another thread waits for it."""
        with self._lock:
            under = running is not None and not running.settled and running.reader not in (0, threading.get_ident())
            if under or self._incoming is not None:
                raise UserError(
                    "another answer of this session is being made in another thread or task; cancel it, or wait for its end"
                )
            if running is not None:
                self._settle(running)

    def _settle(self, running: Running, wait: bool = True) -> None:
        """Put the delivered part of an answer into the history (once); its iterator gives no more of it. Without `wait` its
        rows may still be busy, and whoever settles it next waits for them."""
        settled, running.settled = running.settled, True
        if not (settled and running.left.is_set()):
            self._engine.stop(running, wait)
        if settled:
            return
        if running.reply.error is None and running.failure is None:
            self._past.append(running.delivered())
        else:
            self._past, self._asked = running.before, running.exchange.number

    def _make_room(self) -> None:
        """Have what stays fed before the next question, where turns go before it; the history keeps them until then."""
        if self._seat is None or self.options.overflow != "forget":
            return
        refill = plan(self.model.layout, self._seat, self._past, self._system, self._selection)
        if refill is not None:
            self._engine.refill(refill)

    def _open(self) -> Seat:
        if self._seat is None:
            raise UserError("this session is closed; start a new one")
        return self._seat


def _abandon(engine: Engine, seat: Seat, release: Callable[[], None]) -> None:
    """Frees what a session held that nobody has any more."""
    engine.vacate(seat)
    release()


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all sessions at exit, before the interpreter clears its modules: a held iterator could not end afterwards."""
    for session in list(_OPEN):
        session.close()
