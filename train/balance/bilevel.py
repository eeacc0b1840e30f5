"""Bilevel methods: the loss weights of a step on an inner batch are trained by the losses on an outer batch after it.

A method is given a `BilevelStep` and returns the gradient of the outer losses by the logits of the weights. A batch is a
function that runs the forward and returns the losses [m] (this process's share); gradients are taken by plain backward passes
into `grad`, so that DDP and FSDP2 work as usual. Parameters are changed on the way and restored at the end.

Dimensions: m tasks, k of them present, P values of the parameters that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from train.balance.registry import Setting, rate, register_method
from train.balance.rows import Rows, State, Sum, alone, is_sharded, local, put_gradients, summed, take_gradients
from train.balance.solvers import like, on_simplex, quadratic, solved, to_array

Batch = Callable[[], "Tensor | Sequence[Tensor]"]


@dataclass
class BilevelStep:
    """A step of a bilevel method: computes gradients, and moves and restores the parameters.

    Attributes:
        inner, outer: the batches.
        weights: of the tasks, [m].
        settings, state, steps: all settings of the method, its state, and the steps before this one.
        run, settled: see `Bilevel.update_weights`.
        result: the combined gradient [P], which a method that gives a direction (not `linear`) sets.
    """

    inner: Batch
    outer: Batch
    parameters: list[nn.Parameter]
    lr: float
    weights: Tensor
    settings: Mapping[str, Any]
    state: State
    steps: int
    reduce: Sum
    run: Callable[[Tensor], None]
    settled: Callable[[], None]
    result: Tensor | None = None

    def __post_init__(self) -> None:
        self.start = [local(p).detach().clone() for p in self.parameters]
        self.total = self.reduce if is_sharded(self.parameters) else alone

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the parameters at the end, and put the step's result, if any, into `grad`."""
        try:
            yield
        finally:
            self.restore()
            for p in self.parameters:
                p.grad = None
        if self.result is not None:
            put_gradients(self.parameters, self.result)

    @torch.no_grad()
    def restore(self) -> None:
        for p, value in zip(self.parameters, self.start, strict=True):
            local(p).copy_(value)

    @torch.no_grad()
    def move(self, by: Tensor) -> None:
        offset = 0
        for p in self.parameters:
            own = local(p)
            own.add_(by[offset : offset + own.numel()].view_as(own).to(own.dtype))
            offset += own.numel()

    def norm(self, vector: Tensor) -> float:
        return float(Rows(vector[None], self.total).norms())

    def values(self, batch: Batch) -> Tensor:
        """Losses of a batch without gradients, [m] float64 on the CPU."""
        with torch.no_grad():
            losses = summed(batch(), self.reduce)
        self.settled()
        return losses

    def gradient(self, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the weighted sum of the present losses, [P], and the losses, [m]."""
        losses = batch()
        values = summed(losses, self.reduce)
        parts = [w * loss for w, loss, v in zip(weights.tolist(), losses, values.tolist(), strict=True) if np.isfinite(v)]
        self.run(torch.stack(parts).sum() if parts else torch.stack(list(losses)).sum() * 0)
        return take_gradients(self.parameters), values

    def rows(self, batch: Batch) -> tuple[Rows, Tensor]:
        """One gradient per task, and the losses, [m]."""
        gradients: list[Tensor] = []
        values = torch.zeros(0)
        for task in range(len(self.weights)):
            losses = batch()
            values = summed(losses, self.reduce)
            self.run(losses[task])
            gradients.append(take_gradients(self.parameters))
        return Rows(torch.stack(gradients), self.total), values


class OuterGradient(NamedTuple):
    """Result of a bilevel method.

    Attributes:
        by_logits: gradient of the outer losses by the logits of the present tasks, [k].
        present: tasks that took part, [m] bool.
        rows: gradients of the outer losses, for the report, where the method has them.
    """

    by_logits: Tensor
    present: Tensor
    rows: Rows | None


@register_method(
    "autolambda",
    "loss",
    settings={"lr": rate(1e-3)},
    batches=2,
    ahead=True,
    bilevel=True,
    passes=lambda m, rest, settings: (5.0, 3.0),  # inner, outer, twice inner without gradients, and the step
)
def autolambda(step: BilevelStep) -> OuterGradient:
    """Auto-Lambda (Liu et al. 2022): the gradient of the outer losses by the weights, through one step of the parameters.

    It is computed by a central difference of length 0.01.
    """
    weights = step.weights
    gradient, losses = step.gradient(step.inner, weights)
    present = losses.isfinite()
    step.move(-step.lr * gradient)
    ahead, _ = step.gradient(step.outer, torch.ones_like(weights))
    step.restore()
    length = step.norm(ahead)
    if length == 0:  # the batches share no task, or the outer losses are at an optimum: the weights stay as they are
        return OuterGradient(torch.zeros(int(present.sum()), dtype=torch.float64), present, None)
    size = 0.01 / length
    step.move(size * ahead)
    up = step.values(step.inner)
    step.restore()
    step.move(-size * ahead)
    down = step.values(step.inner)
    change, shares = (up - down)[present] / (2 * size), weights[present]
    return OuterGradient(-step.lr * shares * (change - (shares * change).sum()), present, None)


@register_method(
    "moml",
    "loss",
    settings={"lr": rate(1e-3), "inner_lr": rate(0.1)},
    batches=2,
    ahead=True,
    bilevel=True,
    passes=lambda m, rest, settings: (2.0 * m + 1, 2.0 * m + 1),
)
def moml(step: BilevelStep) -> OuterGradient:
    """Multi-objective meta learning (Ye et al. 2021) with one inner step: the gradient of every outer loss by the logits.

    The logits follow the element of least norm in the convex hull of these gradients, each normalised.
    """
    inner_lr, weights = step.settings["inner_lr"], step.weights
    below, losses = step.rows(step.inner)
    present = losses.isfinite()
    below = below.take(present)
    softmax = weights.diag() - torch.outer(weights, weights)
    step.move(-inner_lr * (weights[present].to(below.values) @ below.values))
    above, _ = step.rows(step.outer)
    judged = above.take(present)
    table = -inner_lr * judged.gramian(below) @ softmax[present][:, present]
    table = table[table.norm(dim=1) > 0]  # a zero row would itself be the element of least norm
    table = table / table.norm(dim=1, keepdim=True)
    chosen = solved(on_simplex, table @ table.T) if len(table) else table.new_zeros(0)
    return OuterGradient(chosen @ table, present, above)


@register_method(
    "forum",
    "parameters",
    settings={
        "lr": rate(1e-3), "phi": rate(0.1), "inner_lr": rate(0.1), "inner_steps": Setting(5, low=1),
        "decay": Setting(0.75, high=1.0),
    },
    batches=2,
    linear=False,
    bilevel=True,
    passes=lambda m, rest, s: (s["inner_steps"] + 1.0 + m + rest, s["inner_steps"] + 0.0 + m + rest),  # inner steps, outer rows
)  # fmt: skip
def forum(step: BilevelStep) -> OuterGradient:
    """FORUM (Ye et al. 2024): first-order, over weights and parameters at once.

    q is the excess of the inner loss over its value after the inner steps; the direction follows the outer gradients, with
    a share of the gradient of q that makes q fall.
    """
    s, weights = step.settings, step.weights
    m = len(weights)
    first, losses = step.gradient(step.inner, weights)
    present = losses.isfinite()
    if not present.any():
        step.result = torch.zeros_like(first)
        return OuterGradient(torch.zeros(0, dtype=torch.float64), present, None)
    for i in range(s["inner_steps"]):
        inner = first if i == 0 else step.gradient(step.inner, weights)[0]
        step.move(-s["inner_lr"] * inner)
    ended = step.values(step.inner)
    step.restore()
    softmax = (weights.diag() - torch.outer(weights, weights))[:, present]
    by_logits = softmax @ (losses - ended)[present]
    outer_rows, _ = step.rows(step.outer)
    zero = outer_rows.norms() == 0  # a zero row would be the direction of least norm, and stop the others
    judged = present & ~zero if bool((present & ~zero).any()) else present
    rows = outer_rows.take(judged)
    rows = rows.times(1 / rows.norms().clamp_min(1e-300))
    alike = rows.statistic(rows.values @ first)
    square = by_logits.square().sum() + step.norm(first) ** 2 + 1e-8
    least = s["phi"] - alike / square
    whole = torch.zeros(len(rows) + 1, len(rows) + 1, dtype=torch.float64)
    whole[:-1, :-1], whole[:-1, -1], whole[-1, :-1] = rows.gramian(), alike, alike
    whole[-1, -1] = square - 1e-8
    chosen = like(_forum_weights(to_array(whole), to_array(least), float(s["phi"] * square)), whole)
    kept = step.state.values.setdefault("mixture", torch.zeros(m, dtype=torch.float64))
    kept[judged] += (chosen - kept[judged]) / (step.steps + 1) ** s["decay"]
    mixture = kept[judged]
    pull = (mixture @ least).clamp_min(0)
    step.result = mixture.to(rows.values) @ rows.values + pull.to(first) * first
    return OuterGradient((pull * by_logits)[present], present, outer_rows)


def _forum_weights(gramian: np.ndarray, least: np.ndarray, reward: float) -> np.ndarray:
    """The w [k] on the simplex that minimises |A'(w, v)|^2 - reward v where v >= least'w and v >= 0; `gramian` is A A'."""
    n = len(gramian)
    simplex = (np.append(np.ones(n - 1), 0.0)[None], np.ones(1))
    above = (np.vstack([np.eye(n), np.append(-least, 1.0)]), np.zeros(n + 1))
    return quadratic(2 * gramian, np.append(np.zeros(n - 1), -reward), simplex, above)[:-1]
