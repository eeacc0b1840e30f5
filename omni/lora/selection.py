"""Selects the LoRA adapters and edits of each batch row, for the whole model or, while a block of `using` runs, row by row.

Dimensions: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Active:
    """The active adapters and edits of a model; one object for all of its linears.

    Attributes:
        names: adapters that act on every row, added up.
        merged: adapters that are merged into the weights at present.
        edits: edits that act on every row, whatever adapters it has.
        used: adapters of the answers under way, one entry for each answer.
    """

    names: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    used: list[str] = field(default_factory=list)


RowSelection = str | tuple[str | None, ...] | None
"""Selection of one row: an adapter (None: the model's active ones), or a tuple of that and names of edits."""


def names_in(selection: RowSelection) -> tuple[str, ...]:
    """All names of adapters and edits in a selection."""
    return tuple(name for name in (selection if isinstance(selection, tuple) else (selection,)) if name is not None)


def all_names(several: Sequence[RowSelection]) -> list[str]:
    """All names in several selections."""
    return [name for selection in several for name in names_in(selection)]


@dataclass(frozen=True)
class Selection:
    """Adapters and edits of each row of a batch.

    Attributes:
        names: the different selections of the rows.
        index: [B] number of each row's selection in `names`, counted from 1; 0 for the model's active adapters. None where
            there is one selection and every row has it.
    """

    names: tuple[RowSelection, ...]
    index: Tensor | None = None

    def rows(self, rows: slice) -> Selection:
        """The selection of some rows only."""
        return self if self.index is None else Selection(self.names, self.index[rows])

    def only(self, number: int, x: Tensor) -> Tensor:
        """x [B, ...] with zeros in all rows but those of selection `number`."""
        return x if self.index is None else torch.where((self.index == number).view(-1, *[1] * (x.ndim - 1)), x, 0)


BASE = Selection(("",))
"""No adapter for any row: the weights below them, and the edits that act on every row."""

_CHOICE: ContextVar[Selection | None] = ContextVar("adapters", default=None)


def current() -> Selection | None:
    """The selection of the innermost running block of `using`."""
    return _CHOICE.get()


@contextmanager
def using(choice: Selection | None) -> Iterator[None]:
    """Applies a selection by row instead of the model's active adapters, in this thread; None changes nothing.

    No gradients are recorded: this serves generation (backward would recompute a checkpointed part without the selection).
    """
    if choice is None:
        yield
        return
    before = _CHOICE.set(choice)
    try:
        with torch.no_grad():
            yield
    finally:
        _CHOICE.reset(before)
