"""A reply as it grows: from written columns to text and sound.

Dimensions: K streams, A audio streams, F frames.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.generate.results import AudioChunk, Reason, TextDelta
from omni.generate.rows import Written
from omni.generate.speech_time import Reader, SpeechTime
from omni.generate.stop import StopText
from omni.layout import Layout
from omni.tasks import Task
from omni.text import Tokenizer

NOT_FINITE = (
    "the model's logits are not finite numbers at time step {} of this answer, so it was dropped: leave out the adapter or the "
    "edit that acts on it, load the model in float32, or fetch the weights again"
)
"""What is said of an answer that broke there."""

HALF = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for the first bytes of a character whose last are still to come."""


class TextStream:
    """Turns token ids into text piece by piece; the pieces, joined, are the decoded whole.

    A piece is decoded together with the one before it, because some tokenizers write a token differently at
    the beginning; a character spread over several tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._given: list[int] = []  # characters given out with and before each id
        self._context = 0  # first id that is decoded along
        self._shown = 0  # ids whose text has been given out

    def push(self, token: int) -> str:
        """The text that is known with one more token, maybe none."""
        self.ids.append(token)
        text = self._next(whole=True)
        self._given.append(len(text) + (self._given[-1] if self._given else 0))
        return text

    def finish(self) -> str:
        """What was held back."""
        return self._next(whole=False)

    def _next(self, whole: bool) -> str:
        text = self.tokenizer.decode(self.ids[self._context :])
        if self._shown == len(self.ids) or (whole and text.endswith(HALF)):
            return ""
        old = self.tokenizer.decode(self.ids[self._context : self._shown])
        self._context, self._shown = self._shown, len(self.ids)
        return text[len(old) :]

    def tokens_of(self, characters: int) -> int:
        """How many of the tokens make at most so many characters."""
        count = min(bisect_right(self._given, characters), len(self.ids))  # more tokens gave out more characters
        while count and len(self.tokenizer.decode(self.ids[:count])) > characters:
            count -= 1
        return count


class Reply:
    """What one answer has come to.

    Args:
        max_frames: frames after which a spoken answer is cut.
        max_columns: columns after which any answer is cut.
        stop: texts that end the answer; its text ends before them.
        time: how long the model's voice takes for a text.

    Attributes:
        columns: all columns written, K ids each.
        frames: finished frames, A codes each.
        text: the text written; `text.ids` are its tokens.
        reason: why the answer ended, None while it goes on.
        error: what broke it, where the reason is `error`.
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
        self._samples = 0  # given out so far
        self.time, self._reader, self._said = time or SpeechTime(), Reader(), 0.0

    def write(self, written: Written) -> list[TextDelta | AudioChunk]:
        """Take what a step wrote; the text and the sound that became known with it."""
        events: list[TextDelta | AudioChunk] = []
        if self.reason is not None:  # a step that was under way when the answer ended
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
        """The answer is broken; it ends here."""
        self.reason, self.error = "error", error

    @contextmanager
    def decoding(self, codec: AudioCodec | None = None) -> Iterator[None]:
        """Let what goes wrong while text is decoded (or sound, by a codec) break this answer alone; only a lack of memory is
        raised."""
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
        """Text and sound that were held back for what might have followed."""
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
