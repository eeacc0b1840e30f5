"""An answer under way, as the engine makes it.

The stepping thread owns the rows and counts what they wrote; the sound thread turns it into events, which `Running.put` sends
to an outlet: the listener (`omni.engine.listener`), or the pipe to the process where it is. The listener tells how many it has
taken: those are delivered. What the threads share is guarded by `changed`. Nobody waits for a listener: one that does not
read lets its row rest once it is `AHEAD` time steps behind; the row of a live one goes on, and ends once `UNREAD` seconds are
left unread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, get_args

from torch import Tensor

from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.history import CachedHistory, Exchange, Key, lay_out
from omni.generate.results import AudioChunk, Clock, Ended, Event, Reason, Reply, TextDelta, Timings
from omni.generate.rows import RunnerRow, Start
from omni.generate.speech_time import Loudness, heard_characters
from omni.layout import Layout
from omni.lora.attach import Selection
from omni.tasks import Columns, Task, find_task


class CodedSound(NamedTuple):
    """The next frames of an answer, A codes each; an `AudioChunk` once its listener's process has decoded them. `start`, `end`:
    where they are in the answer's sound, in seconds."""

    codes: list[list[int]]
    start: float
    end: float


@dataclass(eq=False)
class Seat:
    """A conversation's claim to a slot of the cache.

    Attributes:
        limit: positions that it may fill.
        slot: its slot, None while it has none.
        held: its columns in the slot.
        busy: whether an answer of it is under way; such a seat keeps its slot.
        used: when it was, by `time.perf_counter`.
    """

    limit: int
    slot: int | None = None
    held: CachedHistory = field(default_factory=CachedHistory)
    busy: bool = False
    used: float = 0.0


class Delivery:
    """Counts what a listener takes of one answer; guarded by `changed` of its `Running`. `samples`:
    number of samples handed over."""

    def __init__(self, reply: Reply, codec: AudioCodec | None) -> None:
        self.samples = 0
        self._reply, self._codec = reply, codec
        self._characters = 0
        self._step = 0  # time step of the last event that was taken
        self._finished = False  # whether that was the end
        self._played: float | None = None  # seconds that were heard, and characters that were seen, at an interruption
        self._shown: int | None = None
        self._loudness: Loudness | None = None

    def take(self, step: int, event: Event | CodedSound) -> None:
        """Count an event of a time step."""
        self._step = step
        if isinstance(event, Ended):
            self._finished = True
        elif isinstance(event, TextDelta):
            self._characters += len(event.text)
        elif isinstance(event, CodedSound):
            assert self._codec is not None
            self.samples += len(event.codes) * self._codec.frame_samples
        elif isinstance(event, AudioChunk):
            self.samples += len(event.samples)
            if self._codec is not None:
                self._loudness = self._loudness or Loudness(self._codec.sample_rate)
                self._loudness.push(event.samples)

    def interrupt(self, played: float | None, shown: int | None) -> None:
        """Note that less was heard and seen than was handed over; the least of several notes counts."""
        self._played = min((each for each in (self._played, played) if each is not None), default=None)
        self._shown = min((each for each in (self._shown, shown) if each is not None), default=None)

    def measure(self) -> None:
        """Decode what was decoded elsewhere, where an interruption asks what was heard of it. `changed` need not be held, since
        the answer has been stopped."""
        if self._codec is not None and self.samples and self._played is not None and self._loudness is None:
            loudness, codes = Loudness(self._codec.sample_rate), self._reply.codes(self.samples // self._codec.frame_samples)
            if codes is not None:
                loudness.push(self._codec.decode(codes))
            self._loudness = loudness

    def of(self, exchange: Exchange) -> Exchange:
        """The exchange with the part of the answer that reached the listener: whole tokens and whole frames.

        Where an interruption gave the seconds played, the text is cut to the words that were heard; where it gave the
        characters shown, to those.
        """
        reply, task, frames = self._reply, find_task(exchange.turn.task), len(self._reply.frames)
        if self._codec is not None:
            frames = min(frames, self.samples // self._codec.frame_samples)
            if self._played is not None:
                frames = min(frames, int(self._played * self._codec.frame_rate + 1e-6))
        characters = self._characters
        if self._shown is not None:
            characters = min(characters, self._shown)
        elif self._played is not None and self._codec is not None and task.text and task.audio:
            characters = min(characters, self._heard(self._played, self._codec))
        count = min(reply.text.tokens_of(characters), reply.tokens_by(self._step))  # however far ahead it was written
        text = tuple(reply.text.ids[:count]) if task.text else None
        whole = reply.reason == "end" and frames == len(reply.frames)
        whole = whole and (text is None or len(text) == len(reply.text.ids))
        turn = replace(exchange.turn, text=text, codes=reply.codes(frames), cut=not whole)
        return replace(exchange, turn=turn)

    def _heard(self, played: float, codec: AudioCodec) -> int:
        """Number of characters heard, by the alignment of `omni.generate.speech_time`."""
        reply, speech = self._reply, self._loudness.speech() if self._loudness is not None else []
        end = None
        if self._finished and reply.reason == "end":  # the silence after the last word is known, too
            end = speech[-1][1] if speech else len(reply.frames) / codec.frame_rate
        played = min(played, self.samples / codec.sample_rate)
        text = reply.text.tokenizer.decode(reply.text.ids[: reply.tokens_by(self._step)])
        return heard_characters(text, reply.time, played, speech, end)


AHEAD = 64
"""Time steps that may be written ahead of an iterator's reader."""

UNREAD = 10.0
"""Seconds of sound that a live listener may leave unread before its answer ends, where the engine has no `patience`."""

Pace = Literal["read", "live", "whole"]
"""How a listener takes an answer: as it reads; as sound that plays from its first sample on; or whole, however large."""

WhenFull = Literal["wait", "refuse"]
"""Policy for a live listener's question while another row would make sound late: it waits for its turn, or is refused."""


def check_pace(pace: Pace, when_full: WhenFull) -> tuple[Pace, WhenFull]:
    """Both; UserError for one that is unknown."""
    for name, value, known in (("pace", pace, get_args(Pace)), ("when_full", when_full, get_args(WhenFull))):
        if value not in known:
            raise UserError(f"{name} {value!r} is unknown; use {', '.join(map(repr, known))}")
    return pace, when_full


def milestone(known: Timings, event: Event | CodedSound, seconds: float) -> Timings:
    """The timings with the milestone that an event is, where it is the first of its type."""
    if isinstance(event, TextDelta) and known.first_text is None:
        return replace(known, first_text=seconds)
    if isinstance(event, (AudioChunk, CodedSound)) and known.first_audio is None:
        return replace(known, first_audio=seconds)
    return known


def lateness(plays: float | None, start: float) -> tuple[float, float | None]:
    """When a live listener's sound began to play, less the time in which it waited, and the seconds by which the chunk at
    `start` comes after it was due; None for the first (`plays` is None), which is due when it comes."""
    now = time.perf_counter()
    if plays is None:
        return now, None
    late = now - (plays + start)
    return plays + max(late, 0.0), late


class EventOutlet(Protocol):
    """Takes the events of an answer: a `Listener`, or in the engine's process what sends them to one. `decodes`: takes sound as
    codes; `changed`: guards the answer."""

    decodes: bool
    changed: threading.Condition

    def put(self, event: Event | CodedSound, notify: bool = True) -> None:
        """Take an event."""

    def fail(self, error: BaseException) -> None:
        """Raise an exception for the listener, after the events so far."""

    def notify(self) -> None:
        """Wake the listener, for events that did not."""

    def where(self) -> None:
        """Have the listener tell how far it is; its row rests until it has taken more."""


@dataclass(eq=False)
class Running:
    """The turn that is being answered, or that was answered last.

    Attributes:
        number: of the session's link; exchange: the question; before: the conversation before it was asked.
        said: the exchanges of `columns`, of which some may wait for the encoder.
        columns, keys: the whole conversation up to the end of the question, after the system message of the ids `system`.
        outlet: takes its events.
        fork: last column [K] of the second row of text assist, None without one.
        active: adapters and edits of its question's encoder and prefill.
        release: called when its rows are free; its adapter may be removed from then on.
        cancelled, settled: whether it is to stop; whether it is in the history.
        submitted: the engine has its question; over: `Ended` is among its events.
        slots, rows: the speaking one first; the second leaves when its text has ended. Of the stepping thread, as are
        wrote, frames: the columns that the speaking row wrote, and the number of frames among them; `exact`, of those whose
            samples no later frame changes.
        known: the seconds of the milestones that it has passed.
        read: number of time steps whose events were taken; `taken`, number of those events.
        left: set once its rows are free, or it needs none.
        resting: its row waits for a listener that is behind, since `rested`.
        hungry: called when a listener that was behind has read.
        live: whether somebody hears it as it comes; `frame_rate` of its sound, 0 without a codec.
        plays: when a live listener's sound began, by `time.perf_counter`, less the time in which it waited.
        coded: its sound goes to another process as codes.
    """

    number: int
    exchange: Exchange
    before: list[Exchange]
    said: Sequence[Exchange]
    columns: Columns
    keys: list[Key]
    reply: Reply
    codec: AudioCodec | None
    seat: Seat
    start: Start
    release: Callable[[], None]
    clock: Clock
    outlet: EventOutlet
    hungry: Callable[[], None]
    system: Sequence[int] = ()
    fork: Tensor | None = None
    active: Selection | None = None
    pace: Pace = "read"
    when_full: WhenFull = "wait"
    cancelled: bool = False
    ending: Reason = "cancelled"
    settled: bool = False
    submitted: bool = False
    over: bool = False
    slots: list[int] = field(default_factory=list)
    rows: list[RunnerRow] = field(default_factory=list)
    wrote: list[tuple[int, ...]] = field(default_factory=list)
    frames: int = 0
    exact: float = 0.0
    processed: int = 0
    read: int = 0
    taken: int = 0
    resting: bool = False
    rested: float = 0.0
    known: Timings = Timings()  # noqa: RUF009 (frozen)
    plays: float | None = None
    coded: bool = False
    failure: BaseException | None = None
    left: threading.Event = field(default_factory=threading.Event)
    delivery: Delivery = field(init=False)
    _sent: deque[tuple[int, Event | CodedSound]] = field(default_factory=deque)  # and not taken, each with its time step

    def __post_init__(self) -> None:
        self.delivery, self.changed = Delivery(self.reply, self.codec), self.outlet.changed
        self.task: Task = find_task(self.exchange.turn.task)
        self.frame_rate = 0.0 if self.codec is None else self.codec.frame_rate
        self.live = self.codec is not None and self.task.audio and self.pace == "live"

    @property
    def ahead(self) -> int:
        """Time steps that were written and not read yet."""
        return len(self.wrote) - self.read

    def rest(self) -> bool:
        """Mark that its row waits for its listener, whose time does not count; returns whether that is known.

        The stepping thread waits for no listener: whoever holds `changed` may be a signal's handler that waits for it.
        """
        if self.resting or not self.changed.acquire(blocking=False):
            return self.resting
        try:
            if self.ahead >= AHEAD:
                self.resting, self.rested = True, time.perf_counter()
                self.clock.hold()
                self.outlet.where()
            return self.resting
        finally:
            self.changed.release()

    def _mark(self) -> None:
        """Note how far the listener has read."""
        self.read = self._sent[0][0] - 1 if self._sent else self.processed
        if self.resting and self.ahead < AHEAD // 2:
            self.resting = False
            self.clock.go_on()
            self.hungry()

    # --- the sound thread ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Note that the output of a time step was turned into events; `changed` is held."""
        self.processed += 1
        if not self._sent:
            self._mark()

    def put(self, event: Event | CodedSound, notify: bool = True) -> float | None:
        """Give the listener an event; `changed` is held. Returns by how many seconds a live listener's sound was late."""
        late, self.known = None, milestone(self.known, event, self.clock.seconds)
        if isinstance(event, (AudioChunk, CodedSound)) and self.pace == "live":
            self.plays, late = lateness(self.plays, event.start)
        elif isinstance(event, Ended):
            self.over, self.known = True, replace(self.known, total=self.clock.seconds)
            event = replace(event, timings=self.timings())
        self._sent.append((self.processed, event))
        self.outlet.put(event, notify)
        return late

    def lay_out(self, layout: Layout) -> None:
        """Lay its columns out again, where a head `tokens` has read fewer features than a question has room for."""
        *past, asked = self.said
        if self.columns.features == tuple(len(e.features) for e in self.said if e.features is not None):
            return
        self.columns, self.keys = lay_out(layout, past, asked, self.system)
        self.start = replace(self.start, position=len(self.keys) - 1)

    def fail(self, error: BaseException) -> None:
        """Raise an exception for the listener, instead of an end."""
        with self.changed:
            self.failure = error
            self.outlet.fail(error)

    # --- what the listener asks for -----------------------------------------------------------------------------------

    def take(self, taken: int) -> None:
        """Count events as delivered, up to the number `taken`; none of an answer that was stopped."""
        with self.changed:
            while self.taken < taken and self._sent and not self.cancelled:
                self.taken += 1
                self.delivery.take(*self._sent.popleft())
            self._mark()

    def stop(self, reason: Reason = "cancelled", error: str | None = None) -> None:
        """Mark it as cancelled: its listener gets nothing more of it but an end for this reason."""
        with self.changed:
            self._sent.clear()
            if not self.cancelled:
                self.cancelled, self.ending = True, reason
                if error is not None:
                    self.reply.fail(error)
                self.outlet.put(self.end())

    def end(self) -> Ended:
        """The end of an answer that was stopped."""
        error = self.reply.error
        return Ended(self.ending if error is None else "error", self.timings(), error)

    def timings(self) -> Timings:
        total, codec = self.known.total or self.clock.seconds, self.codec
        audio = 0.0 if codec is None else self.delivery.samples / codec.sample_rate
        return replace(self.known, total=total, steps=len(self.reply.columns), audio=audio)

    def delivered(self) -> Exchange:
        """The exchange with the part of the answer that reached the listener."""
        self.delivery.measure()  # takes as long as a step; the sound thread does not wait for it
        with self.changed:
            return self.delivery.of(self.exchange)
