"""Samples in their order, and as 16-bit numbers.

S samples, float32 within -1 to 1.
"""

from __future__ import annotations

from collections import deque

import numpy as np


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Samples [S] as int16; what is beyond -1 to 1 is clipped."""
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)


class SampleQueue:
    """Samples in their order.

    Attributes:
        count: how many it holds.
    """

    def __init__(self) -> None:
        self.count = 0
        self._pieces: deque[np.ndarray] = deque()

    def push(self, samples: np.ndarray) -> None:
        """Add samples [S]."""
        if len(samples):
            self._pieces.append(samples)
            self.count += len(samples)

    def take(self, most: int) -> np.ndarray:
        """The next samples, at most that many."""
        taken = [np.zeros(0, np.float32)]
        while self._pieces and most:
            piece = self._pieces.popleft()
            if len(piece) > most:
                self._pieces.appendleft(piece[most:])
                piece = piece[:most]
            taken.append(piece)
            most -= len(piece)
            self.count -= len(piece)
        return np.concatenate(taken)

    def clear(self) -> None:
        self._pieces.clear()
        self.count = 0
