"""Paces an answer's sound to what a client plays, and knows how much was heard.

A client without a clock that can be seen (a WebSocket) is taken to play at once and without a break what it gets:

    heard = what was sent, less what is still to play at this moment; a gap in what was sent is silence there too

so that it never exceeds what was sent, nor the time since the first sound less the gaps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from infer.pcm import SampleQueue, faded

PIECE = 0.1  # seconds of sound that one event holds at most, and that may be wanting before more is sent
SOFT = 0.2  # gain while somebody speaks who may be about to interrupt
TEXT_AHEAD = 0.2  # seconds by which the text of an answer is sent before its sound


def _to_nobody(said: object) -> None:
    """Replaces the callbacks of an answer that has ended."""


class Outlet:
    """Where one answer's sound goes: here to a client that plays what it gets; `emit` takes the samples of an event.

    Attributes:
        sent: seconds that went out.
        underruns: how often the client had nothing left to play.
        soft: the next samples are softer.
        tell: called with `started`, `stopped` or `cleared`, where it is seen here when the sound is played.
    """

    def __init__(self, rate: int, emit: Callable[[np.ndarray], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.sent, self.underruns = rate, 0.0, 0
        self.tell: Callable[[str], None] = _to_nobody
        self._emit, self._clock = emit, clock
        self.soft, self._gain = False, 1.0
        self._ends: float | None = None  # when the client will have played all

    def ahead(self) -> float:
        """Seconds that were sent and are still to be played."""
        return 0.0 if self._ends is None else max(self._ends - self._clock(), 0.0)

    @property
    def heard(self) -> float:
        """Seconds that were heard by now."""
        return max(self.sent - self.ahead(), 0.0)

    def send(self, samples: np.ndarray) -> None:
        """Let samples [S] go."""
        now, seconds = self._clock(), len(samples) / self.rate
        if self._ends is not None and now > self._ends:
            self.underruns += 1
        self._ends = max(self._ends or now, now) + seconds
        self.sent += seconds
        self._emit(self.ducked(samples))

    def ducked(self, samples: np.ndarray) -> np.ndarray:
        """The next samples [S] at the present gain."""
        before, self._gain = self._gain, SOFT if self.soft else 1.0
        return faded(samples, before, self._gain)

    def clear(self) -> None:
        """Drop what was sent and not played yet; a client does so itself."""
        self._ends = None

    def end(self) -> None:
        """Nothing more is sent."""
        self.free()

    def free(self) -> None:
        """Drop the callbacks, so that the answer is freed at once and not only by the garbage collector."""
        self._emit = self.tell = _to_nobody


class Pacer:
    """Sends text and sound of one answer in time, sound at most `lead` seconds ahead."""

    def __init__(self, outlet: Outlet, lead: float) -> None:
        self.outlet, self._lead = outlet, lead
        self._texts: deque[tuple[str, float]] = deque()
        self._sounds = SampleQueue()
        self._closed = self.stopped = False
        self._changed = asyncio.Event()

    def text(self, text: str, at: float | None) -> None:
        """Take a piece of text that is spoken from a second of the sound on; None for text that is not spoken."""
        self._texts.append((text, at or 0.0))
        self._changed.set()

    def sound(self, samples: np.ndarray) -> None:
        """Take the next samples [S]."""
        self._sounds.push(samples)
        self._changed.set()

    def close(self, at_once: bool = False) -> None:
        """Nothing more comes, nor, with `at_once`, is anything sent from this moment on."""
        self._closed, self.stopped = True, self.stopped or at_once
        self._changed.set()

    async def run(self, tell: Callable[[str], None]) -> None:
        """Send, text by `tell`; returns when all was sent, or it was stopped."""
        while not self.stopped:
            whole = self._closed and not self._sounds.count
            while self._texts and (whole or self._texts[0][1] <= self.outlet.sent + TEXT_AHEAD):
                tell(self._texts.popleft()[0])
            wait: float | None = None
            if self._sounds.count:
                room = round((self._lead - self.outlet.ahead()) * self.outlet.rate)
                piece = min(round(PIECE * self.outlet.rate), self._sounds.count)
                if room >= piece:
                    self.outlet.send(self._sounds.take(piece))
                    continue
                wait = (piece - room) / self.outlet.rate
            elif whole:
                break
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if wait is None else max(wait, 0.001))
