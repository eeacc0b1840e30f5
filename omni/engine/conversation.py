"""A conversation of several turns, as the engine has it: over the rows of one cache.

The history holds only what was delivered: an answer that was cancelled, or interrupted while it played, is kept as the offline
layout of the text and the frames that reached the listener. The last column of an answer, and all columns in which the cache
differs from the history, are fed together with the next question. Of an answer that broke (logits that are not finite) nothing
is kept: the conversation continues as if it had not been asked.

Text assist (mini-omni's batch-parallel decoding, gpt-omni/mini-omni @ 26c31d5 `litgpt/generate/base.py`) couples two rows:
row 0 speaks, and its text input is the text of row 1, which was asked for text only and therefore writes better text. Row 1
leaves as soon as its text has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from omni.codec.base import AudioCodec
from omni.engine.answer import EventOutlet, Pace, Running, WhenFull
from omni.engine.engine import Engine
from omni.engine.prefill_ahead import Listen, plan
from omni.engine.slots import Seat
from omni.errors import UserError
from omni.generate.answer_stream import DeliveredPart, delivered_part
from omni.generate.feature_stream import FeatureStream, KnownFeatures
from omni.generate.history import Exchange, Past, check_room, fit
from omni.generate.messages import Message, messages, save_conversation
from omni.generate.options import AnswerOptions
from omni.generate.question import Asked, read_system
from omni.generate.reply import Limits, Reply
from omni.generate.results import Clock
from omni.generate.rows import Start
from omni.generate.sampling import per_stream, seed_key
from omni.generate.speech_time import SpeechTime
from omni.lora.attach import RowSelection, kept, selection_of
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, find_writer, prompt
from omni.text import Tokenizer


class Conversation:
    """One conversation, with one answer at a time; `MessageHandler` calls it for its session.

    Args:
        context: positions that the conversation may fill.
        release: called when it ends.
        edits: the name under which its edits are attached to the model (`omni.edit.deltas`).
        pace, when_full: see `omni.engine.answer`.
        sound: decode the answers' codes, where there is a codec.

    Attributes:
        newest: number of the last answer, 0 for none.
        gone: number of the newest answer that nobody wants, perhaps before it was asked: messages overtake each other.
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
        time: SpeechTime,
        past: Past = Past(),  # noqa: B008 (frozen)
        release: Callable[[], None] = lambda: None,
        edits: str | None = None,
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
        self._pace, self._when_full = pace, when_full
        first = past.asked - len(past.turns)
        self._past = [Exchange(a.turn, number, a.clip) for number, a in enumerate(past.turns, first)]
        self._asked = past.asked
        if options.overflow == "end":
            check_room(model.layout, self._past, self._system, context, model.config.decoder.context)
        if options.max_silence is not None and (codec is None or not sound):
            raise UserError("max_silence listens to the answer's sound, and no codec makes any here; leave it out")
        self._seat: Seat | None = engine.seat(context)
        self._hears: FeatureStream | None = None  # the next question, while its sound comes, and its number
        self._sound_number = 0
        self._last: Running | None = None
        self._lock = threading.RLock()  # guards the history and the last answer
        self.newest = self.gone = 0

    def check(self) -> Seat:
        """UserError where no question is taken: the engine or the conversation is closed."""
        self._engine.check()
        return self._open()

    # --- the question ---------------------------------------------------------------------------------------------

    def lay_out(
        self, asked: Asked, seed: int | None, clock: Clock, outlet: EventOutlet, heard: FeatureStream | None
    ) -> Running:
        """A question's answer, for `begin`; the last one is settled first. `heard`: its sound, where it was listened to."""
        with ExitStack() as held:
            held.enter_context(kept(self.model, [self._selection]))
            active = selection_of(self.model, [self._selection])  # its adapter may have been removed since
            layout, options, task = self.model.layout, self.options, asked.task
            frames, most = options.limits(task, self.codec, layout.max_delay)
            codec = self.codec if self._sound else None
            limits = Limits(frames, most, options.stops, options.max_silence)
            reply = Reply(layout, task, self.tokenizer, codec, limits, self.time)
            with self._lock:
                seat = self._open()
                if self._last is not None:
                    self._settle(self._last)
                clip = asked.clip
                if clip is not None and heard is None:
                    clip = clip.clone()  # a caller may fill its buffer again
                before, exchange = self._past, Exchange(asked.turn, self._asked, clip, None, asked.prepared, heard)
                if isinstance(asked.heard, KnownFeatures):
                    exchange.features, exchange.sound = asked.heard.features, asked.heard.number
                    exchange.turn = replace(asked.turn, features=len(exchange.features))
                room, forget = (seat.limit, self.model.config.decoder.context), options.overflow == "forget"
                self._past, columns, keys = fit(layout, before, exchange, self._system, *room, forget)
                key = seed_key(options.seed, self._asked) if seed is None else seed_key(seed)
                self._asked += 1
                fork = None
                if options.text_assist and task.text and task.audio:
                    fork = prompt(layout, replace(exchange.turn, task=find_writer(task))).tokens[:, -1]
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
                    start=Start(task.text, task.audio, position, self.settings, key, None, selection, options.logprobs),
                    release=held.pop_all().close,
                    clock=clock,
                    outlet=outlet,
                    fork=fork,
                    active=active,
                    pace=self._pace,
                    when_full=self._when_full,
                )
                self._last = running
                if heard is not None:
                    heard.forget_peeked()
                    self._end_listening(heard)
                self._listen()
        return running

    def begin(self, running: Running) -> None:
        """Give the engine a question that was laid out; UserError where it does not take it, and nothing is left of it then."""
        try:
            self._engine.hear(running)
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
            self._listen()

    # --- the next question, while its sound comes ---------------------------------------------------------------------

    def open_sound(self, sound: int, task: str, put: Callable[[int, Tensor], None] | None) -> None:
        """Listen to the next question, under a number. `put` is given what the model's turn head says of its frames."""
        with self._lock:
            self._open()
            if self._hears is not None:
                self._hears.closed = True
            self._hears, self._sound_number = FeatureStream(self.model, task, put), sound
            self._listen()

    def hears(self, sound: Any) -> FeatureStream | None:
        """The sound that is listened to, where it has that number."""
        return self._hears if sound == self._sound_number else None

    def hear(self, sound: int, samples: Tensor, peek: bool) -> None:
        """Take more of it, or (`peek`) sound after that, which may not belong to it."""
        if (stream := self.hears(sound)) is not None:
            (stream.peek if peek else stream.push)(samples)
            self._engine.came(stream)

    def sound_so_far(self, sound: int) -> KnownFeatures:
        """Features so far, for a question of another conversation; UserError where there are none."""
        if (stream := self.hears(sound)) is None:
            raise UserError("this sound is listened to no more; ask the question that it became")
        return stream.so_far()

    def drop_sound(self, sound: int) -> None:
        """Listen no more; waits for nobody."""
        if (stream := self.hears(sound)) is not None:
            stream.closed = True
            self._end_listening(stream)

    def _end_listening(self, sound: FeatureStream) -> None:
        seat = self._seat
        if self._hears is sound and seat is not None:
            self._hears = None
            self._engine.stop_listening(seat, sound)

    def _listen(self) -> None:
        """Have what is heard of the next question fed behind the present history, unless an answer is under way; the lock is
        held."""
        sound, seat = self._hears, self._seat
        if sound is not None and seat is not None:
            past = tuple(self._past) if self._last is None or self._last.settled else None
            self._engine.listen(Listen(seat, sound, past, self._system, self.options.overflow == "forget", self._selection))

    # --- the history --------------------------------------------------------------------------------------------------

    def late(self, seconds: Sequence[float]) -> None:
        """Note how late chunks were that another process decoded."""
        self._engine.heard(seconds)

    def delivered(self) -> DeliveredPart:
        """The delivered part of the last answer."""
        return DeliveredPart() if self._last is None else delivered_part(self._last)

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
    def last_answer(self) -> Message | None:
        past = self._past
        return messages(past[-1:], self.tokenizer, self.codec)[1] if past else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The history as ids, the first turn with the system message."""
        turns = [exchange.turn for exchange in self._past]
        return tuple(replace(turn, system=() if number else self._system) for number, turn in enumerate(turns))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the history as one file, from which `SpeechLM.session(history=path)` continues, without an answer under way.
        UserError: the place cannot be written."""
        with self._lock:
            past, asked = list(self._past), self._asked - (self._last is not None and not self._last.settled)
        return save_conversation(path, past, asked, self.model, self.tokenizer)

    @property
    def shown(self) -> str:
        """Its state, in words."""
        seat, turns = self._seat, len(self._past)
        state = "closed" if seat is None else f"{len(seat.held.keys)} of {seat.limit} positions"
        adapter = f", adapter={self.options.adapter!r}" if self.options.adapter else ""
        return f"{turns} turn{'' if turns == 1 else 's'}, {state}{adapter}"

    def settle(self, running: Running) -> None:
        """Put the delivered part of an answer into the history, and prepare for the next question."""
        with self._lock:
            self._settle(running)
            self._make_room()

    def let_go(self, running: Running) -> None:
        """`settle` without waiting for anybody; where another thread is asking or cancelling, that one settles it."""
        self._engine.stop(running, wait=False)
        if self._lock.acquire(blocking=False):
            try:
                self._settle(running, wait=False)
                self._make_room()
            finally:
                self._lock.release()

    def interrupt(self, played: float | None, shown: int | None) -> None:
        """Settle the last answer, or cut it in the history once more, where less of it was heard or seen than was delivered."""
        with self._lock:
            running = self._last
            if running is None:
                return
            running.delivery.interrupt(played, shown)
            if not running.settled:
                self._settle(running)
            elif self._past and self._past[-1].number == running.exchange.number:  # else it broke, or was withdrawn
                self._past[-1] = running.delivered()
            self._make_room()

    def _settle(self, running: Running, wait: bool = True) -> None:
        """Put the delivered part of an answer into the history (once). Without `wait` its rows may still be busy, and whoever
        settles it next waits for them."""
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
        if self._hears is not None:
            self._listen()
        if self._seat is None or self._hears is not None or self.options.overflow != "forget":
            return
        refill = plan(self.model.layout, self._seat, self._past, self._system, self._selection)
        if refill is not None:
            self._engine.refill(refill)

    def _open(self) -> Seat:
        if self._seat is None:
            raise UserError("this session is closed; start a new one")
        return self._seat

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it and free its slot. An answer under way is cancelled."""
        with self._lock:
            if self._last is not None and self._seat is not None:
                self._settle(self._last)
            self.abandon()

    def abandon(self) -> None:
        """Free what it holds, where nobody has its session any more; waits for nobody."""
        seat, self._seat = self._seat, None
        if seat is None:
            return
        if self._hears is not None:
            self._hears.closed = True
        self._engine.vacate(seat)
        self._release()
