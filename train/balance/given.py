"""Interface of the methods: their input from a step (`Given`), their state between steps, and their result (`MethodChoice`).

A task that is absent from a step, or whose row is zero, takes no part: methods get the others only, and its state stays as it
is.

Dimensions: m tasks, k of them present, P values of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from train.balance.rows import Rows, mixed


class State:
    """State of a method: tensors by name, with one entry per task in the first dimension (for `pairs`, in the first two)."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        self.values: dict[str, Tensor] = {}
        self.pairs: set[str] = set()


@dataclass
class Given:
    """Input of a method in one step, and access to its state.

    Attributes:
        losses: of the present tasks, summed over processes, [k] float64 on the CPU, without graph.
        rows: their gradients, where the level has any.
        others: their gradients of independent batches of the step, where the method needs them.
        settings: all settings of the method, defaults included.
        key: seed of the step's random draws.
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

    def generator(self) -> torch.Generator:
        """Make the generator of this step's draws: the same on every process, and on a resumed run."""
        return torch.Generator().manual_seed(self.key)

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
    factors: Tensor | None = field(default=None)

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
