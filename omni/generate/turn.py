"""An answer under way: what of it has been handed over, how long that took, and what counts as delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from omni.codec.base import AudioCodec
from omni.generate.heard import Loudness, heard_characters
from omni.generate.history import Exchange, Key
from omni.generate.reply import Reply
from omni.generate.results import AudioChunk, Clock, TextDelta, Timings
from omni.generate.rows import Row
from omni.tasks import Columns, Task, find_task

N = TypeVar("N", int, float)


@dataclass(eq=False)
class Running:
    """A turn that is being answered, or was the last to be.

    Attributes:
        exchange: the question.
        before: the conversation before it was asked.
        columns, keys: the whole conversation up to the end of the question.
        reply: what has been written.
        key: of the random draws.
        rows: the answer's rows, the speaking one first; none before it has begun.
        busy: some thread is at work on it just now: `worker`.
        cancelled, settled: it is to stop; it is in the history.
        characters, samples: handed over so far.
        loudness: of the sound that was handed over.
        played, shown: seconds that were heard and characters that were seen, where an interruption said so.
        release: called when it is settled; its adapter may be removed from then on.
    """

    exchange: Exchange
    before: list[Exchange]
    columns: Columns
    keys: list[Key]
    reply: Reply
    codec: AudioCodec | None
    clock: Clock
    key: int
    encode: float
    release: Callable[[], None]
    prefill: float = 0.0
    rows: list[Row] = field(default_factory=list)
    busy: bool = False
    worker: int = 0
    cancelled: bool = False
    settled: bool = False
    characters: int = 0
    samples: int = 0
    loudness: Loudness | None = None
    first_text: float | None = None
    first_audio: float | None = None
    played: float | None = None
    shown: int | None = None

    @property
    def task(self) -> Task:
        return find_task(self.exchange.turn.task)

    def go_on(self) -> None:
        """Work starts, or goes on."""
        self.busy, self.worker = True, threading.get_ident()
        self.clock.go_on()

    def hold(self) -> None:
        """Work pauses while someone looks at an event, or is over."""
        self.clock.hold()
        self.busy = False

    def count(self, event: TextDelta | AudioChunk) -> None:
        """An event is being handed over."""
        if isinstance(event, TextDelta):
            self.characters += len(event.text)
            self.first_text = self.first_text or self.clock.seconds
        else:
            self.samples += len(event.samples)
            if self.codec is not None:
                self.loudness = self.loudness or Loudness(self.codec.sample_rate)
                self.loudness.push(event.samples)
            self.first_audio = self.first_audio or self.clock.seconds

    def interrupt(self, played: float | None, shown: int | None) -> None:
        """Less than was handed over was heard and seen; the least that was ever said counts."""
        self.played, self.shown = _least(self.played, played), _least(self.shown, shown)

    def timings(self) -> Timings:
        return Timings(
            encode=self.encode,
            prefill=self.prefill,
            first_text=self.first_text,
            first_audio=self.first_audio,
            total=self.clock.seconds,
            steps=len(self.reply.columns),
            audio=self.samples / self.codec.sample_rate if self.codec is not None else 0.0,
        )

    def delivered(self) -> Exchange:
        """The exchange with the part of the answer that reached the listener: whole tokens and whole frames.

        Where an interruption said how much was played, the text is cut to the words that were heard; where it said how much was
        shown, to that.
        """
        reply, frames = self.reply, len(self.reply.frames)
        if self.codec is not None:
            frames = min(frames, self.samples // self.codec.frame_samples)
            if self.played is not None:
                frames = min(frames, int(self.played * self.codec.frame_rate + 1e-6))
        characters = min(self.characters, self._heard() if self.shown is None else self.shown)
        text = tuple(reply.text.ids[: reply.text.tokens_of(characters)]) if self.task.text else None
        whole = reply.reason == "end" and frames == len(reply.frames) and (text is None or len(text) == len(reply.text.ids))
        return replace(self.exchange, turn=replace(self.exchange.turn, text=text, codes=reply.codes(frames), cut=not whole))

    def _heard(self) -> int:
        """Characters of the text that were heard, by the placement of `omni.generate.heard`; all where nothing says less."""
        reply, codec = self.reply, self.codec
        if self.played is None or codec is None or not (self.task.text and self.task.audio):
            return self.characters
        speech = self.loudness.speech() if self.loudness is not None else []
        end = None
        if reply.reason == "end":  # silence after the last word is known when all of the sound was handed over
            whole = self.samples == len(reply.frames) * codec.frame_samples
            end = speech[-1][1] if whole and speech else len(reply.frames) / codec.frame_rate
        played = min(self.played, self.samples / codec.sample_rate)
        text = reply.text.tokenizer.decode(reply.text.ids)
        return heard_characters(text, reply.time, played, speech, end)


def _least(a: N | None, b: N | None) -> N | None:
    return b if a is None else a if b is None else min(a, b)
