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
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.bounds import check_number
from omni.generate.history import CachedHistory, Exchange, Past, check_room, fit
from omni.generate.messages import Message, messages
from omni.generate.options import AnswerOptions, refuse_keywords
from omni.generate.prefill import pack, prefill, prefill_fork
from omni.generate.question import FEATURES_NOT_FINITE, Asked, Question, encode_questions, is_finite, read_question, read_system
from omni.generate.results import Answer, AudioChunk, Clock, Ended, Event, Reason, TextDelta, Timings
from omni.generate.rows import Start
from omni.generate.runner import Runner
from omni.generate.sampling import per_stream, seed_key
from omni.generate.speech_time import SpeechTime
from omni.generate.turn import Reply, Running
from omni.hardware import synchronize
from omni.lora.attach import active_edits, kept, removals, selection_of
from omni.lora.selection import RowSelection, using
from omni.model.speech_model import SpeechModel
from omni.tasks import Task, Turn, find_writer, prompt
from omni.text import Tokenizer


class Session:
    """One conversation. Made by `SpeechLM.session`; close it (or use `with`) to free its cache.

    One answer at a time: `ask` gives its events as they come, `cancel` stops it from any thread.

    Args:
        past: the conversation before; its questions are encoded one by one, as they were when they were asked.
        release: called when the session ends; from then on the runner belongs to others.
        edits: the name under which its edits are attached to the model (`omni.edit.attach`).
        time: speaking time of the model's voice.
    """

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        codec: AudioCodec | None,
        runner: Runner,
        options: AnswerOptions,
        *,
        past: Past,
        release: Callable[[], None],
        edits: str | None,
        time: SpeechTime,
    ) -> None:
        self.model, self.tokenizer, self.codec = model, tokenizer, codec
        self.options, self.time = options, time
        self._selection: RowSelection = options.adapter if edits is None else (options.adapter, edits)
        self._active = selection_of(model, [self._selection])
        self.settings = per_stream(model.layout, options.sampling)
        self._system = read_system(options.system, tokenizer)
        self._runner: Runner | None = runner
        self._release = release
        first = past.asked - len(past.turns)
        self._past = [Exchange(a.turn, self._encode(a), number, a.clip) for number, a in enumerate(past.turns, first)]
        self._asked = past.asked
        if options.overflow == "end":
            check_room(model.layout, self._past, self._system, runner.length, model.config.decoder.context)
        self._last: Running | None = None
        self._lock = threading.RLock()  # guards the history and the last answer
        self._idle = threading.Condition(self._lock)  # notified when work on an answer pauses or is over
        self._closing = False
        self._held = CachedHistory()
        _OPEN.add(self)

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
        clock = Clock()
        refuse_keywords("ask", more, ("sample_rate", "seed"))
        if seed is not None:
            check_number("seed", seed)
        self._open()
        self._commit(self._last)
        with ExitStack() as held:
            held.enter_context(kept(self.model, [self._selection]))
            self._active = selection_of(self.model, [self._selection])  # its adapter may have been removed, or merged, since
            asked = read_question(question, task, self.model, self.tokenizer, sample_rate)
            features, encoded = self._encode(asked), clock.seconds
            layout = self.model.layout
            frames, most = self.options.limits(asked.task, self.codec, layout.max_delay)
            stop = self.options.stops
            reply = Reply(
                layout, asked.task, self.tokenizer, self.codec, max_frames=frames, max_columns=most, stop=stop, time=self.time
            )
            with self._lock:
                runner = self._open()
                self._commit(self._last)  # once more: another thread may have asked meanwhile
                clip = None if asked.clip is None else asked.clip.clone()  # a caller may fill its buffer again
                before, exchange = self._past, Exchange(asked.turn, features, self._asked, clip)
                room, forget = (runner.length, self.model.config.decoder.context), self.options.overflow == "forget"
                self._past, columns, keys = fit(layout, before, exchange, self._system, *room, forget)
                key = seed_key(self.options.seed, self._asked) if seed is None else seed_key(seed)
                self._asked += 1
                parts = (exchange, before, columns, keys, reply, self.codec, clock, key, encoded)
                running = self._last = Running(*parts, release=held.pop_all().close)
                running.hold()
        return self._events(running, runner)

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
        text, sound = [], [torch.zeros(0)]
        ended = Ended("cancelled", Timings())
        events = self.ask(question, task, sample_rate=sample_rate, seed=seed, **more)
        last, codec = self._last, self.codec
        assert last is not None
        for event in events:
            if isinstance(event, TextDelta):
                text.append(event.text)
            elif isinstance(event, AudioChunk):
                sound.append(event.samples)
            else:
                ended = event
        turn = last.delivered().turn
        return Answer(
            text="".join(text),
            audio=torch.cat(sound) if codec is not None and turn.codes is not None else None,
            sample_rate=codec.sample_rate if codec is not None else 0,
            tokens=tuple(turn.text or ()),
            codes=turn.codes,
            timings=ended.timings,
            ended=ended.reason,
            error=ended.error,
        )

    def cancel(self, played_seconds: float | None = None, shown_characters: int | None = None) -> None:
        """Stop the answer that is being made, and cut the last answer in the history to the delivered part.

        May be called from any thread, between events, or after the answer has ended (a listener interrupts what
        is still playing). An answer under way ends with `Ended("cancelled")`; it is in the history at once, or, where a
        thread is at work on it just now, after that thread's next event.

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
                last.cancelled = True
                if not last.busy:
                    self._commit(last)
            elif self._past and last.reply.error is None:
                self._past[-1] = last.delivered()

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
        runner, turns = self._runner, len(self._past)
        place = "closed" if runner is None else f"{len(self._held.keys)} of {runner.length} positions"
        adapter = f", adapter={self.options.adapter!r}" if self.options.adapter else ""
        return f"Session({turns} turn{'' if turns == 1 else 's'}, {place}{adapter})"

    def close(self) -> None:
        """End the session and free its cache.

        May be called from any thread. An answer under way is cancelled: another thread that works on it is waited for
        (until the next event or the end), and its iterator ends with `Ended("cancelled")`. Called from within that work
        itself (by a signal's handler), the session ends together with it.
        """
        with self._idle:
            self._closing = True
            while (last := self._last) is not None and last.busy:
                last.cancelled = True
                if last.worker == threading.get_ident():
                    return
                self._idle.wait()
            self._commit(self._last)
            runner, self._runner = self._runner, None
        if runner is not None:
            self._release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one answer -------------------------------------------------------------------------------------------

    def _events(self, running: Running, runner: Runner) -> Iterator[Event]:
        reply = running.reply
        self._resume(running)
        try:
            if not running.cancelled:
                self._begin(running, runner)
            while running.rows and not running.cancelled:
                room = running.rows[0].position < runner.length
                for event in self._written(running, runner, flush=not room):
                    yield from self._hand_over(running, event)
                if running.cancelled:
                    break
                if reply.reason is None and not room:
                    reply.reason = "cache"
                if reply.reason is not None:
                    for event in reply.finish() if reply.error is None else []:
                        yield from self._hand_over(running, event)
                    break
                runner.step()
            reason: Reason = reply.reason or "cancelled"
            if running.cancelled and reply.error is None:
                reason = "cancelled"
        finally:
            self._pause(running)
            self._commit(running)
            if self._closing:  # `close` was called from within this work
                self.close()
        yield Ended(reason, running.timings(), reply.error)

    def _encode(self, asked: Asked) -> Tensor | None:
        """Features of a question, after waiting for the device; UserError where they are not finite."""
        with using(self._active):
            (features,) = encode_questions(self.model, [asked])
        if not is_finite(features):
            raise UserError(FEATURES_NOT_FINITE)
        return features

    def _begin(self, running: Running, runner: Runner) -> None:
        """Prefill the cache to the end of the question and write the answer's first column."""
        model, task, keys = self.model, running.task, running.keys
        features = [e.features for e in (*self._past, running.exchange) if e.features is not None]
        under = (active_edits(model), self._selection and removals(model))
        keep = self._held.keep(keys, under, runner.cache)
        question = pack(model.layout, [running.columns], features, [keep])
        start = Start(task.text, task.audio, len(keys) - 1, self.settings, running.key, selection=self._selection)
        if self.options.text_assist and task.text and task.audio:
            other = prompt(model.layout, replace(running.exchange.turn, task=find_writer(task)))
            with using(self._active):
                hidden = prefill_fork(model, runner.cache, question, other.tokens[:, -1], runner.chunk)
            starts = [replace(start, partner=1), replace(start, audio=False)]
        else:
            with using(self._active):
                hidden = prefill(model, runner.cache, range(1), question, runner.chunk)
            starts = [start]
        self._held.keys = list(keys)
        synchronize(model.device)
        running.prefill = running.clock.seconds
        running.rows = runner.begin(0, hidden, starts)

    def _written(self, running: Running, runner: Runner, flush: bool) -> Iterator[TextDelta | AudioChunk]:
        """Events of the steps' outputs on the speaking row. An assisting row that has ended its text leaves."""
        for row, written in runner.results(flush):
            if running.settled:  # settled while the caller had the event before: the rows belong to others now
                return
            if row is running.rows[0]:
                yield from running.reply.write(written)
            elif row.done:
                runner.leave(row)

    def _hand_over(self, running: Running, event: TextDelta | AudioChunk) -> Iterator[Event]:
        if not running.cancelled:
            running.count(event)
            self._pause(running)
            yield event
            self._resume(running)

    def _resume(self, running: Running) -> None:
        """Mark that work on an answer starts or continues; where it was settled meanwhile it is `cancelled`, and soon over."""
        with self._lock:
            running.go_on()

    def _pause(self, running: Running) -> None:
        """Mark that work on an answer pauses or is over."""
        with self._idle:
            running.hold()
            self._idle.notify_all()

    # --- the history ------------------------------------------------------------------------------------------

    def _commit(self, running: Running | None) -> None:
        """Put the delivered part of an answer into the history (once), and free its rows; its iterator gives no more of it."""
        with self._lock:
            if running is None or running.settled:
                return
            if running.busy:
                raise UserError(
                    "another answer of this session is being made in another thread; cancel it, or wait for its end"
                )
            running.settled = running.cancelled = True
            runner = self._runner
            assert runner is not None  # it is released only after the last answer was settled
            if running.rows:
                self._held.add(running.reply.columns[:-1], running.rows[0].position)
            for row in running.rows:
                runner.leave(row)
            running.rows = []
            runner.results(flush=True)
            running.release()
            if running.reply.error is None:
                self._past.append(running.delivered())
            else:
                self._past, self._asked, self._held.keys = running.before, running.exchange.number, []

    def _open(self) -> Runner:
        if self._runner is None or self._closing:
            raise UserError("this session is closed; start a new one")
        return self._runner


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all sessions at exit, before the interpreter clears its modules: a held iterator could not end afterwards."""
    for session in list(_OPEN):
        if session._last is None or not session._last.busy:
            session.close()
