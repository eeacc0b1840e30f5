"""What generation gives: events while an answer is made, and the whole answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Reason = Literal["end", "length", "cache", "cancelled"]
"""Why an answer ended: the model ended it, a limit was reached, the cache is full, or it was cancelled."""


@dataclass(frozen=True)
class Timings:
    """Seconds from the question to what is named. The time a consumer keeps an event is left out.

    Attributes:
        encode: the spoken question's features are there.
        prefill: the question is in the cache.
        first_text, first_audio: the first text and the first samples were handed over; None where there was
            none.
        total: the answer is complete.
        steps: columns written.
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
    """A piece of the answer's text; the pieces, joined, are the text.

    Attributes:
        start, end: when it is spoken, in seconds of the answer's sound, as the model's speaking time has it: text is written
            ahead of its sound. None where the answer is not spoken.
    """

    text: str
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """The next samples [S] of the answer.

    Attributes:
        exact: no later frame changes them (always so for our codecs).
        start, end: where they stand in the answer's sound, in seconds.
    """

    samples: Tensor
    exact: bool = True
    start: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class Ended:
    """The last event of an answer."""

    reason: Reason
    timings: Timings


Event = TextDelta | AudioChunk | Ended


@dataclass(frozen=True, eq=False)
class Answer:
    """A whole answer.

    Attributes:
        text: what was written, "" where the task writes nothing.
        audio: what was spoken, [S] at `sample_rate`; None where nothing is spoken or there is no codec.
        sample_rate: of the codec, in Hz (0 without one).
        tokens: ids of the text.
        codes: the frames, [A, F]; None where the task does not speak.
        ended: why it ended.
    """

    text: str
    audio: Tensor | None
    sample_rate: int
    tokens: tuple[int, ...]
    codes: Tensor | None
    timings: Timings
    ended: Reason


class Clock:
    """A stopwatch that can be held."""

    def __init__(self) -> None:
        self._since: float | None = time.perf_counter()
        self._sum = 0.0

    def hold(self) -> None:
        self._sum, self._since = self.seconds, None

    def go_on(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._sum if self._since is None else self._sum + time.perf_counter() - self._since
