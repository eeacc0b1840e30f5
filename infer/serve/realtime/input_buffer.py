"""The sound that a client has sent and that is no item yet."""

from __future__ import annotations

from collections import deque

import numpy as np

from infer.resampler import Resampler
from infer.samples import to_int16
from infer.serve.realtime.configuration import G711_RATE, PCM_RATE
from infer.serve.realtime.protocol import ProtocolError
from infer.serve.sound import decode


class InputBuffer:
    """Samples at 24 kHz, each with its second of the session's input.

    Args:
        most: seconds that it holds.

    Attributes:
        start, end: seconds of the input at which what it holds begins and ends.
    """

    def __init__(self, most: float) -> None:
        self.most, self.start = most, 0.0
        self._form = "audio/pcm"
        self._rate = Resampler(PCM_RATE, PCM_RATE)
        self._half = b""  # the first byte of a sample whose second has not come
        self._pieces: deque[np.ndarray] = deque()
        self._samples = 0

    @property
    def seconds(self) -> float:
        return self._samples / PCM_RATE

    @property
    def end(self) -> float:
        return self.start + self.seconds

    def append(self, data: bytes, form: str) -> np.ndarray:
        """Take raw sound of a format, in pieces that may end within a sample; returns its whole samples [S] at 24 kHz, int16.

        Raises:
            ProtocolError: more sound than it holds.
        """
        if form != self._form:
            given = PCM_RATE if form == "audio/pcm" else G711_RATE
            self._form, self._rate, self._half = form, Resampler(given, PCM_RATE), b""
        if form == "audio/pcm":
            data = self._half + data
            whole = len(data) // 2 * 2
            self._half = data[whole:]
            return self.add(np.frombuffer(data[:whole], "<i2"))
        self._check_room(len(data) * PCM_RATE // G711_RATE)
        return self.add(to_int16(self._rate.push(decode(data, form))))

    def _check_room(self, count: int) -> None:
        if self._full(count):
            raise ProtocolError(
                f"the buffer holds at most {self.most:g} s of sound; commit or clear it", "input_audio_buffer_full", "audio"
            )

    def add(self, samples: np.ndarray) -> np.ndarray:
        """Take samples [S] at 24 kHz, int16; ProtocolError where they are too many."""
        self._check_room(len(samples))
        self._pieces.append(samples)
        self._samples += len(samples)
        return samples

    def forget(self, before: float) -> None:
        """Drop what came before a second of the input, in whole pieces."""
        while self._pieces and self.start + len(self._pieces[0]) / PCM_RATE <= before:
            self._drop()

    def make_room(self, count: int) -> None:
        """Drop the oldest pieces, until so many samples more can be taken."""
        while self._pieces and self._full(count):
            self._drop()

    def _full(self, more: int) -> bool:
        return self._samples + more > self.most * PCM_RATE

    def _drop(self) -> None:
        gone = self._pieces.popleft()
        self._samples -= len(gone)
        self.start += len(gone) / PCM_RATE

    def take(self, first: float | None = None) -> np.ndarray:
        """All samples [S], int16, from a second of the input on; the buffer is empty then."""
        whole = np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.int16)
        skipped = 0 if first is None else max(round((first - self.start) * PCM_RATE), 0)
        self.clear()
        return whole[skipped:]

    def part(self, first: float | None, skip: int, last: float) -> np.ndarray:
        """Samples [S] of what `take(first)` would return, without the first `skip`, up to a second of the input."""
        begin = skip + (0 if first is None else max(round((first - self.start) * PCM_RATE), 0))
        end = min(round((last - self.start) * PCM_RATE), self._samples)
        found, at = list[np.ndarray](), self._samples
        for piece in reversed(self._pieces):
            if at <= begin:
                break
            at -= len(piece)
            found.append(piece[max(begin - at, 0) : max(end - at, 0)])
        return np.concatenate([np.zeros(0, np.int16), *reversed(found)])

    def whole(self) -> None:
        """The client says that its sound ends here: what comes next begins with a whole sample."""
        self._half = b""

    def clear(self) -> None:
        self.start = self.end
        self._pieces.clear()
        self._samples = 0
