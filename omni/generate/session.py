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

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from omni.audio.io import SAMPLE_RATE
from omni.codec.base import AudioCodec
from omni.engine.client import Pace, Running, WhenFull, check_pace
from omni.engine.engine import Engine
from omni.engine.forget import plan
from omni.engine.slots import Seat
from omni.errors import UserError
from omni.generate.bounds import check_number
from omni.generate.history import Exchange, Past, check_room, fit
from omni.generate.messages import Message, messages
from omni.generate.options import AnswerOptions, refuse_keywords
from omni.generate.question import Asked, Question, read_question, read_system
from omni.generate.results import Answer, AudioChunk, Clock, Ended, Event, TextDelta, Timings
from omni.generate.rows import Start
from omni.generate.sampling import per_stream, seed_key
from omni.generate.speech_time import SpeechTime
from omni.generate.turn import Limits, Reply
from omni.lora.attach import kept, selection_of
from omni.lora.selection import RowSelection
from omni.model.speech_model import SpeechModel
from omni.tasks import Task, Turn, find_writer, prompt
from omni.text import Tokenizer


class Session:
    """One conversation. Made by `SpeechLM.session`; close it (or use `with`) to free its cache.

    One answer at a time: `ask` gives its events as they come, `cancel` stops it from any thread.

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
        self._seat: Seat | None = engine.seat(context)
        self._last: Running | None = None
        self._lock = threading.RLock()  # guards the history and the last answer
        _OPEN.add(self)
        self._dropped = weakref.finalize(self, _abandon, engine, self._seat, release)
        self._dropped.atexit = False

    # --- the interface ----------------------------------------------------------------------------------------

    def ask(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
        **more: NoReturn,
    ) -> Iterator[Event]:
        """Ask, and get the answer as events: text and sound as they come, `Ended` last. Events that were taken from the
        iterator count as delivered. Closing it, or asking before its end, cancels the answer.

        Args:
            question: a text or sound, as the task asks; see `omni.generate.question.Question`.
            sample_rate: of samples that come without their own, in Hz; files have their own.
            seed: of this answer's draws; by default derived from the session's seed and the turn's number.

        Raises:
            UserError: a bad question or seed, features of it that are not finite, no room left in the cache (see
                `AnswerOptions.overflow`), another answer being made in another thread, an adapter that was removed or
                merged meanwhile, or a closed session.
        """
        refuse_keywords("ask", more, ("sample_rate", "seed"))
        running = self._read(question, task, sample_rate, seed)
        self._submit(running)
        return self._events(running)

    def _submit(self, running: Running) -> None:
        """Give a question to the engine; one that is refused is as if it had not been asked."""
        try:
            self._engine.ask([running])
        except UserError:
            with self._lock:
                running.settled = running.cancelled = True
                running.left.set()
                running.release()
                self._past, self._asked = running.before, running.exchange.number
            raise

    def _read(self, question: Question, task: Task | str, sample_rate: int, seed: int | None) -> Running:
        """Read a question and lay it out."""
        clock = Clock()
        if seed is not None:
            check_number("seed", seed)
        self._open()
        self._commit(self._last)
        return self.lay_out(read_question(question, task, self.model, self.tokenizer, sample_rate), seed, clock)

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
            limits = Limits(frames, most, options.stops)
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
                running = Running(
                    exchange=exchange,
                    before=before,
                    said=(*self._past, exchange),
                    columns=columns,
                    keys=keys,
                    reply=reply,
                    codec=codec,
                    seat=seat,
                    start=Start(kind.text, kind.audio, len(keys) - 1, self.settings, key, selection=self._selection),
                    release=held.pop_all().close,
                    clock=clock or Clock(),
                    fork=fork,
                    active=active,
                    pace=self._pace,
                    when_full=self._when_full,
                )
                self._last = running
        return running

    def answer(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
        **more: NoReturn,
    ) -> Answer:
        """Ask, and wait for the whole answer; `Answer.error` says so where it broke."""
        refuse_keywords("answer", more, ("sample_rate", "seed"))
        running = self._read(question, task, sample_rate, seed)
        running.pace = "whole"
        self._submit(running)
        return self.gather(running)

    def gather(self, running: Running) -> Answer:
        """Wait for the whole of an answer."""
        text, sound = [], [torch.zeros(0)]
        ended = Ended("cancelled", Timings())
        for event in self._events(running):
            if isinstance(event, TextDelta):
                text.append(event.text)
            elif isinstance(event, AudioChunk):
                sound.append(event.samples)
            else:
                ended = event
        turn, codec = running.delivered().turn, running.codec
        return Answer(
            text="".join(text),
            audio=torch.cat(sound) if codec is not None and turn.codes is not None else None,
            sample_rate=self.codec.sample_rate if self.codec is not None else 0,
            tokens=tuple(turn.text or ()),
            codes=turn.codes,
            timings=ended.timings,
            ended=ended.reason,
            error=ended.error,
        )

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
        with self._lock:
            last = self._last
            if last is None:
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
        with self._lock:
            seat, self._seat = self._seat, None
            if seat is None:
                return
            if self._last is not None:
                self._settle(self._last)
            self._engine.vacate(seat)
            self._dropped.detach()
        self._release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one answer ------------------------------------------------------------------------------------------

    def _events(self, running: Running) -> Iterator[Event]:
        try:
            while True:
                event = running.take()
                if isinstance(event, Ended):
                    break
                yield event
        finally:
            with self._lock:
                self._settle(running)
                self._make_room()
        yield event

    # --- the history ------------------------------------------------------------------------------------------

    def _commit(self, running: Running | None) -> None:
        """Settle an answer, unless another thread waits for it."""
        with self._lock:
            if running is None or running.settled:
                return
            if running.reader not in (0, threading.get_ident()):
                raise UserError(
                    "another answer of this session is being made in another thread; cancel it, or wait for its end"
                )
            self._settle(running)

    def _settle(self, running: Running) -> None:
        """Put the delivered part of an answer into the history (once); its iterator gives no more of it."""
        if running.settled:
            return
        running.settled = True
        self._engine.stop(running)
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
