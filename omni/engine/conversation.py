"""A conversation of several turns, as the engine has it: over the rows of one cache; and the link to it in this process.

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
from omni.engine.answer import EventOutlet, Pace, Running, Seat, WhenFull
from omni.engine.engine import Engine
from omni.engine.listener import Link
from omni.engine.prefill_ahead import Listen, plan
from omni.engine.sound import is_portable
from omni.errors import UserError
from omni.generate.history import Exchange, Message, Past, check_room, fit, messages, save_conversation
from omni.generate.listening import FeatureStream
from omni.generate.options import AnswerOptions
from omni.generate.question import Asked, read_system
from omni.generate.results import Clock, Ended, Logprobs, Reason, Reply
from omni.generate.rows import Start
from omni.generate.sampling import per_stream, seed_key
from omni.generate.speech_time import SpeechTime
from omni.lora.attach import RowSelection, kept, selection_of
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, find_writer, prompt
from omni.text import Tokenizer


class Conversation:
    """One conversation, with one answer at a time. Its session calls it by messages (`LocalLink`): answers and sounds are
    known by numbers, and one that is not there any more, or not yet, is passed over, since messages overtake each other.

    Args:
        context: positions that the conversation may fill.
        release: called when it ends.
        edits: the name under which its edits are attached to the model (`omni.edit.deltas`).
        pace, when_full: see `omni.engine.answer`.
        sound: decode the answers' codes, where there is a codec.

    Attributes:
        under_way: the last answer, until it is settled.
        link: that has it, by its number.
    """

    link: LocalLink

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
        past: Past = ((), 0),
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
        turns, self._asked = past
        self._past = [Exchange(a.turn, number, a.clip) for number, a in enumerate(turns, self._asked - len(turns))]
        if options.overflow == "end":
            check_room(model.layout, self._past, self._system, context, model.config.decoder.context)
        if options.max_silence is not None and (codec is None or not sound):
            raise UserError("max_silence listens to the answer's sound, and no codec makes any here; leave it out")
        self._seat: Seat | None = engine.seat(context)
        self._hears: FeatureStream | None = None  # the next question, while its sound comes, and its number
        self._sound_number = 0
        self._last: Running | None = None
        self.under_way: Running | None = None
        self._gone = 0  # number of the newest answer that nobody wants, perhaps before it was asked
        self._lock = threading.RLock()  # guards the history and the last answer

    def check(self) -> Seat:
        """UserError where no question is taken: the engine or the conversation is closed."""
        self._engine.check()
        return self._open()

    # --- the question ---------------------------------------------------------------------------------------------

    def ask(self, number: int, asked: Asked, seed: int | None, clock: Clock) -> None:
        """Answer a question; of one that was listened to, or that is still coming, `asked.heard` has the number. UserError
        where the engine does not take it, and nothing is left of it then."""
        running = self.lay_out(number, asked, seed, clock)
        try:
            if self._gone < number:
                self._engine.hear(running)
                self._engine.ask([running])
        except BaseException:
            self._withdraw(running)
            raise
        if self._gone >= number:
            self.let_go(number, 0)

    def lay_out(self, number: int, asked: Asked, seed: int | None, clock: Clock) -> Running:
        """A question's answer, which the engine was not asked for yet; the last one is settled first."""
        known, stream = None, None
        if isinstance(asked.heard, tuple):
            known = self.link.request("sound_so_far", *asked.heard)
        elif asked.heard is not None:
            stream = self.stream(asked.heard)
            assert stream is not None
            asked = replace(asked, clip=stream.sound)
        elif asked.clip is not None:
            asked = replace(asked, clip=asked.clip.clone())  # a caller may fill its buffer again
        with ExitStack() as held:
            held.enter_context(kept(self.model, [self._selection]))
            active = selection_of(self.model, [self._selection])  # its adapter may have been removed since
            layout, options, task = self.model.layout, self.options, asked.task
            limits = options.limits(task, self.codec, layout.max_delay)
            codec, outlet = self.codec if self._sound else None, self.link.listener(number)
            reply = Reply(layout, task, self.tokenizer, codec, limits, self.time)
            with self._lock:
                seat = self._open()
                if self._last is not None:
                    self._settle(self._last)
                before, exchange = self._past, Exchange(asked.turn, self._asked, asked.clip, None, asked.prepared, stream)
                if known is not None:
                    exchange.sound, features = known
                    exchange.hear(features)
                room, forget = (seat.limit, self.model.config.decoder.context), options.overflow == "forget"
                self._past, columns, keys = fit(layout, before, exchange, self._system, *room, forget)
                key = seed_key(options.seed, self._asked) if seed is None else seed_key(seed)
                self._asked += 1
                fork = None
                if options.text_assist and task.text and task.audio:
                    fork = prompt(layout, replace(exchange.turn, task=find_writer(task))).tokens[:, -1]
                position, selection = len(keys) - 1, self._selection
                self._last = self.under_way = running = Running(
                    number=number,
                    exchange=exchange,
                    before=before,
                    said=(*self._past, exchange),
                    columns=columns,
                    keys=keys,
                    system=self._system,
                    reply=reply,
                    codec=codec,
                    seat=seat,
                    start=Start(task.text, task.audio, position, self.settings, key, None, selection, options.logprobs),
                    release=held.pop_all().close,
                    clock=clock,
                    outlet=outlet,
                    hungry=self._engine.requests.wake,
                    fork=fork,
                    active=active,
                    pace=self._pace,
                    when_full=self._when_full,
                )
                if outlet.decodes and codec is not None and options.max_silence is None:  # silence is listened to here
                    running.coded = task.audio and is_portable(codec)
                if stream is not None:
                    stream.forget_peeked()
                    self._end_listening(stream)
                self._listen()
        return running

    def withdraw(self, number: int, taken: int) -> Ended | None:
        """Continue as if a question had not been asked."""
        running = self._close_answer(number, taken)
        if self._last is not None and self._last.number == number:
            self._withdraw(self._last)
        return None if running is None else running.end()

    def _withdraw(self, running: Running) -> None:
        with self._lock:
            if self._last is running:
                self._past, self._asked = running.before, running.exchange.number
                self._last = self.under_way = None
            running.settled = True
            self._engine.stop(running)
            self._listen()

    # --- the next question, while its sound comes ---------------------------------------------------------------------

    def listen(self, sound: int, task: str, turn: bool) -> None:
        """Listen to the next question, under a number; with `turn` to where it ends, too."""
        with self._lock:
            self._open()
            if self._hears is not None:
                self._hears.closed = True
            put = self.link.turn(sound) if turn else None
            self._hears, self._sound_number = FeatureStream(self.model, task, put), sound
            self._listen()

    def stream(self, sound: Any) -> FeatureStream | None:
        """The sound that is listened to, where it has that number."""
        return self._hears if sound == self._sound_number else None

    def hear(self, sound: int, samples: Tensor, peek: bool) -> None:
        """Take more of it, or (`peek`) sound after that, which may not belong to it."""
        if (stream := self.stream(sound)) is not None:
            (stream.peek if peek else stream.push)(samples)
            if stream.due:
                self._engine.requests.wake()

    def sound_so_far(self, sound: int) -> tuple[int, Tensor]:
        """Number and features so far, for a question of another conversation; UserError where there are none."""
        if (stream := self.stream(sound)) is None:
            raise UserError("this sound is listened to no more; ask the question that it became")
        return stream.so_far()

    def drop_sound(self, sound: int) -> None:
        """Listen no more; waits for nobody."""
        if (stream := self.stream(sound)) is not None:
            stream.closed = True
            self._end_listening(stream)

    def _end_listening(self, sound: FeatureStream) -> None:
        seat, requests = self._seat, self._engine.requests
        if self._hears is not sound or seat is None:
            return
        self._hears = None
        with requests.lock:
            if seat in requests.listens and requests.listens[seat].stream is sound:
                del requests.listens[seat]

    def _listen(self) -> None:
        """Have what is heard of the next question fed behind the history, unless an answer is under way; the lock is held."""
        sound, seat = self._hears, self._seat
        if sound is not None and seat is not None:
            past = tuple(self._past) if self._last is None or self._last.settled else None
            self._engine.requests.listen(
                Listen(seat, sound, past, self._system, self.options.overflow == "forget", self._selection)
            )

    # --- its answer -----------------------------------------------------------------------------------------------

    def _answer(self, number: int) -> Running | None:
        """The answer under way, where it has that number."""
        running = self.under_way
        return running if running is not None and running.number == number else None

    def taken(self, number: int, taken: int, late: Sequence[float] = ()) -> None:
        """Count events as delivered, and note how late chunks were that another process decoded."""
        if (running := self._answer(number)) is not None:
            running.take(taken)
        self._engine.recorder.note(late=late)

    def stop(self, number: int, taken: int, reason: Reason, error: str | None) -> None:
        """End an answer whose listener waits for its end."""
        if (running := self._answer(number)) is not None:
            running.take(taken)
            running.stop(reason, error)

    def let_go(self, number: int, taken: int) -> None:
        """Settle an answer that nobody listens to, without waiting for anybody; where another thread is asking or cancelling,
        that one settles it."""
        if (running := self._close_answer(number, taken)) is None:
            return
        self._engine.stop(running, wait=False)
        if self._lock.acquire(blocking=False):
            try:
                self._settle(running, wait=False)
                self._make_room()
            finally:
                self._lock.release()

    def settle(self, number: int, taken: int, played: float | None = None, shown: int | None = None) -> Ended | None:
        """Put an answer into the history as far as it was taken, or cut the last one there once more where less of it was heard
        or seen, and prepare for the next question; returns its end where it was under way."""
        running = self._close_answer(number, taken)
        with self._lock:
            last = self._last
            if last is not None and last.number == number:
                last.delivery.interrupt(played, shown)
                if not last.settled:
                    self._settle(last)
                elif self._past and self._past[-1].number == last.exchange.number:  # else it broke
                    self._past[-1] = last.delivered()
                self._make_room()
        return None if running is None else running.end()

    def delivered(self, number: int) -> tuple[tuple[int, ...], Tensor | None, Logprobs | None]:
        """The delivered part of the last answer, where it has that number: ids of its text, its codes [A, F], and their
        log-probabilities where they were asked for."""
        running = self._last
        if running is None or running.number != number:
            return (), None, None
        turn = running.delivered().turn
        tokens, codes = tuple(turn.text or ()), turn.codes
        frames = 0 if codes is None else codes.shape[1]
        return tokens, codes, running.reply.logprobs(len(tokens), frames) if running.start.logprobs else None

    def _close_answer(self, number: int, taken: int) -> Running | None:
        """An answer that is under way no more; None where it was closed before, or was not asked yet."""
        self._gone = max(self._gone, number)
        if (running := self._answer(number)) is not None:
            running.take(taken)
            self.under_way = None
        return running

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

    # --- the history --------------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """See `omni.generate.session.Session`, as for the next ones."""
        last, waiting = self._last, self._engine.waiting
        return 0 if last is None or last not in waiting else waiting.index(last) + 1

    @property
    def history(self) -> list[Message]:
        return messages(self._past, self.tokenizer, self.codec)

    @property
    def last_answer(self) -> Message | None:
        past = self._past
        return messages(past[-1:], self.tokenizer, self.codec)[1] if past else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        turns = [exchange.turn for exchange in self._past]
        return tuple(replace(turn, system=None if number else self._system) for number, turn in enumerate(turns))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the history as one file, without an answer under way."""
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

    def _make_room(self) -> None:
        """Have what stays fed before the next question, where turns go before it; the history keeps them until then."""
        if self._hears is not None:
            self._listen()
        if self._seat is None or self._hears is not None or self.options.overflow != "forget":
            return
        refill = plan(self.model.layout, self._seat, self._past, self._system, self._selection)
        if refill is not None:
            self._engine.requests.refill(refill)

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
            self.abandon()  # its history can still be read

    def abandon(self) -> None:
        """Free what it holds, where nobody has its session any more; waits for nobody."""
        seat, self._seat, self.under_way = self._seat, None, None
        if seat is None:
            return
        if self._hears is not None:
            self._hears.closed = True
        requests = self._engine.requests
        with requests.lock:  # the slot is freed at the next step's boundary; what is left of an answer is cancelled
            requests.listens.pop(seat, None)
            requests.vacated.append(seat)
            requests.seats.discard(seat)
        requests.wake()
        self._release()


class LocalLink(Link):
    """To an engine in this process: each message is a method of a conversation, or reads a property of it.
    Conversations, answers and sounds have the link's numbers.

    Args:
        lm: the `omni.generate.speech_lm.SpeechLM` that makes conversations.
    """

    every, remote = 1, False

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.conversations: dict[int, Conversation] = {}
        self._lm = lm

    def add(self, number: int, conversation: Conversation) -> None:
        """Take messages for a conversation."""
        conversation.link, self.conversations[number] = self, conversation

    def listener(self, answer: int) -> EventOutlet:
        """Takes an answer's events."""
        return self.answers[answer]

    def turn(self, sound: int) -> Callable[[int, Tensor], None]:
        """Takes the turn head's probabilities of a sound."""
        return self.turns[sound].put

    def check(self, session: int) -> None:
        self.request("check", session)

    def request(self, name: str, *args: Any) -> Any:
        """See `Link`; in any thread. The conversation's number comes first among the arguments."""
        number, *rest = args
        if name == "session":
            return self.add(number, self._lm.conversation(**rest[0]))
        if number not in self.conversations:
            raise UserError("this session is closed; start a new one")
        conversation = self.conversations[number]
        if name == "abandon":
            del self.conversations[number]
        wanted = getattr(conversation, name)
        return wanted(*rest) if callable(wanted) else wanted

    tell = request
