"""Normal noise as a function of (seed, layer, position): the same however it is cut, on every device.

A counter-based generator: keys from (seed, layer) hash each position into two 32-bit words, which give one
normal by the Box-Muller transform. The 32-bit mix is C. Wellons' `lowbias32`
(https://nullprogram.com/blog/2018/07/31/). Positions repeat after 2**32, two days of sound at 24 kHz.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


class KeyedNoise:
    """The standard normal noise of one layer."""

    def __init__(self, seed: int, layer: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=16).digest()
        words = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(4)]
        self._keys = torch.tensor(words, dtype=torch.long, device=device).reshape(2, 2, 1)  # [round, draw, 1]

    def __call__(self, start: int, count: int) -> Tensor:
        """Noise `[count]` (float32) of the positions `start` to `start + count - 1`."""
        positions = torch.arange(start, start + count, device=self._keys.device) & _WORD
        draws = mix32(mix32(positions ^ self._keys[0]) ^ self._keys[1])  # [2, count]
        # 24 bits, at the centres of their intervals: never 0, whose logarithm is infinite.
        first, second = ((draws >> 8).to(torch.float32) + 0.5) * 2.0**-24
        return (first.log() * -2).sqrt() * (second * (2 * math.pi)).cos()


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, in which every input bit stirs every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
