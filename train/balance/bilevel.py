"""Bilevel methods: the loss weights of a step on an inner batch are trained by the losses on an outer batch after it.

Weights are softmax(w), and w is trained by Adam. A batch is a function that runs the forward and returns the losses [m] (this
process's share); gradients are taken by plain backward passes into `grad`, so that DDP and FSDP2 work as usual. Parameters are
changed on the way and restored at the end.

Dimensions: m tasks, P values of the parameters that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from train.balance.chooser import BalanceReport, Chooser, summed
from train.balance.rows import Rows, Sum, alone, is_sharded, local, put_gradients, take_gradients
from train.balance.solvers import like, on_simplex, quadratic, solved, to_array

Batch = Callable[[], "Tensor | Sequence[Tensor]"]


class Bilevel(Chooser):
    """Balances the tasks by the bilevel methods `autolambda`, `moml` and `forum`.

    A step is `update_weights(inner, outer, parameters, lr)`, then, for the first two, one backward of the losses times the
    weights that it returned; `forum` leaves the whole gradient of the step in `grad`. Tasks that are absent from `inner` are
    left out.
    """

    BILEVEL = True

    def ahead(self) -> Tensor:
        """The current weights, [m]."""
        return self._logits().softmax(0)

    def update_weights(
        self,
        inner: Batch,
        outer: Batch,
        parameters: Sequence[nn.Parameter],
        lr: float,
        reduce: Sum = alone,
        run: Callable[[Tensor], None] = torch.Tensor.backward,
        settled: Callable[[], None] = lambda: None,
    ) -> BalanceReport:
        """Update the weights by one step; the report has the weights after it, and the outer gradients' norms and cosines.

        Args:
            lr: the optimizer's learning rate, for the step ahead of `autolambda`.
            run: calls backward; `grad` must hold the sum over processes after it. With plain backward, `reduce` sums.
            settled: called after a forward without backward, before parameters change: FSDP2 must free the root's whole ones.
        """
        work = _Work(self, list(parameters), reduce, run, settled)
        with work.restored():
            return {"autolambda": self._autolambda, "moml": self._moml, "forum": self._forum}[self.config.method](
                work, inner, outer, lr
            )

    def _logits(self) -> Tensor:
        m = len(self.tasks)
        return self.state.values.setdefault("logits", torch.full((m,), 1 / m, dtype=torch.float64))

    def _step(self, gradient: Tensor, present: Tensor, rows: Rows | None) -> BalanceReport:
        """Update the logits by Adam with their gradient [k], and report."""
        self._logits()
        given = self.given(torch.ones(len(present), dtype=torch.float64), present, rows, ())
        given.adam("logits", gradient, 1 / len(self.tasks), self.config.values["lr"])
        self.steps += 1
        self.absences += ~present
        m = len(present)
        norms, cosines = torch.full((m,), torch.nan), torch.full((m, m), torch.nan)
        if rows is not None:
            gramian = rows.gramian()
            norms = gramian.diagonal().clamp_min(0).sqrt()
            cosines = (gramian / (norms[:, None] * norms).clamp_min(1e-300)).clamp(-1, 1)
        weights = torch.where(present, self._logits().softmax(0), 0.0)
        return BalanceReport(weights, norms.float(), cosines.float(), (~present).long(), torch.zeros(m, dtype=torch.int64))

    def _autolambda(self, work: _Work, inner: Batch, outer: Batch, lr: float) -> BalanceReport:
        """Auto-Lambda (Liu et al. 2022): the gradient of the outer losses by the weights, through one step of the parameters.

        It is computed by a central difference of length 0.01.
        """
        weights = self.ahead()
        step, losses = work.gradient(inner, weights)
        present = losses.isfinite()
        work.move(-lr * step)
        (ahead, _) = work.gradient(outer, torch.ones_like(weights))
        work.restore()
        length = work.norm(ahead)
        if length == 0:  # the batches share no task, or the outer losses are at an optimum: the weights stay as they are
            return self._step(torch.zeros(int(present.sum()), dtype=torch.float64), present, None)
        size = 0.01 / length
        work.move(size * ahead)
        up = work.values(inner)
        work.restore()
        work.move(-size * ahead)
        down = work.values(inner)
        change = (up - down)[present] / (2 * size)
        shares = weights[present]
        return self._step(-lr * shares * (change - (weights[present] * change).sum()), present, None)

    def _moml(self, work: _Work, inner: Batch, outer: Batch, lr: float) -> BalanceReport:
        """Multi-objective meta learning (Ye et al. 2021) with one inner step: the gradient of every outer loss by the logits.

        The logits follow the element of least norm in the convex hull of these gradients, each normalised.
        """
        rate, weights = self.config.values["inner_lr"], self.ahead()
        below, losses = work.rows(inner)
        present = losses.isfinite()
        below = below.take(present)
        softmax = weights.diag() - torch.outer(weights, weights)
        work.move(-rate * (weights[present].to(below.values) @ below.values))
        above, _ = work.rows(outer)
        judged = above.take(present)
        table = -rate * judged.gramian(below) @ softmax[present][:, present]
        table = table[table.norm(dim=1) > 0]  # a zero row would itself be the element of least norm
        table = table / table.norm(dim=1, keepdim=True)
        chosen = solved(on_simplex, table @ table.T) if len(table) else table.new_zeros(0)
        return self._step(chosen @ table, present, above)

    def _forum(self, work: _Work, inner: Batch, outer: Batch, lr: float) -> BalanceReport:
        """FORUM (Ye et al. 2024): first-order, over weights and parameters at once.

        q is the excess of the inner loss over its value after the inner steps; the direction follows the outer gradients, with
        a share of the gradient of q that makes q fall.
        """
        s, weights = self.config.values, self.ahead()
        rate, m = s["inner_lr"], len(weights)
        first, losses = work.gradient(inner, weights)
        present = losses.isfinite()
        if not present.any():
            work.result = torch.zeros_like(first)
            return self._step(torch.zeros(0, dtype=torch.float64), present, None)
        for i in range(s["inner_steps"]):
            step = first if i == 0 else work.gradient(inner, weights)[0]
            work.move(-rate * step)
        ended = work.values(inner)
        work.restore()
        softmax = (weights.diag() - torch.outer(weights, weights))[:, present]
        by_logits = softmax @ (losses - ended)[present]
        outer_rows, _ = work.rows(outer)
        zero = outer_rows.norms() == 0  # a zero row would be the direction of least norm, and stop the others
        judged = present & ~zero if bool((present & ~zero).any()) else present
        rows = outer_rows.take(judged)
        rows = rows.times(1 / rows.norms().clamp_min(1e-300))
        alike = rows.statistic(rows.values @ first)
        square = by_logits.square().sum() + work.norm(first) ** 2 + 1e-8
        least = s["phi"] - alike / square
        whole = torch.zeros(len(rows) + 1, len(rows) + 1, dtype=torch.float64)
        whole[:-1, :-1], whole[:-1, -1], whole[-1, :-1] = rows.gramian(), alike, alike
        whole[-1, -1] = square - 1e-8
        chosen = like(_forum_weights(to_array(whole), to_array(least), float(s["phi"] * square)), whole)
        kept = self.state.values.setdefault("mixture", torch.zeros(m, dtype=torch.float64))
        kept[judged] += (chosen - kept[judged]) / (self.steps + 1) ** s["decay"]
        mixture = kept[judged]
        pull = (mixture @ least).clamp_min(0)
        work.result = mixture.to(rows.values) @ rows.values + pull.to(first) * first
        return self._step((pull * by_logits)[present], present, outer_rows)


def _forum_weights(gramian: np.ndarray, least: np.ndarray, reward: float) -> np.ndarray:
    """The w [k] on the simplex that minimises |A'(w, v)|^2 - reward v where v >= least'w and v >= 0; `gramian` is A A'."""
    n = len(gramian)
    simplex = (np.append(np.ones(n - 1), 0.0)[None], np.ones(1))
    above = (np.vstack([np.eye(n), np.append(-least, 1.0)]), np.zeros(n + 1))
    return quadratic(2 * gramian, np.append(np.zeros(n - 1), -reward), simplex, above)[:-1]


class _Work:
    """Computes gradients, and moves and restores the parameters, within one step."""

    def __init__(
        self,
        balancer: Bilevel,
        parameters: list[nn.Parameter],
        reduce: Sum,
        run: Callable[[Tensor], None],
        settled: Callable[[], None],
    ) -> None:
        self.parameters, self.reduce, self.run, self.settled = parameters, reduce, run, settled
        self.balancer = balancer
        self.start = [local(p).detach().clone() for p in parameters]
        self.result: Tensor | None = None
        self.sharded = is_sharded(parameters)
        self.total = reduce if self.sharded else alone
        self.summed = self.sharded or run is not torch.Tensor.backward

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
        place = 0
        for p in self.parameters:
            own = local(p)
            own.add_(by[place : place + own.numel()].view_as(own).to(own.dtype))
            place += own.numel()

    def norm(self, vector: Tensor) -> float:
        return float(Rows(vector[None], self.total).norms())

    def values(self, batch: Batch) -> Tensor:
        """Losses of a batch without gradients, [m] float64 on the CPU."""
        with torch.no_grad():
            found = summed(batch(), self.reduce)
        self.settled()
        return found

    def gradient(self, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the weighted sum of the present losses, [P], and the losses, [m]."""
        losses = batch()
        values = summed(losses, self.reduce)
        parts = [w * loss for w, loss, v in zip(weights.tolist(), losses, values.tolist(), strict=True) if np.isfinite(v)]
        self.run(torch.stack(parts).sum() if parts else torch.stack(list(losses)).sum() * 0)
        vector = take_gradients(self.parameters)
        return (vector if self.summed else self.reduce(vector)), values

    def rows(self, batch: Batch) -> tuple[Rows, Tensor]:
        """One gradient per task, and the losses, [m]."""
        found: list[Tensor] = []
        values = torch.zeros(0)
        for task in range(len(self.balancer.tasks)):
            unit = torch.zeros(len(self.balancer.tasks))
            unit[task] = 1
            losses = batch()
            values = summed(losses, self.reduce)
            self.run(losses[task])
            found.append(take_gradients(self.parameters))
        table = torch.stack(found)
        return Rows(table if self.summed else self.reduce(table), self.total), values
