"""What of an answer has reached its listener: the events that were taken, less what an interruption says was not heard."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from omni.codec.base import AudioCodec
from omni.engine.coded import CodedSound
from omni.generate.heard import Loudness, heard_characters
from omni.generate.history import Exchange
from omni.generate.results import AudioChunk, Ended, Event, TextDelta
from omni.generate.turn import Reply
from omni.tasks import find_task

N = TypeVar("N", int, float)


class Delivery:
    """Counts what a listener takes of one answer; guarded by `changed` of its `omni.engine.client.Running`.

    Attributes:
        samples: number of samples handed over.
    """

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
        else:
            self._sound(event)

    def _sound(self, chunk: AudioChunk) -> None:
        self.samples += len(chunk.samples)
        if self._codec is not None:
            self._loudness = self._loudness or Loudness(self._codec.sample_rate)
            self._loudness.push(chunk.samples)

    def interrupt(self, played: float | None, shown: int | None) -> None:
        """Note that less was heard and seen than was handed over; the least of several notes counts."""
        self._played, self._shown = _least(self._played, played), _least(self._shown, shown)

    def measure(self) -> None:
        """Decode what was decoded elsewhere, where an interruption asks what was heard of it. `changed` need not be held, since
        the answer has been stopped."""
        if self._codec is not None and self.samples and self._played is not None and self._loudness is None:
            loudness, codes = Loudness(self._codec.sample_rate), self._reply.codes(self.samples // self._codec.frame_samples)
            if codes is not None:
                loudness.push(self._codec.decode(codes))
            self._loudness = loudness

    @property
    def seconds(self) -> float:
        """Length of the sound that was handed over."""
        return self.samples / self._codec.sample_rate if self._codec is not None else 0.0

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
        """Number of characters heard, by the alignment of `omni.generate.heard`."""
        reply, speech = self._reply, self._loudness.speech() if self._loudness is not None else []
        end = None
        if self._finished and reply.reason == "end":  # the silence after the last word is known, too
            end = speech[-1][1] if speech else len(reply.frames) / codec.frame_rate
        played = min(played, self.samples / codec.sample_rate)
        text = reply.text.tokenizer.decode(reply.text.ids[: reply.tokens_by(self._step)])
        return heard_characters(text, reply.time, played, speech, end)


def _least(a: N | None, b: N | None) -> N | None:
    return b if a is None else a if b is None else min(a, b)
