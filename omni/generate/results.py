"""What generation gives: events while an answer is made, and the whole answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Reason = Literal["end", "length", "cache", "cancelled", "error"]
"""Why an answer ended: the model ended it, a limit was reached, the cache is full, it was cancelled, or it broke."""


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
    """A piece of the answer's text; the pieces, joined, are the text."""

    text: str


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """The next samples [S] of the answer. `exact`: no later frame changes them (always so for our codecs)."""

    samples: Tensor
    exact: bool = True


@dataclass(frozen=True)
class Ended:
    """The last event of an answer.

    Attributes:
        error: what happened and what to do, where the reason is `error`; what was handed over before is no answer then, and
            the conversation goes on as if the question had not been asked.
    """

    reason: Reason
    timings: Timings
    error: str | None = None


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
        error: what happened and what to do, where that is `error`; the other fields hold what was made before.
    """

    text: str
    audio: Tensor | None
    sample_rate: int
    tokens: tuple[int, ...]
    codes: Tensor | None
    timings: Timings
    ended: Reason
    error: str | None = None


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
