"""What is compiled gives the same bits wherever its arrays lie, also next to one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from omni.cpu import compiled, compiled_int8

Array = np.ndarray[Any, Any]
Place = Callable[..., Array]
"""An array of a shape, with numbers or of a type, at the next place in memory."""
WIDTH = 32


def placer(gap: int) -> Place:
    """Arrays of one memory, so many bytes apart."""
    memory = np.zeros(1 << 18, np.uint8)
    taken = [-memory.ctypes.data % 64]

    def place(shape: Sequence[int], numbers: Array | None = None, dtype: Any = np.float32) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found = memory[taken[0] : taken[0] + size].view(dtype).reshape(shape)
        found[...] = 0 if numbers is None else numbers
        taken[0] += size + gap
        return found

    return place


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def norm(place: Place) -> list[Array]:
    x, weight = place((1, WIDTH), numbers(0, 1, WIDTH)), numbers(1, WIDTH)
    out = place((1, WIDTH))
    compiled.norm_rows(x, weight, np.float32(1e-5), out)
    return [out]


def add_and_round(place: Place) -> list[Array]:
    x, products = place((1, WIDTH), numbers(0, 1, WIDTH)), place((1, WIDTH), numbers(1, 1, WIDTH))
    held, factor = place((2, 1, WIDTH), dtype=np.uint8), place((1,), numbers(2, 1))
    compiled_int8.add_and_round_norm(x, products, numbers(1, WIDTH), np.float32(1e-5), held, factor)
    return [x, held, factor]


def gate(place: Place) -> list[Array]:
    products, factor = place((1, 2 * WIDTH), numbers(0, 1, 2 * WIDTH)), place((1,), numbers(1, 1))
    held = place((2, 1, WIDTH), dtype=np.uint8)
    compiled_int8.gate_and_round(products, factor, held)
    return [held, factor]


def turn(place: Place) -> list[Array]:
    """Of two rows of a cache of four slots, with norms."""
    products, wide = place((2, 96), numbers(0, 2, 96)), place((2, 96))
    cos, sin = place((2, 16), numbers(1, 2, 16)), place((2, 16), numbers(2, 2, 16))
    keys, values = place((2, 5, 1, 16)), place((2, 5, 1, 16))
    active, writes = np.arange(2), np.array([1, 7])
    norms = numbers(3, 2, 16)
    compiled_int8.write_heads(
        products, numbers(4, 2), numbers(5, 96), active, writes, cos, sin, np.float32(1e-5), *norms, keys, values, wide
    )
    return [wide, keys, values]


def embed(place: Place) -> list[Array]:
    tokens, offsets = np.array([[1, 2, 3], [0, 1, 1]]), np.array([0, 4])
    audio, out = place((9, WIDTH), numbers(0, 9, WIDTH)), place((2, WIDTH))
    compiled.embed(tokens, offsets, audio, numbers(1, 5, WIDTH), np.float32(1 / 3), out)
    return [out]


@pytest.mark.parametrize("work", [norm, add_and_round, gate, turn, embed])
def test_neighbours_change_no_bit(work: Callable[[Place], list[Array]]) -> None:
    far = work(placer(4096))
    for gap in (0, 4, 64, 192, 320):
        for found, wanted in zip(work(placer(gap)), far, strict=True):
            assert found.tobytes() == wanted.tobytes(), gap
