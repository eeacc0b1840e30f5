"""Imitates a balanced step (`train.trainer.balanced_step`) on fake tensors: as many passes, as many gradients held at once.

A pass for one task is a pass of a batch that is all that task's. Methods that need numbers (solvers, signs of losses) are
replaced by a weight for each task, which costs nothing; methods that keep gradients (`Method.keeps`) run their own code.

Dimensions: m balanced tasks, P values of the trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from omni.patterns import match_names
from omni.tasks import TASKS
from train.balance.config import BalanceConfig
from train.balance.given import MethodChoice
from train.balance.rows import Rows, put_gradients, take_gradients
from train.balance.section import balanced_tasks
from train.config.run import FitConfig
from train.data.batching.batch import Batch

Forward = Callable[[Batch], Tensor]
Backward = Callable[[Tensor], None]

Passes = tuple[float, float]
"""Forward and backward passes of a step, in those of a plain one."""


def rest_of(config: FitConfig) -> bool:
    """True where a step has losses that belong to no balanced task: of tasks that are not named, or of heads on the encoder."""
    section, objective = config.balance, config.objective
    assert section is not None
    names = balanced_tasks(section, config.data)
    return objective.by_heads or (section.tasks == "tasks" and not config.data.drawn <= set(names))


def count_of(config: FitConfig, streams: int) -> int:
    """The number m of balanced tasks; UserError where there are too few."""
    assert config.balance is not None
    return len(balanced_tasks(config.balance, config.data)) or streams


def passes_of(config: FitConfig, streams: int, world: int = 1) -> Passes:
    """Counts the passes of a step on each of `world` processes; see `train.trainer.balanced_step` and docs/balance.md."""
    section = config.balance
    if section is None:
        return 1.0, 1.0
    m, rest = count_of(config, streams), float(rest_of(config))
    kind = section.kind
    if kind.passes is not None:
        return kind.passes(m, rest, section.values)
    if section.at == "parameters":
        return m + rest, m + rest
    if section.at == "features" or kind.ahead:
        return 1.0, 1.0
    again = 1.0 if config.data.micro_batches > world else 0.0  # a pass without gradients first
    after = 1.0 if kind.after is not None and kind.again(section.values) else 0.0
    return 1.0 + again + after, 1.0


def micro_batches_of(config: FitConfig, micro_batches: int) -> int:
    """Micro-batches of one process in a planned step: at most two, as more need no more memory, or one in each part of a method
    that splits a step in three."""
    return 3 if config.balance is not None and config.balance.kind.batches == 3 else min(2, micro_batches)


class TracedBalance:
    """Runs the passes of a balanced step on tensors without values.

    Args:
        learning: trainable parameters, by the model's names.
        note: called with each tensor that is a gradient or is kept, and its part.
    """

    def __init__(
        self,
        config: FitConfig,
        learning: Sequence[tuple[str, nn.Parameter]],
        streams: int,
        note: Callable[[Tensor, str], None],
    ) -> None:
        assert config.balance is not None
        self.section, self.note = config.balance, note
        self.m, self.rest = count_of(config, streams), rest_of(config)
        apart = match_names(self.section.separate, [name for name, _ in learning], "balance.separate", strict=False)
        self.shared = [p for name, p in learning if name not in apart]
        self.own = [p for name, p in learning if name in apart]
        self.kept: dict[str, Tensor] = {}

    def prepare(self) -> None:
        """Creates what the method keeps from its first step on."""
        if self.section.at == "parameters" and self.section.kind.keeps:
            self._choose(Rows(torch.empty(self.m, sum(p.numel() for p in self.shared))))

    def take(self, batches: Sequence[Batch], forward: Forward, backward: Backward) -> None:
        """Runs all passes of a step; gradients are in `grad` afterwards.

        Args:
            forward: the loss of a batch.
            backward: its backward pass; what is made between that and the next forward counts as the balance's.
        """
        if self.section.kind.bilevel:
            self._bilevel(batches[0], forward, backward)
        elif self.section.at == "parameters":
            self._by_parameters(batches, forward, backward)
        else:
            for batch in batches:
                backward(forward(batch))

    def _put(self, parameters: Sequence[nn.Parameter], vector: Tensor) -> None:
        put_gradients(parameters, vector)
        for p in parameters:
            if p.grad is not None:
                self.note(p.grad, "gradients")

    def _rest(self, batches: Sequence[Batch], forward: Forward, backward: Backward) -> None:
        for batch in batches if self.rest else ():
            backward(forward(batch))

    def _by_parameters(self, batches: Sequence[Batch], forward: Forward, backward: Backward) -> None:
        def gathered(some: Sequence[Batch]) -> tuple[Rows, Tensor]:
            tables = []
            for _ in range(self.m):
                for batch in some:
                    backward(forward(batch))
                tables.append((take_gradients(self.shared), take_gradients(self.own) if self.own else torch.zeros(0)))
            rows, rest = (torch.stack(part) for part in zip(*tables, strict=True))
            return Rows(rows), rest

        parts = self.section.kind.batches
        found = [gathered(batches[: max(1, len(batches) // parts)]) for _ in range(parts)]
        rows, rest = found[0]
        choice = self._choose(rows)
        self._put(self.shared, choice.combine(rows))
        if self.own:
            self._put(self.own, torch.ones(self.m) @ rest)
        self._rest(batches, forward, backward)

    def _choose(self, rows: Rows) -> MethodChoice:
        if not self.section.kind.keeps:
            rows.gramian()
            return MethodChoice(torch.ones(self.m, dtype=torch.float64))
        given: Any = _TracedGiven(rows, self.m, self.section, self.kept)
        choice = self.section.kind.rule(given)
        for value in self.kept.values():
            self.note(value, "balance")
        return choice

    def _bilevel(self, batch: Batch, forward: Forward, backward: Backward) -> None:
        """Follows the code of `train.balance.bilevel`; the held-out batch is as full as the step's."""
        learning, holds, values = [*self.shared, *self.own], self.section.kind.holds, self.section.values

        def gradient() -> Tensor:
            backward(forward(batch))
            return take_gradients(learning)

        def rows() -> Rows:
            return Rows(torch.stack([gradient() for _ in range(self.m)]))

        def blank() -> None:
            with torch.no_grad():
                forward(batch)

        start = [p.detach().clone() for p in learning]
        weights, result = torch.ones(self.m), None
        if holds == "two":
            step, ahead = gradient(), gradient()
            blank()
            del step, ahead
        elif holds == "rows":
            below = rows()
            moved = weights @ below.values
            above = rows()
            del moved, above, below
        else:
            first = gradient()
            for _ in range(int(values.get("inner_steps", 1)) - 1):
                gradient()
            blank()
            above = rows()
            unit = above.times(weights)
            result = weights @ unit.values + 1.0 * first
            del above, unit, first
        del start
        if result is None:
            backward(forward(batch))
        else:
            self._put(learning, result)
            del result
            self._rest([batch], forward, backward)


class _TracedGiven(SimpleNamespace):
    """A `train.balance.given.Given` with every task present, whose kept tensors have no values."""

    def __init__(self, rows: Rows, m: int, config: BalanceConfig, kept: dict[str, Tensor]) -> None:
        super().__init__(rows=rows, losses=torch.ones(m, dtype=torch.float64), settings=config.values, kept=kept)
        self.state = SimpleNamespace(tasks=m)

    def get(self, name: str, initial: float | Tensor) -> Tensor:
        """A copy, as indexing by the present tasks makes it."""
        if name not in self.kept:
            entry = initial if isinstance(initial, Tensor) else torch.tensor(initial, dtype=torch.float64)
            self.kept[name] = entry.expand(self.state.tasks, *entry.shape).clone()
        return self.kept[name].clone()

    def set(self, name: str, value: Tensor) -> None:
        self.kept[name].copy_(value)

    def count(self) -> Tensor:
        return self.get("steps", 0.0) + 1


class _Hooked(torch.autograd.Function):
    """Makes the tensors that `train.balance.feature_hook` makes in the backward pass of features [N, C]."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.save_for_backward(features)
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        values = gradient.float() / 1.0
        every = torch.empty_like(values)
        product = gradient.float() * every
        return torch.where(every == 0, 0.0, product).to(gradient.dtype)


def add_feature_hook(part: nn.Module) -> None:
    """Passes the gradient of a module's output through a feature hook."""
    part.register_forward_hook(lambda _, args, out: _Hooked.apply(out) if torch.is_grad_enabled() else out)


def assign_tasks(task: Tensor, config: FitConfig) -> Tensor:
    """Gives the positions [R, T] of a batch the balanced tasks in turn, so that none is absent."""
    assert config.balance is not None
    names = balanced_tasks(config.balance, config.data)
    if not names:
        return task
    numbers = torch.tensor([list(TASKS).index(name) for name in names])
    return numbers[torch.arange(task.numel()) % len(names)].view_as(task)
