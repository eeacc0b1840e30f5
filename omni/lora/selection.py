"""Selects the LoRA adapters and edits of each batch row, for the whole model or, while a block of `using` runs, row by row.

Dimensions: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Active:
    """Which adapters act; one object for all linears of a model.

    Attributes:
        names: those that act on every row, added up.
        merged: those that are part of the weights just now.
        edits: edits that act on every row, whatever adapters it has.
        used: those of the answers under way, once for each.
    """

    names: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    used: list[str] = field(default_factory=list)


RowSelection = str | tuple[str | None, ...] | None
"""What acts on a row: an adapter (None: the model's own choice), or a tuple of that and names of edits."""


def names_in(selection: RowSelection) -> tuple[str, ...]:
    """Every name in it."""
    return tuple(name for name in (selection if isinstance(selection, tuple) else (selection,)) if name is not None)


@dataclass(frozen=True)
class Selection:
    """What acts by row.

    Attributes:
        names: what any row has.
        index: [B] which of them, counted from 1; 0 for the model's own choice. None where every row has the only one.
    """

    names: tuple[RowSelection, ...]
    index: Tensor | None = None

    def rows(self, rows: slice) -> Selection:
        """Of some rows only."""
        return self if self.index is None else Selection(self.names, self.index[rows])

    def only(self, number: int, x: Tensor) -> Tensor:
        """x [B, ...], zero in all rows but those of a number."""
        return x if self.index is None else torch.where((self.index == number).view(-1, *[1] * (x.ndim - 1)), x, 0)


_CHOICE: ContextVar[Selection | None] = ContextVar("adapters", default=None)


def current() -> Selection | None:
    """The choice of the block that runs."""
    return _CHOICE.get()


@contextmanager
def using(choice: Selection | None) -> Iterator[None]:
    """Adapters by row instead of the model's own choice, in this thread; None leaves that as it is. No gradients are recorded:
    this serves generation (backward would recompute a checkpointed part without the choice)."""
    if choice is None:
        yield
        return
    before = _CHOICE.set(choice)
    try:
        with torch.no_grad():
            yield
    finally:
        _CHOICE.reset(before)
