"""What a method gets of a step (`MethodInput`), keeps (`State`) and returns (`MethodChoice`): losses, and gradients of the
tasks as the rows of a matrix, by shared parameters or shared features; moved from and to `grad`.

A task that is absent from a step, or whose row is zero, takes no part: methods get the others only, and its state stays as it
is.

Dimensions: m tasks, k of them present, P values that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

_PIECES = 16

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over processes (in place or not); returns the tensor itself where there is one process."""


def alone(values: Tensor) -> Tensor:
    """Return the tensor: its sum over processes where there is one process."""
    return values


def summed(losses: Tensor | Sequence[Tensor], reduce: Sum) -> Tensor:
    """Sum the losses [m] over processes: the step's losses, float64 on the CPU, without graph."""
    values = losses.detach().clone() if isinstance(losses, Tensor) else torch.stack([x.detach() for x in losses])
    return reduce(values.to(torch.promote_types(values.dtype, torch.float32))).to("cpu", torch.float64)


@dataclass
class Rows:
    """One gradient per task, as the rows of a matrix.

    Attributes:
        values: [m, P], of at least fp32.
        total: sums a statistic over the processes that hold other values (shards) of the same rows; `alone` where each process
            holds all values.
    """

    values: Tensor
    total: Sum = alone

    def __len__(self) -> int:
        return len(self.values)

    def gramian(self, other: Rows | None = None) -> Tensor:
        """Compute the inner products [m, m] of the rows with each other, or with those of another batch; float64 on the CPU."""
        right = self if other is None else other
        dtype, pieces = _pieces(self.values)
        products = torch.zeros(len(self), len(right), dtype=dtype, device=self.values.device)
        for columns in pieces:
            piece = self.values[:, columns].to(products)
            products += piece @ (piece if right is self else right.values[:, columns].to(products)).T
        return self.statistic(products)

    def statistic(self, values: Tensor) -> Tensor:
        """Complete a sum over this process's values by those of the other processes; float64 on the CPU."""
        return self.total(values).to("cpu", torch.float64)

    def norms(self) -> Tensor:
        """Norms of the rows, [m] float64 on the CPU."""
        return self.statistic(self.values.square().sum(1)).sqrt()

    def take(self, present: Tensor) -> Rows:
        """Select the rows of the tasks in `present`, [m] bool."""
        return self if bool(present.all()) else Rows(self.values[present.to(self.values.device)], self.total)

    def times(self, weights: Tensor) -> Rows:
        """Multiply every row by its weight [m]."""
        return Rows(self.values * weights.to(self.values)[:, None], self.total)


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Sum rows [m, P] times their weights [m] to [P]; in float64, as large weights may cancel each other."""
    dtype, pieces = _pieces(values)
    weights, mixture = weights.to(values.device, dtype), values.new_empty(values.shape[1])
    for columns in pieces:
        mixture[columns] = (weights @ values[:, columns].to(weights)).to(mixture)
    return mixture


def _pieces(values: Tensor) -> tuple[torch.dtype, Iterator[slice]]:
    """The dtype that sums of [m, P] are exact in, and slices of the columns, so that a copy of one slice in it is small."""
    width = max(-(-values.shape[1] // _PIECES), 4096)
    dtype = torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64
    return dtype, (slice(start, start + width) for start in range(0, values.shape[1], width))


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    return any(isinstance(p, DTensor) for p in parameters)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Concatenate gradients to one vector [P], of at least fp32; zeros where a parameter has none."""
    parts = []
    for p, g in zip(parameters, gradients, strict=True):
        gradient = torch.zeros_like(local(p)) if g is None else local(g).detach()
        parts.append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)).flatten())
    return torch.cat(parts)


def take_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Take the parameters' `grad` away, and return it as one vector [P]."""
    row = flat(parameters, [p.grad for p in parameters])
    for p in parameters:
        p.grad = None
    return row


@torch.no_grad()
def put_gradients(parameters: Sequence[nn.Parameter], vector: Tensor) -> None:
    """Add a vector [P] to the parameters' `grad`."""
    start = 0
    for p in parameters:
        own = local(p)
        part = vector[start : start + own.numel()].view_as(own).to(own.dtype)
        start += own.numel()
        if p.grad is not None:
            local(p.grad).add_(part)
        elif isinstance(p, DTensor):
            p.grad = DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        else:
            p.grad = part.clone()


@dataclass
class State:
    """State of a method: tensors by name, with one entry per task in the first dimension (for `pairs`, in the first two)."""

    tasks: int
    values: dict[str, Tensor] = field(default_factory=dict)
    pairs: set[str] = field(default_factory=set)


@dataclass
class MethodInput:
    """Input of a method in one step, and access to its state.

    Attributes:
        losses: of the present tasks, summed over processes, [k] float64 on the CPU, without graph.
        rows: their gradients, where the level has any.
        others: their gradients of independent batches of the step, where the method needs them.
        settings: all settings of the method, defaults included.
        key: seed of the step's random draws, the same in every process, and in a resumed run.
        present: which tasks take part, [m] bool.
    """

    losses: Tensor
    rows: Rows
    others: tuple[Rows, ...]
    settings: Mapping[str, Any]
    key: int
    present: Tensor
    state: State

    def get(self, name: str, initial: float | Tensor, pairs: bool = False) -> Tensor:
        """Copy the present tasks' state `name`, [k, ...] ([k, k] of pairs); `initial` is a task's entry before any `set`."""
        values = self.state.values
        if name not in values:
            entry = torch.as_tensor(initial, dtype=None if isinstance(initial, Tensor) else torch.float64)
            shape = (self.state.tasks, self.state.tasks) if pairs else (self.state.tasks,)
            values[name] = entry.expand(*shape, *entry.shape).clone()
        if pairs:
            self.state.pairs.add(name)
        if isinstance(initial, Tensor):
            values[name] = values[name].to(initial.device)
        here = self.present.to(values[name].device)
        return values[name][here][:, here] if pairs else values[name][here]

    def set(self, name: str, value: Tensor) -> None:
        """Store the present tasks' state `name`, which an earlier `get` has made."""
        stored = self.state.values[name]
        here = self.present.to(stored.device)
        if name in self.state.pairs:
            stored[here.nonzero(), here.nonzero().T] = value.to(stored)
        else:
            stored[here] = value.to(stored)

    def count(self) -> Tensor:
        """Count and return the steps of each present task, this one included, [k]."""
        steps = self.get("steps", 0.0) + 1
        self.set("steps", steps)
        return steps

    def adam(self, name: str, gradient: Tensor, initial: float, lr: float, weight_decay: float = 0.0) -> None:
        """Update the state `name` [k] by one step of Adam; every task counts its own steps."""
        parts = {key: self.get(f"{name}/{key}", 0.0) for key in ("first", "second", "step")}
        value = self.get(name, initial)
        lists = [list(x.unbind()) for x in (value, gradient.to(value), *parts.values())]
        adam(
            lists[0], lists[1], lists[2], lists[3], [], lists[4], foreach=False, amsgrad=False, beta1=0.9, beta2=0.999,
            lr=lr, weight_decay=weight_decay, eps=1e-8, maximize=False,
        )  # fmt: skip
        self.set(name, value)
        for key, tensor in parts.items():
            self.set(f"{name}/{key}", tensor)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Seed the CPU's global generator for this step's draws, and restore it at the end."""
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(self.key)
        try:
            yield
        finally:
            torch.set_rng_state(before)


@dataclass
class MethodChoice:
    """Result of a method.

    Attributes:
        weights: of the present tasks, [k].
        direction: the combined gradient [P], where it is not the rows times the weights.
        factors: factors of all values of the rows, [k, P], where they are not the weights alone.
    """

    weights: Tensor
    direction: Tensor | None = None
    factors: Tensor | None = None

    def combine(self, rows: Rows) -> Tensor:
        """Combine the rows to one gradient [P]."""
        if self.direction is not None:
            return self.direction
        if self.factors is not None:
            return (self.factors * rows.values).sum(0)
        return mixed(self.weights, rows.values)

    def spread(self, asked: Tensor) -> MethodChoice:
        """Extend the result to n tasks, of which the method was given those in `asked` [n] bool; the others get weight 0."""

        def among(values: Tensor) -> Tensor:
            more = values.new_zeros(len(asked), *values.shape[1:])
            more[asked.to(values.device)] = values
            return more

        return MethodChoice(among(self.weights), self.direction, None if self.factors is None else among(self.factors))
