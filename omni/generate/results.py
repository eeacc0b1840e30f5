"""Results of generation: events while an answer is made, the whole answer, and an answer as far as it has been written, which
turns columns into text and frames, and frames' sound into chunks.

Dimensions: K streams, A audio streams, F frames, S samples.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from omni.audio.wav import write_audio
from omni.codec.base import AudioCodec
from omni.errors import UserError, brief, quoted
from omni.generate.options import Limits
from omni.generate.rows import StepOutput
from omni.generate.speech_time import CharacterReader, Loudness, SpeechTime
from omni.layout import Layout
from omni.tasks import Task
from omni.text import Tokenizer

Reason = Literal["end", "stop", "silence", "length", "cache", "cancelled", "error"]
"""Reason for an answer's end: the model ended it, a stop string was written, its sound was silent for too long, a limit was
reached, the cache is full, it was cancelled, or an error occurred."""


@dataclass(frozen=True)
class Timings:
    """Seconds from the question to each milestone. The time for which a consumer keeps an event is left out.

    Attributes:
        encode: the spoken question's features are there; prefill: the question is in the cache.
        first_text, first_audio: the first text and the first samples were handed over; None where there was none.
        steps: number of time steps written.
        audio: length of the answer's sound, in seconds.
    """

    encode: float = 0.0
    prefill: float = 0.0
    first_text: float | None = None
    first_audio: float | None = None
    total: float = 0.0
    steps: int = 0
    audio: float = 0.0

    @property
    def real_time_factor(self) -> float | None:
        """Total over the length of the sound: below 1 is faster than it plays. None without sound."""
        return self.total / self.audio if self.audio else None


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer's text; the pieces, joined, are the text. `start`, `end`: when it is spoken, in seconds of the
    answer's sound, estimated by the model's speaking time: text is written ahead of its sound. None where the answer is not
    spoken."""

    text: str
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """The next samples [S] of the answer, exact: no later frame changes them. `start`, `end`: where they are in the answer's
    sound, in seconds."""

    samples: Tensor
    start: float = 0.0
    end: float = 0.0

    __repr__ = brief


@dataclass(frozen=True)
class Ended:
    """The last event of an answer. `error`: what happened and what to do, where the reason is `error`; what was handed over
    before is then no answer, and the conversation continues as if the question had not been asked."""

    reason: Reason
    timings: Timings
    error: str | None = None


Event = TextDelta | AudioChunk | Ended


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural logarithms of the probabilities that the model gave what it wrote: over the ids that a stream may take, before
    repetition penalty, temperature, top-k and top-p.

    Attributes:
        text: of each of the answer's `tokens`.
        codes: of each of its `codes`, [A, F] float32; None where the task does not speak.
    """

    text: tuple[float, ...]
    codes: Tensor | None


@dataclass(frozen=True, eq=False)
class Answer:
    """A whole answer.

    Attributes:
        text: the written text, "" where the task writes none.
        audio: the sound, [S] at `sample_rate`; None where nothing is spoken or there is no codec.
        sample_rate: of the codec, in Hz (0 without one).
        tokens: ids of the text.
        codes: the frames, [A, F]; None where the task does not speak.
        ended: reason for the end.
        error: what happened and what to do, where `ended` is `error`; the other fields hold what was made before.
        logprobs: of tokens and codes, where they were asked for.
    """

    text: str
    audio: Tensor | None
    sample_rate: int
    tokens: tuple[int, ...]
    codes: Tensor | None
    timings: Timings
    ended: Reason
    error: str | None = None
    logprobs: Logprobs | None = None

    def __repr__(self) -> str:
        sound = "None" if self.audio is None else f"{len(self.audio) / self.sample_rate:.2f} s at {self.sample_rate} Hz"
        return f"Answer(text={quoted(self.text)}, audio={sound}, ended={self.ended!r})"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the sound as WAV, FLAC, OGG or MP3, by the path's suffix; the file appears when it is whole. Returns the
        path. UserError: there is no sound, or it cannot be written there."""
        if self.audio is None:
            why = "its task only writes" if self.codes is None else "no codec made sound of its codes (it is missing)"
            raise UserError(f"this answer has no sound to save in {os.fspath(path)!r}: {why}; its text is in .text")
        if not len(self.audio):
            raise UserError(f"this answer's sound has no samples to save in {os.fspath(path)!r}: nothing was spoken")
        return write_audio(path, self.audio, self.sample_rate)


class Clock:
    """A stopwatch that can be paused; it begins with the seconds that have passed already."""

    def __init__(self, passed: float = 0.0) -> None:
        self._since: float | None = time.perf_counter()
        self._sum = passed

    def hold(self) -> None:
        self._sum, self._since = self.seconds, None

    def go_on(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._sum if self._since is None else self._sum + time.perf_counter() - self._since


# --- an answer as it is written ---------------------------------------------------------------------------------------


class StopText:
    """Returns a text, piece by piece, up to its first stop string.

    Characters that may begin one are held back. `stopped`: it came."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece; returns the text that is now certain, maybe none."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        offsets = [offset for offset in map(text.find, self.stops) if offset >= 0]
        if offsets:
            self.stopped = True
            return text[: min(offsets)]
        begun = (n for n in range(len(text)) if any(stop.startswith(text[n:]) for stop in self.stops))
        certain = next(begun, len(text))
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Returns the text that was held back, when no more can follow."""
        text, self._held = self._held, ""
        return text


NOT_FINITE = (
    "the model's logits are not finite numbers at time step {} of this answer, so it was dropped: leave out the adapter or the "
    "edit that acts on it, load the model in float32, or fetch the weights again"
)
"""Text of the error of an answer that broke at that time step."""


class TextStream:
    """Turns token ids into text piece by piece; the pieces, joined, are the decoded whole.

    A piece is decoded together with the one before it, because some tokenizers write a token differently at
    the beginning; a character spread over several tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._returned: list[int] = []  # number of characters returned with and before each id
        self._context = 0  # first id of the context that is decoded together with new ones
        self._shown = 0  # number of ids whose text has been returned

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is now known, maybe none."""
        self.ids.append(token)
        text = self._next(whole=True)
        self._returned.append(len(text) + (self._returned[-1] if self._returned else 0))
        return text

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._next(whole=False)

    def _next(self, whole: bool) -> str:
        text = self.tokenizer.decode(self.ids[self._context :])
        half = text.endswith("\N{REPLACEMENT CHARACTER}")  # a character whose last bytes are still to come
        if self._shown == len(self.ids) or (whole and half):
            return ""
        old = self.tokenizer.decode(self.ids[self._context : self._shown])
        self._context, self._shown = self._shown, len(self.ids)
        return text[len(old) :]

    def tokens_of(self, characters: int) -> int:
        """Number of tokens whose text has at most that many characters."""
        count = min(bisect_right(self._returned, characters), len(self.ids))  # further tokens gave further characters
        while count and len(self.tokenizer.decode(self.ids[:count])) > characters:
            count -= 1
        return count


class Reply:
    """One answer as far as it has been written.

    Attributes:
        columns: all columns written, K ids each; frames: finished frames, A codes each.
        reason: reason for the answer's end, None while it continues.
        error: the error that broke it, where the reason is `error`.
    """

    def __init__(
        self,
        layout: Layout,
        task: Task,
        tokenizer: Tokenizer,
        codec: AudioCodec | None,
        limits: Limits,
        time: SpeechTime | None = None,
    ) -> None:
        self.layout, self.task, self.limits = layout, task, limits
        self.columns: list[tuple[int, ...]] = []
        self.frames: list[list[int]] = []
        self.text = TextStream(tokenizer)
        self.reason: Reason | None = None
        self._stop = StopText(limits.stop)
        self.error: str | None = None
        self._sample_rate = codec.sample_rate if codec is not None else 0
        self._loudness = Loudness(codec.sample_rate) if codec is not None and limits.silence is not None else None
        self._logprobs: list[tuple[float, ...]] = []  # log-probabilities of each column, where they were asked for
        self._text_logprobs: list[float] = []
        self._frame_logprobs: list[list[float]] = []
        self._samples = 0  # returned so far
        self._tokens: list[int] = []  # number of tokens of text with each column
        self._characters, self._said = 0, 0.0  # returned so far, and the seconds that they take
        self.time, self._reader = time or SpeechTime(), CharacterReader()

    def write(self, written: StepOutput) -> list[Event]:
        """Take a step's output; returns the text that became known with it. A finished frame is added to `frames`."""
        if self.reason is not None:  # this step was under way when the answer ended
            return []
        if written.broken:
            self.fail(NOT_FINITE.format(len(self.columns)))
            return []
        self.columns.append(written.column)
        if written.logprobs is not None:
            self._logprobs.append(written.logprobs)
            if written.text is not None:
                self._text_logprobs.append(written.logprobs[-1])
        full = written.frame is not None and len(self.frames) == self.limits.frames
        if written.done:
            self.reason = "end"
        elif full or len(self.columns) >= self.limits.columns:
            self.reason = "length"
        token = written.text
        events = self._say(lambda: self._stop.finish() if token is None else self._stop.push(self.text.push(token)))
        self._tokens.append(len(self.text.ids))
        if written.frame is not None and not full:
            self.frames.append(written.frame)
            if self._logprobs:  # each stream's code was sampled its delay after the frame
                first, delays = len(self.columns) - 1 - self.layout.max_delay, self.layout.delays[:-1]
                self._frame_logprobs.append([self._logprobs[first + delay][i] for i, delay in enumerate(delays)])
        return events

    def tokens_by(self, column: int) -> int:
        """Number of tokens of text among the first columns."""
        return self._tokens[min(column, len(self._tokens)) - 1] if column and self._tokens else 0

    def sound(self, samples: Tensor) -> list[Event]:
        """The chunk of the next samples [S] that became exact; none of no samples."""
        count = samples.shape[0]
        if not count:
            return []
        start, end = self.advance(count)
        if self._loudness is not None and self.reason is None:
            self._loudness.push(samples)
            if self.limits.silence is not None and self._loudness.silence() >= self.limits.silence - 1e-9:
                self.reason = "silence"
        return [AudioChunk(samples, start, end)]

    def advance(self, samples: int) -> tuple[float, float]:
        """Count the next samples; returns where they are in the sound, in seconds."""
        start, self._samples = self._samples, self._samples + samples
        return start / self._sample_rate, self._samples / self._sample_rate

    def fail(self, error: str) -> None:
        """End the answer with an error."""
        self.reason, self.error = "error", error

    def finish(self) -> list[Event]:
        """Returns the text that was held back until the end was known."""
        return self._say(lambda: self._stop.push(self.text.finish()) + self._stop.finish())

    def _say(self, decode: Callable[[], str]) -> list[Event]:
        """Decode the next text. Exceptions are the error of this answer alone; only a lack of memory is raised."""
        try:
            text = decode()
            self._characters += len(text)
            if self._stop.stopped:  # of the text's tokens only those before the stop string stay
                self.reason = "stop"
                del self.text.ids[self.text.tokens_of(self._characters) :]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.fail(f"the answer's text cannot be decoded ({error}); is it the model's own tokenizer?")
            return []
        if not text:
            return []
        if not self.task.audio:
            return [TextDelta(text)]
        start = self._said
        self._said += sum(self.time.durations(text, self._reader))
        return [TextDelta(text, start, self._said)]

    def codes(self, frames: int | None = None) -> Tensor | None:
        """The first frames (all by default), [A, F]; None where the task does not speak."""
        if not self.task.audio:
            return None
        chosen = self.frames[:frames]
        return torch.tensor(chosen).T if chosen else torch.zeros(self.layout.n_audio, 0, dtype=torch.long)

    def logprobs(self, tokens: int, frames: int) -> Logprobs:
        """Log-probabilities of the first tokens and frames."""
        known = self._frame_logprobs[:frames]
        codes = torch.tensor(known).T if known else torch.zeros(self.layout.n_audio, 0)
        return Logprobs(tuple(self._text_logprobs[:tokens]), codes if self.task.audio else None)
