"""LoRA (Hu et al. 2021): adds low-rank products to the outputs of linears, whose own weights stay unchanged.

    out(x) = W x + bias + scale * B A dropout(x)        A [r, in], B [out, r]

with scale alpha / r, or alpha / sqrt(r) where it is rank-stabilised (Kalajdzievski 2023). An adapter is a named set of such
pairs. They are parameters beside the weight they belong to (`<linear>.lora.<adapter>.a` and `.b`) and are added by a forward
hook on the linear, so every weight keeps its name, and any kind of linear can have them: quantised, sharded, or of another
library.

The active adapters are set for the whole model (`activate`), or, while a block of `using` runs, for each row of a batch. Edits
(`omni.edit.deltas`) are attached to a model in the same places: they are part of no state dict, act on top of the adapters, and
leave nothing behind when they are detached.

Dimensions: B rows of a batch, r rank.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.errors import UserError
from omni.lora.config import LoRAConfig
from omni.model.linears import TEXT_HEAD, linears_of
from omni.utils.arguments import match_names
from omni.utils.hardware import to_device
from omni.utils.private import children, remove_forward_hook


@dataclass
class Active:
    """The active adapters and edits of a model; one object for the model and all of its linears.

    Attributes:
        names: adapters that act on every row, added up.
        edits: edits that act on every row, whatever adapters it has.
        used: adapters of the answers under way, one entry for each answer.
        changes: how often adapters were attached, removed or activated. Who keeps what was computed with them (a cache, a
            captured graph) compares it: the same name may be another adapter's, with other weights.
    """

    names: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    used: list[str] = field(default_factory=list)
    changes: int = 0


def active_of(model: nn.Module) -> Active:
    """What is active in a model, of which every step of generation asks."""
    return vars(model).setdefault("_active", Active())  # type: ignore[no-any-return]


RowSelection = str | tuple[str | None, ...] | None
"""Selection of one row: an adapter (None: the model's active ones), or a tuple of that and names of edits."""


def names_in(selection: RowSelection) -> tuple[str | None, ...]:
    """The adapter of a selection, and its edits."""
    return selection if isinstance(selection, tuple) else (selection,)


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


BASE = Selection(("",))
"""No adapter for any row: the weights below them, and the edits that act on every row."""

ACTIVE = Selection((None,))
"""The model's active adapters, and the edits that act on every row."""

_CHOICE: ContextVar[Selection] = ContextVar("adapters", default=ACTIVE)
"""The selection of the innermost running block of `using`."""


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


class LowRank(nn.Module):
    """One pair: [..., in] to [..., out]."""

    def __init__(self, inputs: int, outputs: int, config: LoRAConfig, device: torch.device | None = None) -> None:
        super().__init__()
        rank = config.rank
        self.scale, self.stabilized = config.alpha / config.divisor(rank), config.rank_stabilized
        self.a = nn.Parameter(torch.empty(rank, inputs, device=device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=device))
        self.dropout = nn.Dropout(config.dropout)
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as nn.Linear starts: the product is 0, the gradient of B is not

    @property
    def up(self) -> Tensor:
        """B [out, r]."""
        return self.b

    def low(self, x: Tensor) -> Tensor:
        """scale * A dropout(x), [..., r]."""
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.a.dtype)
        return F.linear(self.dropout(x), self.a) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.low(x), self.b)


DEFAULT = "default"
"""Name of an adapter that is added without one."""

CHANGING = threading.RLock()
"""Lock for changing or iterating over the pairs of a model's linears: sessions of several threads share one model."""

if hasattr(os, "register_at_fork"):  # a process is forked between two changes, else it would wait for a thread that it lacks
    os.register_at_fork(before=CHANGING.acquire, after_in_parent=CHANGING.release, after_in_child=CHANGING.release)


Pair = Any
"""What is added to a linear's output, a `LowRank` or an edit's `Delta`: `low(x)` [..., r], `up` [out, r]; a call [..., out]."""


class Adapters(nn.Module):
    """The pairs of one linear, by name of the adapter, and by name of the edit (`attached`, part of no state dict)."""

    def __init__(self, active: Active) -> None:
        super().__init__()
        self.active = active
        self.attached: Mapping[str, Pair] = {}

    @property
    def pairs(self) -> dict[str, LowRank]:
        """The pairs of adapters by name."""
        return self._modules  # type: ignore[return-value]

    def pairs_of(self, selection: RowSelection = None) -> list[Pair]:
        """The pairs that act on rows with a selection of their own, or without one."""
        adapter, *edits = names_in(selection)
        attached = self.attached  # read once: another thread may replace the mapping
        pairs = [self.pairs.get(name) for name in (self.active.names if adapter is None else (adapter,))]
        changes = [attached.get(name) for name in (*self.active.edits, *edits) if name is not None]
        return [pair for pair in (*pairs, *changes) if pair is not None]

    def forward(self, x: Tensor) -> Tensor | None:
        """The tensor that is added to the linear's output; None where no pair acts."""
        choice, total = _CHOICE.get(), None
        for number, selection in enumerate(choice.names if choice.index is None else (None, *choice.names)):
            pairs = self.pairs_of(selection)
            if pairs:
                added = reduce(torch.add, (pair(x) for pair in pairs))
                if choice.index is not None:
                    added = torch.where((choice.index == number).view(-1, *[1] * (x.ndim - 1)), added, 0)
                total = added if total is None else total + added
        return total


def _add(linear: Any, args: tuple[Tensor, ...], named: Mapping[str, Tensor], out: Tensor) -> Tensor:
    part = children(linear).get("lora")  # another thread may have detached its edits
    delta = None if part is None else part(args[0] if args else named["input"])
    return out if delta is None else out + delta.to(out.dtype)


@contextmanager
def changing(model: nn.Module) -> Iterator[None]:
    """Has one thread at a time change the adapters of a model, and counts the change."""
    with CHANGING:
        try:
            yield
        finally:  # what fails may have changed a part
            active_of(model).changes += 1


# --- adapters of a model ----------------------------------------------------------------------------------------------


def adapted(model: nn.Module) -> dict[str, Adapters]:
    """The adapters of each linear that has any, by the linear's name."""
    with CHANGING:
        parts = {name: getattr(part, "lora", None) for name, part in model.named_modules()}
    return {name: part for name, part in parts.items() if isinstance(part, Adapters)}


def adapter_names(model: nn.Module) -> list[str]:
    """Names of the model's adapters, in the order in which they were added."""
    return list(dict.fromkeys(name for part in adapted(model).values() for name in part.pairs))


def add_adapter(model: nn.Module, config: LoRAConfig, name: str = DEFAULT) -> list[str]:
    """Add a new adapter, which changes nothing yet, to a model and activate it. Returns names of the linears that have it.
    UserError: a target matches no linear (with the closest names), or the name is taken or has a dot."""
    pairs = {
        target: LowRank(part.in_features, part.out_features, config, part.weight.device)
        for target, part in targets_of(model, config.targets).items()
    }
    attach(model, pairs, name)
    return list(pairs)


def targets_of(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Linear]:
    """The linears that patterns match, in the model's order; UserError where one matches none, with the closest names."""
    linears = linears_of(model)
    if TEXT_HEAD in patterns and TEXT_HEAD not in linears:
        raise UserError(
            f"lora.targets: {TEXT_HEAD} is no linear here: this model's head is its text embedding; leave it out, or part them "
            "first (tie_text false)"
        )
    chosen = match_names(patterns, list(linears), "lora.targets", noun="linear")
    return {name: part for name, part in linears.items() if name in chosen}


def attach(model: nn.Module, pairs: Mapping[str, LowRank], name: str = DEFAULT) -> None:
    """Attach pairs, by name of their linear, to a model as one active adapter. UserError: the name is taken or has a dot,
    there is no such linear, or a pair has another shape."""
    with changing(model):
        _check_pairs(model, pairs, name)
        active = _add_hooks(model, pairs)
        for target, pair in pairs.items():
            linear: Any = model.get_submodule(target)
            more, rank = linear.out_features - len(pair.b), pair.b.shape[1]
            if more:
                pair.b = nn.Parameter(torch.cat([pair.b.detach(), pair.b.new_zeros(more, rank)]))
            linear.lora.add_module(name, pair.train(linear.training))
        active.names = (*active.names, name)


def _check_pairs(model: nn.Module, pairs: Mapping[str, LowRank], name: str) -> None:
    if not name or "." in name or hasattr(Adapters(Active()), name):
        raise UserError(f"adapter {name!r}: this name cannot be used; choose another one, of letters and digits")
    if name in adapter_names(model):
        raise UserError(f"adapter {name!r} is there already; remove it first, or choose another name")
    linears = linears_of(model)
    for target, pair in pairs.items():
        if target == TEXT_HEAD and target not in linears:
            raise UserError(
                f"adapter {name!r} adds to {target}, but this model's head is its text embedding; merge it into a model of its "
                "own, where they part: omni-train convert MODEL TARGET --lora ADAPTER"
            )
        if target not in linears:
            match_names([target], list(linears), f"adapter {name!r}", noun="linear")
        outputs, inputs, linear = len(pair.b), pair.a.shape[1], linears[target]
        if not fits(target, (outputs, inputs), (linear.out_features, linear.in_features)):
            raise UserError(
                f"adapter {name!r}: its pair for {target} goes from {inputs} to {outputs} features, the model's linear from "
                f"{linear.in_features} to {linear.out_features}; it belongs to another model"
            )


def _add_hooks(model: nn.Module, targets: Iterable[str]) -> Active:
    """Give linears that have no pairs yet what adds them to their outputs; returns what is active in the model."""
    present, active = adapted(model), active_of(model)
    for target in targets:
        if target not in present:
            linear: Any = model.get_submodule(target)
            linear.lora = Adapters(active)
            linear.register_forward_hook(_add, with_kwargs=True)
    return active


def _remove_hook(linear: nn.Module) -> None:
    """Undo `_add_hooks` on a linear that has no pairs any more."""
    part = getattr(linear, "lora", None)
    if isinstance(part, Adapters) and not part.pairs and not part.attached:
        remove_forward_hook(linear, _add)
        del linear.lora


def remove_adapter(model: nn.Module, name: str) -> None:
    """Remove an adapter; UserError where there is none of that name, or an answer under way uses it."""
    with changing(model):
        check_known(model, [name])
        active = active_of(model)
        if name in active.used:
            raise UserError(f"adapter {name!r} is used by an answer under way; end that answer, or cancel it, first")
        active.names = tuple(n for n in active.names if n != name)
        for target, part in adapted(model).items():
            part.pairs.pop(name, None)
            _remove_hook(model.get_submodule(target))


@contextmanager
def kept(model: nn.Module, rows: Sequence[RowSelection]) -> Iterator[None]:
    """Keep the adapters that rows name from being removed while a block runs; UserError where there is none of a name."""
    names = [name for name, *_ in map(names_in, rows) if name is not None]
    with CHANGING:
        check_known(model, names)
        used = active_of(model).used
        used += names
    try:
        yield
    finally:
        for name in names:
            used.remove(name)


def attach_pairs(model: nn.Module, pairs: Mapping[str, Pair], name: str) -> None:
    """Attach pairs to linears until `detach`; they act on the rows whose `RowSelection` names them."""
    with CHANGING:
        _add_hooks(model, pairs)
        parts = adapted(model)
        for target, pair in pairs.items():
            parts[target].attached = {**parts[target].attached, name: pair}


def detach(model: nn.Module, name: str) -> None:
    """Undo `attach_pairs` completely."""
    with CHANGING:
        active = active_of(model)
        active.edits = tuple(n for n in active.edits if n != name)
        for target, part in adapted(model).items():
            part.attached = {n: pair for n, pair in part.attached.items() if n != name}
            _remove_hook(model.get_submodule(target))


def activate(model: nn.Module, *names: str) -> None:
    """Activate these adapters, and no others, for every row; UserError where there is none of a name."""
    with changing(model):
        check_known(model, names)
        active_of(model).names = tuple(dict.fromkeys(names))


def selection_of(model: nn.Module, rows: Sequence[RowSelection], device: torch.device | str = "cpu") -> Selection | None:
    """The `Selection` for the selections of rows, None where no row has one of its own; UserError where there is no adapter of
    a name."""
    wanted = list(dict.fromkeys(selection for selection in rows if selection is not None))
    check_known(model, [name for name, *_ in map(names_in, wanted) if name is not None])
    if not wanted:
        return None
    if len(wanted) == 1 and None not in rows:
        return Selection((wanted[0],))
    indices = [0 if selection is None else wanted.index(selection) + 1 for selection in rows]
    return Selection(tuple(wanted), to_device(torch.tensor(indices), torch.device(device)))


def check_known(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse a name that no adapter has (UserError)."""
    known = adapter_names(model) if names else []  # to look for them takes a tenth of a step of a small model
    for name in names:
        if name not in known:
            raise UserError(f"there is no adapter {name!r}; the model's adapters are {', '.join(known) or 'none'}")


def low_rank(linear: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Factors of what active adapters add, for callers that use the linear's weight without calling it.

    Returns (scale * A x [..., r], B [out, r]) of all of them side by side, whose product is to be added to the output; None
    where none is active.
    """
    part = getattr(linear, "lora", None)
    pairs = part.pairs_of() if isinstance(part, Adapters) else []
    if not pairs:
        return None
    return torch.cat([pair.low(x) for pair in pairs], dim=-1), torch.cat([pair.up for pair in pairs], dim=1)


def fits(name: str, stored: Sequence[int], own: Sequence[int]) -> bool:
    """Whether a stored tensor can be used as the model's: it has its shape, or, for text tables and heads, fewer rows (the
    model then keeps its own rows for the ids that it was grown by)."""
    text = "text_" in name and len(stored) == 2 == len(own)
    return tuple(stored) == tuple(own) or (text and stored[0] < own[0] and stored[1] == own[1])
