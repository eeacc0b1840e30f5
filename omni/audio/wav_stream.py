"""Samples of a WAV file, or of raw PCM, whose bytes are still coming.

The header is that of `omni/audio/wav.py`; programs that write into a pipe leave the sizes in it unknown.

S samples, C channels.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {(_PCM, 16): "<i2", (_FLOAT, 32): "<f4"}
_ENDLESS = 0x7FFFF000  # sizes from here on, and 0, say nothing


@dataclass(frozen=True)
class SampleForm:
    """Where the samples are in the bytes.

    Attributes:
        rate: samples per second.
        channels: C, one after another in each frame.
        type: of a sample, for NumPy.
        start, end: bytes at which the samples begin, and end (None for the end of all).
    """

    rate: int
    channels: int = 1
    type: str = "<i2"
    start: int = 0
    end: int | None = None

    @property
    def frame(self) -> int:
        """Bytes of a sample of all channels."""
        return self.channels * np.dtype(self.type).itemsize

    def samples(self, data: bytes) -> np.ndarray:
        """Samples [C, S] of whole frames, [S] of one channel."""
        found = np.frombuffer(data, self.type)
        return found if self.channels == 1 else found.reshape(-1, self.channels).T


def wav_form(head: bytes) -> SampleForm | None:
    """The form of a WAV file that begins with `head`; None where its samples are no 16-bit integers or 32-bit floats, or begin
    later."""
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        return None
    place, found = 12, None
    while place + 8 <= len(head):
        name, size = struct.unpack_from("<4sI", head, place)
        place += 8
        if name == b"data":
            end = None if size == 0 or size >= _ENDLESS else place + size
            return found and SampleForm(*found, place, end)
        if name == b"fmt " and size >= 16 and place + min(size, 26) <= len(head):
            tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", head, place)
            if tag == _EXTENSIBLE and size >= 26:
                (tag,) = struct.unpack_from("<H", head, place + 24)
            kind = _TYPES.get((tag, bits))
            found = (rate, channels, kind) if kind is not None and channels and rate else None
        place += size + size % 2
    return None
