"""Balances the tasks of a run: weighs losses, or combines gradients.

A step's calls depend on the level:

    loss        `weights(losses)` gives the weights for one backward of their weighted sum; where `ahead()` is not None it is
                known before the step's losses, and several micro-batches may be run through with it.
    features    `train.balance.feature_hook.FeatureHook` between encoder and decoder calls `choose`, within the one backward.
    parameters  `gather` runs one backward per task and micro-batch, and `combine` puts the combined gradient into `grad`.
                `backward` does both for losses whose graph allows several backward passes, outside of DDP and FSDP.

Losses are this process's share of the step's: divided by counts of the whole step, so that their sum over processes (`reduce`)
is the step's loss. Nothing nonlinear is done before that sum: the choice does not depend on the number of processes.

Dimensions: m tasks, k of them present, P values that this process holds, N positions, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from train.balance.bilevel import Bilevel
from train.balance.chooser import BalanceReport, Chooser
from train.balance.config import BalanceConfig
from train.balance.rows import Rows, Sum, alone, flat, is_sharded, mixed, put_gradients, summed, take_gradients


class Balancer(Chooser):
    """Combines the tasks of each step.

    Raises:
        UserError: fewer than two tasks, or more than can be balanced.
    """

    # --- weights of losses ----------------------------------------------------------------------------------------------

    def ahead(self) -> Tensor | None:
        """Weights of all tasks [m] that the next step will use; None where they depend on its losses."""
        if not self.config.kind.ahead:
            return None
        probe = Balancer(self.config, self.tasks)
        probe.load_state_dict(self.state_dict())
        return probe.choose(torch.ones(len(self.tasks), dtype=torch.float64), None)[0].weights

    def weights(self, losses: Tensor | Sequence[Tensor], counts: Tensor | None = None, reduce: Sum = alone) -> BalanceReport:
        """Choose the weights of a step by its losses [m] alone, and update the method's state.

        Args:
            losses: this process's share of the step's losses, all micro-batches together; their graph is not touched.
            counts: targets of each task in the whole step, [m]; a task without any is absent. So is one whose loss is nan.
        """
        if self.config.at != "loss":
            raise ValueError(f"{self.config.method} is at level {self.config.at}: it has no weights without gradients")
        return self.choose(summed(losses, reduce), counts)[1]

    def total(self, losses: Sequence[Tensor] | Tensor, report: BalanceReport) -> Tensor:
        """Sum the losses of the present tasks, times their weights: the loss to call `backward` on."""
        parts = [w * loss for w, loss in zip(report.weights.tolist(), losses, strict=True) if w != 0]
        return torch.stack(parts).sum() if parts else torch.stack(list(losses)).sum() * 0

    def after(self, losses: Tensor | Sequence[Tensor], reduce: Sum = alone, counts: Tensor | None = None) -> None:
        """Update a method that has `after` by the losses [m] after the optimizer's step; others do nothing.

        The losses are of the same batch, or, unless its `again` says so, of the next one before its step; `counts` are then
        that batch's targets. Tasks that were absent from the step are left out.
        """
        if self.config.kind.after is None:
            return
        values = summed(losses, reduce)
        given = self.given(values, self.last & self.present(values, counts), None, ())
        if len(given.losses):
            self.config.kind.after(given)

    # --- gradients ------------------------------------------------------------------------------------------------------

    def backward(
        self,
        losses: Tensor | Sequence[Tensor],
        shared: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter] = (),
        reduce: Sum = alone,
        counts: Tensor | None = None,
        others: Sequence[Tensor | Sequence[Tensor]] = (),
        features: Sequence[Tensor] = (),
    ) -> BalanceReport:
        """Fill `grad` of the shared and the own parameters from losses [m] whose graph allows several backward passes.

        Gradients are summed over processes here (sharded parameters are refused: use `gather`).

        Args:
            others: losses of independent batches, where the method needs them.
            features: the shared representations [..., C] between the shared parameters and the losses, for level `features`.
        """
        if is_sharded(shared):
            raise ValueError("backward cannot take sharded parameters one task at a time; use gather and combine")
        shared, own = list(shared), list(own)
        values = summed(losses, reduce)
        present = self.present(values, counts)
        if self.config.at == "loss":
            report = self.choose(values, counts)[1]
            learn = [*shared, *own]
            found = torch.autograd.grad(self.total(losses, report), learn, allow_unused=True)
            put_gradients(learn, reduce(flat(learn, found)))
            return report
        if self.config.at == "features":
            return self._through(losses, values, counts, present, shared, own, features, reduce)
        together = [*shared, *own]
        tables = []
        for which in (losses, *others):
            jacobian = []
            for loss, here in zip(which, present.tolist(), strict=True):
                jacobian.append(flat(together, _differentiate(loss, together, here)))
            tables.append(reduce(torch.stack(jacobian)))
        width = sum(p.numel() for p in shared)
        rows = tuple(Rows(table[:, :width]) for table in tables)
        choice, report = self.choose(values, counts, rows[0], rows[1:])
        here = report.absent == 0
        put_gradients(shared, choice.combine(rows[0].take(here)))
        if own:
            put_gradients(own, mixed(self._own(report), tables[0][here.to(tables[0].device)][:, width:]))
        return report

    def _own(self, report: BalanceReport) -> Tensor:
        """Factors of the present tasks' gradients of the own parameters, [k]; 1 where the row is zero, so that no weight was
        chosen."""
        weights = torch.where(report.zero == 1, 1.0, report.weights)[report.absent == 0]
        return weights if self.config.own == "weighted" else torch.ones_like(weights)

    def _through(
        self,
        losses: Tensor | Sequence[Tensor],
        values: Tensor,
        counts: Tensor | None,
        present: Tensor,
        shared: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter],
        features: Sequence[Tensor],
        reduce: Sum,
    ) -> BalanceReport:
        """Take rows from the features' gradients, then run one backward of their combination into the shared parameters."""
        if not features:
            raise ValueError("level features needs the shared representations")
        wanted, parts, tables, rests = [*features, *own], [], [], []
        for loss, here in zip(losses, present.tolist(), strict=True):
            found = _differentiate(loss, wanted, here)
            own_part = flat(own, found[len(features) :]) if own else torch.zeros(0)
            gradients = [torch.zeros_like(f) if g is None else g for f, g in zip(features, found, strict=False)]
            parts.append(gradients)
            tables.append(torch.cat([self.channels(f, g) for f, g in zip(features, gradients, strict=True)]))
            rests.append(own_part)
        rows = Rows(reduce(torch.stack(tables)))
        choice, report = self.choose(values, counts, rows)
        here = report.absent == 0
        factors = choice.weights[:, None] if choice.factors is None else choice.factors
        chosen = [part for part, kept in zip(parts, here.tolist(), strict=True) if kept]
        combined, start = [torch.zeros_like(f) for f in features], 0
        for i, feature in enumerate(features):
            columns = slice(None) if choice.factors is None else slice(start, start + feature.shape[-1])
            start += feature.shape[-1]
            for gradients, factor in zip(chosen, factors, strict=True):
                combined[i] += gradients[i] * factor[columns].to(combined[i])
        learn = list(shared)
        put_gradients(learn, reduce(flat(learn, torch.autograd.grad(features, learn, combined, allow_unused=True))))
        if own:
            rest = reduce(torch.stack(rests))
            put_gradients(own, mixed(self._own(report), rest[here.to(rest.device)]))
        return report

    def channels(self, features: Tensor, gradients: Tensor) -> Tensor:
        """Sum a gradient of features [..., C] over positions, [C] fp32; for methods with `signs` times the features' signs."""
        signed = gradients.float() * features.detach().sign() if self.config.kind.signs else gradients.float()
        return signed.reshape(-1, features.shape[-1]).sum(0)

    def gather(
        self,
        passes: Sequence[Callable[[int], Tensor]],
        shared: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter] = (),
        reduce: Sum = alone,
        run: Callable[[Tensor], None] | None = None,
        around: Callable[[bool], AbstractContextManager[Any]] = lambda more: nullcontext(),
        scale: float = 1.0,
        present: Tensor | None = None,
    ) -> tuple[Rows, Tensor, Tensor]:
        """Compute one gradient per task by plain backward passes into `grad`: DDP, FSDP2 and checkpointing work as usual.

        Each of the `passes` is a micro-batch: it runs the forward for a task, given by its number, and returns its loss.

        Args:
            run: calls backward on a loss; `grad` must hold the sum over processes times `scale` after a task's last
                micro-batch. By default plain backward, and `reduce` sums the rows of parameters that are not sharded.
            around: context entered around each forward and backward; its argument is true where another micro-batch of the
                task follows, so that gradients need no exchange yet.
            scale: of the gradients (a loss scaler's).
            present: tasks to run, [m] bool, the same on all processes; all by default.

        Returns:
            rows [m, P] of the shared parameters (zeros for tasks not run), those of the own ones [m, P'], and this process's
            losses, [m].
        """
        shared, own = list(shared), list(own)
        m = len(self.tasks)
        wanted = [True] * m if present is None else present.tolist()
        for p in [*shared, *own]:
            p.grad = None
        losses: Tensor | None = None
        tables: list[tuple[Tensor, Tensor]] = []
        for task in range(m):
            for i, forward in enumerate(passes if wanted[task] else ()):
                with around(i + 1 < len(passes)):
                    loss = forward(task)
                    losses = loss.detach().new_zeros(m) if losses is None else losses
                    losses[task] += loss.detach()
                    if run is not None:
                        run(loss)
                    elif loss.requires_grad:
                        loss.backward()
            tables.append((take_gradients(shared, scale), take_gradients(own, scale) if own else torch.zeros(0)))
        rows, rest = (torch.stack(part) for part in zip(*tables, strict=True))
        if run is None and not is_sharded(shared):
            rows, rest = reduce(rows), reduce(rest) if own else rest
        return Rows(rows, reduce if is_sharded(shared) else alone), rest, torch.zeros(m) if losses is None else losses

    def combine(
        self,
        losses: Tensor,
        rows: Rows,
        shared: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter] = (),
        rest: Tensor | None = None,
        reduce: Sum = alone,
        counts: Tensor | None = None,
        others: Sequence[Rows] = (),
        scale: float = 1.0,
    ) -> BalanceReport:
        """Combine the rows of `gather` (`others`: those of further batches), and add the result, times `scale`, to `grad`."""
        choice, report = self.choose(summed(losses, reduce), counts, rows, tuple(others))
        here = report.absent == 0
        put_gradients(shared, choice.combine(rows.take(here)), scale)
        if own and rest is not None:
            put_gradients(own, mixed(self._own(report), rest[here.to(rest.device)]), scale)
        return report


def _differentiate(loss: Tensor, by: Sequence[Tensor], present: bool) -> Sequence[Tensor | None]:
    """Gradients of one task's loss, whose graph is kept; None for each where the task is absent."""
    if not present or not loss.requires_grad:
        return [None] * len(by)
    return torch.autograd.grad(loss, by, retain_graph=True, allow_unused=True)


def build(config: BalanceConfig, tasks: Sequence[str]) -> Balancer | Bilevel:
    """Build the balancer of a run for the named tasks.

    Raises:
        UserError: fewer than two tasks, or more than can be balanced.
    """
    return Bilevel(config, tasks) if config.kind.bilevel else Balancer(config, tasks)
