"""An answer as far as it has been written: turns columns into text and frames, and frames' sound into chunks.

Dimensions: K streams, A audio streams, F frames.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.generate.results import AudioChunk, Event, Logprobs, Reason, TextDelta
from omni.generate.rows import StepOutput
from omni.generate.speech_time import CharacterReader, Loudness, SpeechTime
from omni.layout import Layout
from omni.tasks import Task
from omni.text import Tokenizer


class StopText:
    """Returns a text, piece by piece, up to its first stop string.

    Characters that may begin one are held back. `stopped`: it came; `characters`: number of those that were returned."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self.characters = 0
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece; returns the text that is now certain, maybe none."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        offsets = [offset for offset in map(text.find, self.stops) if offset >= 0]
        if offsets:
            self.stopped = True
            return self._give(text[: min(offsets)])
        kept = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - kept :]
        return self._give(text[: len(text) - kept])

    def finish(self) -> str:
        """Returns the text that was held back, when no more can follow."""
        text, self._held = self._held, ""
        return self._give(text)

    def _give(self, text: str) -> str:
        self.characters += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string starts."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


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
        if self._shown == len(self.ids) or (whole and text.endswith(HALF)):
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


class Limits(NamedTuple):
    """Where an answer is cut: a spoken one after so many frames, any after so many columns (time steps), before a stop string,
    and after so many seconds of silence."""

    frames: int
    columns: int
    stop: Sequence[str] = ()
    silence: float | None = None


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
        self.time, self._reader, self._said = time or SpeechTime(), CharacterReader(), 0.0

    def write(self, written: StepOutput) -> list[Event]:
        """Take a step's output; returns the text that became known with it. A finished frame is added to `frames`."""
        events: list[Event] = []
        if self.reason is not None:  # this step was under way when the answer ended
            return events
        if written.broken:
            self.fail(NOT_FINITE.format(len(self.columns)))
            return events
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
        with self._decoding():
            if written.text is not None:
                self._say(events, self._stop.push(self.text.push(written.text)))
            else:  # the text has ended: nothing completes what was held back
                self._say(events, self._stop.finish())
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

    def sound(self, samples: Tensor) -> list[AudioChunk]:
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

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn exceptions while text is decoded into the error of this answer alone; only a lack of memory is raised."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.fail(f"the answer's text cannot be decoded ({error}); is it the model's own tokenizer?")

    def finish(self) -> list[Event]:
        """Returns the text that was held back until the end was known."""
        events: list[Event] = []
        with self._decoding():
            self._say(events, self._stop.push(self.text.finish()) + self._stop.finish())
        return events

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

    def _say(self, events: list[Event], text: str) -> None:
        if self._stop.stopped:  # of the text's tokens only those before the stop string stay
            self.reason = "stop"
            del self.text.ids[self.text.tokens_of(self._stop.characters) :]
        if text and self.task.audio:
            start = self._said
            self._said += sum(self.time.durations(text, self._reader))
            events.append(TextDelta(text, start, self._said))
        elif text:
            events.append(TextDelta(text))
