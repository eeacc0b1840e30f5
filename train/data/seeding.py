"""Random generators by key: every draw has its own generator, seeded by the names of its purpose.

There is no running random state, so any draw can be repeated alone, in any process and in any order. Exact resume and the
independence from the number of processes rest on that.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch


_64 = (1 << 64) - 1
Number = TypeVar("Number", int, "np.ndarray")


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
    half, name = _half_bits(size), key(*parts)
    while True:
        index = _feistel(index, half, name)
        if index < size:
            return index


def shuffled_all(size: int, *parts: int | str) -> np.ndarray:
    """`shuffled` of every index, int64 [size]."""
    import numpy as np

    half, name = _half_bits(size), key(*parts)
    out = np.arange(size, dtype=np.uint64)
    for chunk in (out[first : first + (1 << 16)] for first in range(0, size, 1 << 16)):
        todo = np.arange(len(chunk))
        while len(todo):
            chunk[todo] = _feistel(chunk[todo], half, name)
            todo = todo[chunk[todo] >= size]
    return out.astype(np.int64)


def _half_bits(size: int) -> int:
    """Half the bits of the smallest square of a power of two that holds `size`."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


def _feistel(index: Number, half: int, name: int) -> Number:
    """Eight rounds over numbers of 2 * `half` bits: of one, or of each of an array, uint64. They mix bits by SplitMix64
    (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators")."""
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for turn in range(1, 9):
        z = (name + right + (turn << 48) + 0x9E3779B97F4A7C15) & _64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64
        left, right = right, left ^ ((z ^ (z >> 31)) & mask)
    return left << half | right


# --- rows that lie together, read together ----------------------------------------------------------------------------

KEPT_EPOCHS = 2
"""Orders that are kept, those used last: packers may be in two epochs."""


class WindowDraw(NamedTuple):
    """The packer and window of a draw: what is read with its row is kept until the packer comes to another window. `window`:
    epoch, and the position in it where the window starts."""

    packer: int
    window: tuple[int, int]


class Windows:
    """The order of rows where those that lie together are read together:

        piece     some rows that follow one another in a file, in whole row groups           M pieces, N rows
        epoch     the pieces in shuffled order
        run       each of P packers takes a run of N / P rows of an epoch, one row more or less
        window    so many pieces of a run that follow one another; their rows are shuffled

    Draw d of an epoch is draw d // P of run d mod P. A row is a pure function of (key of the epoch, d, P): no draw needs those
    before it. A piece is read by one packer alone, besides those of the P - 1 windows in which runs meet.

    Args:
        starts: first row of each piece, ascending, and the number of all rows, int64 [M + 1].
        width: pieces of a window.
    """

    def __init__(self, starts: np.ndarray, width: int) -> None:
        self.starts, self.width = starts, width
        self.rows, self.pieces = int(starts[-1]), len(starts) - 1
        self._orders: OrderedDict[tuple[int | str, ...], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def find(self, position: int, packers: int, *epoch: int | str) -> tuple[int, int]:
        """The row of draw `position` of the epoch with this key, and where its window starts, for so many packers in turn."""
        run, mine = position % packers, position // packers
        length, longer = divmod(self.rows, packers)
        first = run * length + min(run, longer)
        if epoch not in self._orders:
            order = shuffled_all(self.pieces, *epoch, "pieces")
            self._orders[epoch] = order, (self.starts[order + 1] - self.starts[order]).cumsum()
            if len(self._orders) > KEPT_EPOCHS:
                self._orders.popitem(last=False)
        order, ends = self._orders[epoch]  # the pieces in the epoch's order, and the place in the epoch after each, int64 [M]
        before = int(ends.searchsorted(first + mine, "right")) // self.width * self.width
        after = min(before + self.width, self.pieces)
        start = max(first, int(ends[before - 1]) if before else 0)
        size = min(first + length + (run < longer), int(ends[after - 1])) - start
        drawn = start + shuffled(first + mine - start, size, *epoch, "window", start)
        slot = ends.searchsorted(drawn, "right")
        return int(self.starts[order[slot] + 1] - (ends[slot] - drawn)), start
