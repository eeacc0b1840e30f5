"""Attaches edits to a model for generation, per row: they act on the rows that name them, through the adapters' hook.

`omni.edit.deltas.edited` serves training (gradients, any model); this serves generation: rows of one batch may differ,
and tensors that captured graphs and other sessions use are not changed.

Dimensions: B rows, R rank, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from omni.edit.deltas import Delta, Edits, low, product
from omni.lora import attach as lora

_NUMBERS = itertools.count(1)


class AttachedDelta:
    """Wraps a delta as a `Pair` of `omni.lora.attach`."""

    def __init__(self, delta: Delta) -> None:
        self.delta = delta
        self.b = delta.b.T

    def low(self, x: Tensor) -> Tensor:
        """lr * x @ a.T, [..., R]."""
        h = low(x, self.delta.a)
        return h * (self.delta.lr.to(h.device) if isinstance(self.delta.lr, Tensor) else self.delta.lr)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return product(self.low(x), self.delta.b, x)


def attach_edits(model: nn.Module, edits: Edits) -> str:
    """Attach edits to a model.

    Returns:
        the name by which rows select them, and by which `omni.lora.attach.detach` removes them.

    Raises:
        UserError: an edit does not fit the model, or is not finite (it would spoil the rows of others).
    """
    edits.check_finite()
    with lora.CHANGING:
        parts = edits.check(model)
    name = f"edits {next(_NUMBERS)}"
    pairs = {}
    for target, delta in edits.detach().deltas.items():
        own = next(parts[target].parameters(recurse=False))
        dtype = own.dtype if own.is_floating_point() else None
        device = None if own.is_meta else own.device  # offloaded weights have no device before they run
        one = Edits({target: delta}).to(device, dtype)  # converted now, not at every step
        pairs[target] = AttachedDelta(one.deltas[target])
    lora.attach_pairs(model, pairs, name)
    return name


class Bases:
    """Checks that edits were made for a model's weights, and caches the results: a checksum reads all of the weights."""

    def __init__(self) -> None:
        self._found: weakref.WeakValueDictionary[tuple[Any, ...], Edits] = weakref.WeakValueDictionary()

    def check(self, model: nn.Module, edits: Edits | None) -> None:
        """Refuse edits of other weights (UserError); weights are read again only after they were written."""
        if edits is None:
            return
        modules = dict(model.named_modules())
        weights = [getattr(modules.get(name), "weight", None) for name in edits.deltas]
        now = (id(edits), *((id(weight), getattr(weight, "_version", 0)) for weight in weights))
        if edits.base is None or self._found.get(now) is edits:
            return
        with lora.CHANGING:
            edits.check_base(model)
        self._found[now] = edits


@contextmanager
def attached(model: nn.Module, several: Sequence[Edits | None]) -> Iterator[list[str | None]]:
    """Attach edits while a block runs; yields the name of each, None for None. The same edits are attached once."""
    names: dict[int, str] = {}
    with ExitStack() as stop:
        for edits in several:
            if edits is not None and id(edits) not in names:
                names[id(edits)] = attach_edits(model, edits)
                stop.callback(lora.detach, model, names[id(edits)])
        yield [None if edits is None else names[id(edits)] for edits in several]


@contextmanager
def edited_everywhere(model: nn.Module, edits: Edits) -> Iterator[None]:
    """Attach edits to every row while a block runs, besides the adapters and edits that are active there."""
    with attached(model, [edits]) as (name,):
        assert name is not None
        lora.activate_edits(model, name)
        yield
