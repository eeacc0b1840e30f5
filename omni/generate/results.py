"""Results of generation: events while an answer is made, and the whole answer."""

from __future__ import annotations

import os
import time
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omni.audio.wav import write_audio
from omni.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Reason = Literal["end", "stop", "silence", "length", "cache", "cancelled", "error"]
"""Reason for an answer's end: the model ended it, a stop string was written, its sound was silent for too long, a limit was
reached, the cache is full, it was cancelled, or an error occurred."""

LINE, QUOTED = 120, 48
"""Most characters of a `repr`, and of a text within it."""


def brief(value: Any) -> str:
    """A `repr` that fits a line: tensors as their shapes, texts cut, of a dataclass only fields that differ from defaults."""
    from torch import Tensor

    parts = []
    for f in fields(value):
        own = getattr(value, f.name)
        if not f.repr or (f.default is not MISSING and own is f.default) or (not isinstance(own, Tensor) and own == f.default):
            continue
        if isinstance(own, Tensor):
            shown = f"tensor{list(own.shape)}"
        elif isinstance(own, str):
            shown = quoted(own)
        else:
            shown = repr(own)
        parts.append(f"{f.name}={shown}")
    line = f"{type(value).__name__}({', '.join(parts)})"
    return line if len(line) <= LINE else line[: LINE - 2] + "…)"


def quoted(text: str) -> str:
    """A text's `repr`, or the start of it where it is long."""
    shown = repr(text)
    return shown if len(shown) <= QUOTED else f"{shown[: QUOTED - 2]}…{shown[0]}"


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
