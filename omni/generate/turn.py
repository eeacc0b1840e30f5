"""An answer under way: turns written columns into text and sound, and keeps its timings and its delivered part.

Dimensions: K streams, A audio streams, F frames.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.generate.heard import Loudness, heard_characters
from omni.generate.history import Exchange, Key
from omni.generate.results import AudioChunk, Clock, Reason, TextDelta, Timings
from omni.generate.rows import RunnerRow, StepOutput
from omni.generate.speech_time import CharacterReader, SpeechTime
from omni.generate.stop import StopText
from omni.layout import Layout
from omni.tasks import Columns, Task, find_task
from omni.text import Tokenizer

N = TypeVar("N", int, float)


@dataclass(eq=False)
class Running:
    """The turn that is being answered, or that was answered last.

    Attributes:
        exchange: the question.
        before: the conversation before it was asked.
        columns, keys: the whole conversation up to the end of the question.
        reply: the answer written so far.
        key: key of the random draws.
        rows: the answer's rows, the speaking one first; none before it has started.
        busy: whether a thread, `worker`, works on it at present.
        cancelled, settled: whether it is to stop; whether it is in the history.
        characters, samples: number handed over so far.
        loudness: loudness of the sound that was handed over.
        played, shown: seconds that were heard and characters that were seen, where an interruption gave them.
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
    rows: list[RunnerRow] = field(default_factory=list)
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
        """Mark that work starts or continues."""
        self.busy, self.worker = True, threading.get_ident()
        self.clock.go_on()

    def hold(self) -> None:
        """Mark that work pauses while the caller has an event, or is over."""
        self.clock.hold()
        self.busy = False

    def count(self, event: TextDelta | AudioChunk) -> None:
        """Count an event that is being handed over."""
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
        """Note that less was heard and seen than was handed over; the least of several notes counts."""
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

        Where an interruption gave the seconds played, the text is cut to the words that were heard; where it gave the
        characters shown, to those.
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
        """Number of characters heard, by the alignment of `omni.generate.heard`; all where there was no interruption."""
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


NOT_FINITE = (
    "the model's logits are not finite numbers at time step {} of this answer, so it was dropped: leave out the adapter or the "
    "edit that acts on it, load the model in float32, or fetch the weights again"
)
"""Text of the error of an answer that broke at that time step."""


HALF = "\N{REPLACEMENT CHARACTER}"
"""The character that decoding gives for the first bytes of a character whose last bytes are still to come."""


class TextStream:
    """Turns token ids into text piece by piece; the pieces, joined, are the decoded whole.

    A piece is decoded together with the one before it, because some tokenizers write a token differently at
    the beginning; a character spread over several tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._given: list[int] = []  # number of characters returned with and before each id
        self._context = 0  # first id of the context that is decoded together with new ones
        self._shown = 0  # number of ids whose text has been returned

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is now known, maybe none."""
        self.ids.append(token)
        text = self._next(whole=True)
        self._given.append(len(text) + (self._given[-1] if self._given else 0))
        return text

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._next(whole=False)

    def _next(self, whole: bool) -> str:
        text = self.tokenizer.decode(self.ids[self._context :])
        if self._shown == len(self.ids) or (whole and text.endswith(HALF)):
            return ""
        old = self.tokenizer.decode(self.ids[self._context : self._shown])
        self._context, self._shown = self._shown, len(self.ids)
        return text[len(old) :]

    def tokens_of(self, characters: int) -> int:
        """Number of tokens whose text has at most that many characters."""
        count = min(bisect_right(self._given, characters), len(self.ids))  # further tokens gave further characters
        while count and len(self.tokenizer.decode(self.ids[:count])) > characters:
            count -= 1
        return count


class Reply:
    """One answer as far as it has been written.

    Args:
        max_frames: number of frames after which a spoken answer is cut.
        max_columns: number of time steps after which any answer is cut.
        stop: texts that end the answer; its text ends before them.
        time: speaking time of the model's voice.

    Attributes:
        columns: all columns written, K ids each.
        frames: finished frames, A codes each.
        text: the text written; `text.ids` are its tokens.
        reason: reason for the answer's end, None while it continues.
        error: the error that broke it, where the reason is `error`.
    """

    def __init__(
        self,
        layout: Layout,
        task: Task,
        tokenizer: Tokenizer,
        codec: AudioCodec | None,
        *,
        max_frames: int,
        max_columns: int,
        stop: Sequence[str] = (),
        time: SpeechTime | None = None,
    ) -> None:
        self.layout, self.task = layout, task
        self.max_frames, self.max_columns = max_frames, max_columns
        self.columns: list[tuple[int, ...]] = []
        self.frames: list[list[int]] = []
        self.text = TextStream(tokenizer)
        self.reason: Reason | None = None
        self._stop = StopText(stop)
        self.error: str | None = None
        self._codec = codec
        self._sound = codec.stream() if codec is not None and task.audio else None
        self._sample_rate = codec.sample_rate if codec is not None else 0
        self._samples = 0  # returned so far
        self.time, self._reader, self._said = time or SpeechTime(), CharacterReader(), 0.0

    def write(self, written: StepOutput) -> list[TextDelta | AudioChunk]:
        """Take a step's output; returns the text and the sound that became known with it."""
        events: list[TextDelta | AudioChunk] = []
        if self.reason is not None:  # this step was under way when the answer ended
            return events
        if written.broken:
            self.fail(NOT_FINITE.format(len(self.columns)))
            return events
        self.columns.append(written.column)
        full = written.frame is not None and len(self.frames) == self.max_frames
        if written.done:
            self.reason = "end"
        elif full or len(self.columns) >= self.max_columns:
            self.reason = "length"
        with self.decoding():
            if written.text is not None:
                self._say(events, self._stop.push(self.text.push(written.text)))
            else:  # the text has ended: nothing completes what was held back
                self._say(events, self._stop.finish())
        if written.frame is not None and not full:
            self.frames.append(written.frame)
            if self._sound is not None:
                with self.decoding(self._codec):
                    self._play(events, self._sound.push(torch.tensor(written.frame)[:, None]))
        return events

    def fail(self, error: str) -> None:
        """End the answer with an error."""
        self.reason, self.error = "error", error

    @contextmanager
    def decoding(self, codec: AudioCodec | None = None) -> Iterator[None]:
        """Turn exceptions while text is decoded (or sound, by a codec) into the error of this answer alone; only a lack of
        memory is raised."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if codec is None:
                self.fail(f"the answer's text cannot be decoded ({error}); is it the model's own tokenizer?")
            else:
                self.fail(f"codec {codec.name} cannot decode the answer ({error}); generate_batch(sound=False) gives its codes")

    def finish(self) -> list[TextDelta | AudioChunk]:
        """Returns the text and sound that were held back until the end was known."""
        events: list[TextDelta | AudioChunk] = []
        with self.decoding():
            self._say(events, self._stop.push(self.text.finish()) + self._stop.finish())
        if self._sound is not None:
            with self.decoding(self._codec):
                self._play(events, self._sound.finish())
        return events

    def codes(self, frames: int | None = None) -> Tensor | None:
        """The first frames (all by default), [A, F]; None where the task does not speak."""
        if not self.task.audio:
            return None
        chosen = self.frames[:frames]
        return torch.tensor(chosen).T if chosen else torch.zeros(self.layout.n_audio, 0, dtype=torch.long)

    def _say(self, events: list[TextDelta | AudioChunk], text: str) -> None:
        if self._stop.found:  # of the text's tokens only those before the stop string stay
            self.reason = "stop"
            del self.text.ids[self.text.tokens_of(self._stop.characters) :]
        if text and self.task.audio:
            start = self._said
            self._said += sum(self.time.durations(text, self._reader))
            events.append(TextDelta(text, start, self._said))
        elif text:
            events.append(TextDelta(text))

    def _play(self, events: list[TextDelta | AudioChunk], samples: Tensor) -> None:
        if len(samples):
            start, self._samples = self._samples, self._samples + len(samples)
            rate = self._sample_rate
            events.append(AudioChunk(samples.cpu(), start=start / rate, end=self._samples / rate))
