"""Random generators by key: every draw has its own generator, seeded by the names of its purpose.

There is no running random state, so any draw can be repeated alone, in any process and in any order. Exact resume and the
independence from the number of processes rest on that.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


_64 = (1 << 64) - 1


def key(*parts: int | str) -> int:
    """Hash all parts to a 63-bit number that depends on nothing else (BLAKE2b of their text)."""
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeded_rng(*parts: int | str) -> random.Random:
    """Make a Python generator seeded by `key(*parts)`."""
    return random.Random(key(*parts))


def seeded_generator(*parts: int | str) -> torch.Generator:
    """Make a torch generator (CPU) seeded by `key(*parts)`."""
    import torch

    return torch.Generator().manual_seed(key(*parts))


def shuffled(index: int, size: int, *parts: int | str) -> int:
    """Image of `index` in [0, size) under the permutation keyed by `parts`: a bijection of [0, size), without a table. An
    eight-round Feistel network over the smallest square of a power of two that holds `size`, walked until the number is in
    range (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", the cycle-walking method)."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside [0, {size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    name = key(*parts)
    while True:
        left, right = index >> half, index & mask
        for turn in range(1, 9):
            left, right = right, left ^ (_mixed(name + right + (turn << 48)) & mask)
        index = left << half | right
        if index < size:
            return index


def shuffled_all(size: int, *parts: int | str) -> np.ndarray:
    """`shuffled` of every index, int64 [size]."""
    import numpy as np

    half = max(1, ((size - 1).bit_length() + 1) // 2)
    name, shift, mask = np.uint64(key(*parts)), np.uint64(half), np.uint64((1 << half) - 1)
    out = np.arange(size, dtype=np.uint64)
    for chunk in (out[first : first + (1 << 16)] for first in range(0, size, 1 << 16)):
        todo = np.arange(len(chunk))
        while len(todo):
            left, right = chunk[todo] >> shift, chunk[todo] & mask
            for turn in range(1, 9):
                left, right = right, left ^ (_all_mixed(name + right + np.uint64(turn << 48)) & mask)
            chunk[todo] = left << shift | right
            todo = todo[chunk[todo] >= size]
    return out.astype(np.int64)


def _mixed(number: int) -> int:
    """Mix 64 bits (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators": SplitMix64)."""
    z = (number + 0x9E3779B97F4A7C15) & _64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64
    return z ^ (z >> 31)


def _all_mixed(numbers: np.ndarray) -> np.ndarray:
    """`_mixed` of each number, uint64."""
    import numpy as np

    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
