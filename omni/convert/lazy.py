"""Lazy tensors, which are read from files when they are needed."""

from __future__ import annotations

import hashlib
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from omni.errors import UserError

WriteCallback = Callable[[int, int], None]
"""Progress callback: called with the bytes written and the total."""


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The types that weights may have."""


BLOCK = 256  # rows per block of random numbers, so that a drawn tensor is the same however it is read


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read when it is needed. `read`: rows `[start, stop)` of the first dimension (of a scalar: itself); a
    fresh tensor or a view of a mapped file, which must not be written to."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Lazy:
        """Wraps a tensor that is in memory (or mapped)."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda a, b: tensor[a:b] if tensor.ndim else tensor)

    @classmethod
    def drawn(
        cls, shape: Sequence[int], dtype: torch.dtype, draw: Callable[[torch.Generator, int], Tensor], key: str, seed: int
    ) -> Lazy:
        """A tensor of random rows: `draw(generator, rows)` makes a block of them, keyed by (seed, key, block)."""

        def read(start: int, stop: int) -> Tensor:
            begin, blocks = start // BLOCK * BLOCK, [torch.empty(0, *shape[1:], dtype=dtype)]
            for first in range(begin, stop, BLOCK):
                digest = hashlib.blake2b(f"{seed}/{key}/{first // BLOCK}".encode(), digest_size=7).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
                blocks.append(draw(generator, min(BLOCK, shape[0] - first)).to(dtype))
            return torch.cat(blocks)[start - begin : stop - begin]

        return cls(tuple(shape), dtype, read)

    @classmethod
    def once(cls, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Tensor]) -> Lazy:
        """A tensor that is made whole when its first row is read, and dropped when its last one has been."""
        held: list[Tensor] = []

        def read(start: int, stop: int) -> Tensor:
            if not held:
                held.append(make())
            rows = held[0][start:stop] if shape else held[0]
            if not shape or stop >= shape[0]:
                held.clear()
            return rows

        return cls(tuple(shape), dtype, read)

    @classmethod
    def filled(cls, shape: Sequence[int], dtype: torch.dtype, value: float = 0.0) -> Lazy:
        """A tensor filled with one value."""
        return cls(tuple(shape), dtype, lambda a, b: torch.full((b - a, *shape[1:]), value, dtype=dtype))

    def __call__(self) -> Tensor:
        """Reads the whole tensor."""
        return self.read(0, self.length)

    @property
    def length(self) -> int:
        """Number of rows: size of the first dimension, 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Lazy:
        """Rows `[start, stop)` as a lazy tensor."""
        return Lazy((stop - start, *self.shape[1:]), self.dtype, lambda a, b: self.read(start + a, start + b))

    def to(self, dtype: torch.dtype, name: str = "") -> Lazy:
        """Converts to another type; UserError (when read) where a finite value does not fit it."""
        if dtype == self.dtype:
            return self

        def read(start: int, stop: int) -> Tensor:
            rows = self.read(start, stop)
            out = rows.to(dtype)
            if dtype == torch.float16 and bool((out.isinf() & ~rows.isinf()).any()):
                raise UserError(
                    f"tensor {name} holds {float(rows.abs().max()):.3g}, beyond float16; choose bfloat16 or float32"
                )
            return out

        return Lazy(self.shape, dtype, read)


class LazyTensors(UserDict[str, Any]):
    """Tensors by name, each of which is read whenever it is asked for, and not kept. `data`: the same tensors, unread."""

    def __getitem__(self, name: str) -> Tensor:
        tensor: Lazy = self.data[name]
        return tensor()


def lazies_of(tensors: Mapping[str, Tensor]) -> dict[str, Lazy]:
    """Tensors by name as lazy ones: those of `LazyTensors` stay unread."""
    if isinstance(tensors, LazyTensors):
        return dict(tensors.data)
    return {name: Lazy.of(tensor) for name, tensor in tensors.items()}


def joined(parts: Sequence[Lazy]) -> Lazy:
    """Concatenates tensors of one width and type in the first dimension."""
    forms = {(part.shape[1:], part.dtype) for part in parts}
    if len(forms) != 1:
        raise ValueError(f"tensors of {forms} cannot be joined: widths and types must agree")

    def read(start: int, stop: int) -> Tensor:
        out, first = [], 0
        for part in parts:
            low, high = max(start - first, 0), min(stop - first, part.length)
            if low < high:
                out.append(part.read(low, high))
            first += part.length
        if not out:
            return torch.empty(0, *parts[0].shape[1:], dtype=parts[0].dtype)
        return out[0] if len(out) == 1 else torch.cat(out)

    return Lazy((sum(part.length for part in parts), *parts[0].shape[1:]), parts[0].dtype, read)


def cast(tensors: Mapping[str, Lazy], dtype: torch.dtype) -> dict[str, Lazy]:
    """Converts all tensors to one type."""
    return {name: tensor.to(dtype, name) for name, tensor in tensors.items()}


def same(a: Lazy, b: Lazy | None) -> bool:
    """Whether two tensors have one shape and type, and the same numbers; read in pieces."""
    if b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    starts = range(0, a.length, 1024)
    return all(torch.equal(*(x.read(i, min(i + 1024, a.length)) for x in (a, b))) for i in starts)


@dataclass
class Progress:
    """Counts bytes over several files, for one progress callback. `total`: that there will be."""

    total: int
    on_progress: WriteCallback | None
    done: int = 0

    def add(self, count: int) -> None:
        self.done = min(self.done + count, self.total)  # headers come on top of the tensors
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
