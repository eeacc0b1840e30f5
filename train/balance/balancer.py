"""Balances the tasks of a run: calls the method in each step, keeps its state, and weighs losses or combines gradients by it.

A step's calls depend on the level:

    loss        `weights(losses)` gives the weights for one backward of their weighted sum; where `ahead()` is not None it is
                known before the step's losses, and several micro-batches may be run through with it.
    features    `FeatureHook` between encoder and decoder calls `choose`, within the one backward.
    parameters  `gather` runs one backward per task and micro-batch, and `combine` puts the combined gradient into `grad`.
    two levels  `Bilevel.update_weights` on the step's batch and on a held-out one (methods: `train.balance.bilevel`).

Losses are this process's share of the step's: divided by counts of the whole step, so that their sum over processes (`reduce`)
is the step's loss. Nothing nonlinear is done before that sum: the choice does not depend on the number of processes.

Dimensions: m tasks, k of them present, P values that this process holds, N positions, C channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omni.errors import UserError
from omni.plugins import named
from train.balance.bilevel import Batch, BilevelStep
from train.balance.config import MAX_TASKS, BalanceConfig
from train.balance.rows import (
    MethodChoice,
    MethodInput,
    Rows,
    State,
    Sum,
    alone,
    is_sharded,
    mixed,
    put_gradients,
    summed,
    take_gradients,
)


@dataclass
class BalanceReport:
    """Weights and gradient statistics of the tasks in a step; all on the CPU, without graph.

    Attributes:
        weights: [m]; 0 for an absent task, and for one whose row is zero. Of `graddrop`, the share of a task's gradient that
            passed; of `dbmtl` and `moco`, the weights of the smoothed gradients.
        norms: of the tasks' gradients, [m]; nan where there are none.
        cosines: between them, [m, m]; nan where there are none.
        absent: [m], 1 where a task was left out of this step.
        zero: [m], 1 where a task is present, but its row is zero, so that the method did not get it.
    """

    weights: Tensor
    norms: Tensor
    cosines: Tensor
    absent: Tensor
    zero: Tensor

    def figures(self, tasks: Sequence[str]) -> dict[str, float]:
        """Figures by name for a table: `weight/A1T1`, `norm/A1T1`, `cosine/A1T1/A1A2`, and `absent/A1T1` or `zero/A1T1` where
        a task was."""
        figures: dict[str, float] = {}
        for name, values in (("weight", self.weights), ("norm", self.norms)):
            figures.update({f"{name}/{t}": float(v) for t, v in zip(tasks, values, strict=True) if v == v})
        for i, task in enumerate(tasks):
            for j in range(i):
                if self.cosines[i, j] == self.cosines[i, j]:
                    figures[f"cosine/{tasks[j]}/{task}"] = float(self.cosines[i, j])
        for name, flags in (("absent", self.absent), ("zero", self.zero)):
            figures.update({f"{name}/{t}": 1.0 for t, flag in zip(tasks, flags, strict=True) if flag})
        return figures


class Balancer:
    """Combines the tasks of each step: calls the method, and keeps its state between steps.

    Args:
        tasks: their names, in the order of the losses.
        seed: of the random draws; the same on all processes.

    Raises:
        UserError: fewer than two tasks, or more than can be balanced.

    Attributes:
        steps: taken so far.
        absences: how often each task was left out, [m].
        last: which tasks took part in the last step, [m] bool.
    """

    def __init__(self, config: BalanceConfig, tasks: Sequence[str], seed: int = 0) -> None:
        if not 2 <= len(tasks) <= MAX_TASKS:
            raise UserError(f"balance.method {config.method} was given {len(tasks)} tasks; it needs 2 to {MAX_TASKS}")
        self.config, self.tasks, self.seed = config, list(tasks), seed
        self.state = State(len(tasks))
        self.steps = 0
        self.absences = torch.zeros(len(tasks), dtype=torch.int64)
        self.last = torch.ones(len(tasks), dtype=torch.bool)

    def choose(
        self, losses: Tensor, counts: Tensor | None, rows: Rows | None = None, others: tuple[Rows, ...] = ()
    ) -> tuple[MethodChoice, BalanceReport]:
        """Call the method with the present tasks, and update its state; of losses [m] (float64 on the CPU) and rows [m, P].

        A task without targets (`counts`), or whose loss or row is not finite, is absent. A present one whose row is zero (in
        all batches) suits every direction: the method does not get it, its weight is 0, and its state stays as it is.
        """
        present, m = self.present(losses, counts), len(self.tasks)
        gramian, zero = None, torch.zeros(m, dtype=torch.bool)
        if rows is not None:
            gramian = rows.gramian()
            squares = torch.stack([table.diagonal().float() for table in (gramian, *(other.gramian() for other in others))])
            present = present & squares.isfinite().all(0)
            zero = present & (squares == 0).all(0)
        self.last = asked = present & ~zero
        weights = torch.zeros(m, dtype=torch.float64)
        if asked.any():
            inputs = self.method_input(losses, asked, rows, others)
            with torch.no_grad():
                choice = self._ruled(inputs)
            weights[asked] = choice.weights.double()
            choice = choice if asked.equal(present) else choice.spread(asked[present])
        elif rows is not None and present.any():
            choice = MethodChoice(weights[present], direction=rows.values.new_zeros(rows.values.shape[1]))
        else:
            # Tasks have targets, but none has a finite loss or row: the direction is nan, so that the step is skipped.
            fill = torch.nan if counts is None or bool((counts > 0).any()) else 0.0
            empty = torch.zeros(0) if rows is None else rows.values.new_full((rows.values.shape[1],), fill)
            choice = MethodChoice(weights[:0], direction=empty)
        self.steps += 1
        self.absences += ~present
        return choice, report_of(weights, present, zero, gramian, present)

    def _ruled(self, inputs: MethodInput) -> MethodChoice:
        """The method's choice; UserError, naming the method, where it fails or chooses weights that are no numbers."""
        name = self.config.method
        with named(f"balance method {name}"):
            choice: MethodChoice = self.config.spec.rule(inputs)
            weights = choice.weights
        if not weights.isfinite().all() and inputs.losses.isfinite().all():
            raise UserError(f"balance method {name} returned weights {weights.tolist()} for losses {inputs.losses.tolist()}")
        return choice

    def method_input(self, losses: Tensor, present: Tensor, rows: Rows | None, others: tuple[Rows, ...]) -> MethodInput:
        return MethodInput(
            losses[present],
            Rows(torch.zeros(int(present.sum()), 0)) if rows is None else rows.take(present),
            tuple(other.take(present) for other in others),
            self.config.values,
            (self.seed * 1_000_003 + self.steps) % (1 << 62),
            present,
            self.state,
        )

    def present(self, losses: Tensor, counts: Tensor | None) -> Tensor:
        here = losses.isfinite()
        return here if counts is None else here & (counts.to("cpu") > 0)

    def state_dict(self) -> dict[str, Tensor]:
        """State as plain tensors; those of sharded gradients are this process's."""
        kept = {f"state/{name}": value.clone() for name, value in self.state.values.items()}
        pairs = {f"pairs/{name}": torch.tensor(True) for name in self.state.pairs}
        counts = {"steps": torch.tensor(self.steps), "absences": self.absences.clone(), "last": self.last.clone()}
        return {**counts, **kept, **pairs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.absences, self.last = int(state["steps"]), state["absences"].clone(), state["last"].clone()
        self.state = State(len(self.tasks))
        self.state.values = {k.removeprefix("state/"): v.clone() for k, v in state.items() if k.startswith("state/")}
        self.state.pairs = {k.removeprefix("pairs/") for k in state if k.startswith("pairs/")}

    # --- weights of losses ----------------------------------------------------------------------------------------------

    def ahead(self) -> Tensor | None:
        """Weights of all tasks [m] that the next step will use; None where they depend on its losses."""
        if not self.config.spec.ahead:
            return None
        return copy.deepcopy(self).choose(torch.ones(len(self.tasks), dtype=torch.float64), None)[0].weights

    def weights(self, losses: Tensor | Sequence[Tensor], counts: Tensor | None = None, reduce: Sum = alone) -> BalanceReport:
        """Choose the weights of a step by its losses [m] alone (this process's share), and update the method's state.

        A task is absent without targets in the whole step (`counts` [m]), and where its loss is nan.
        """
        return self.choose(summed(losses, reduce), counts)[1]

    def total(self, losses: Sequence[Tensor] | Tensor, report: BalanceReport) -> Tensor:
        """Sum the losses of the present tasks, times their weights: the loss to call `backward` on."""
        parts = [w * loss for w, loss in zip(report.weights.tolist(), losses, strict=True) if w != 0]
        return torch.stack(parts).sum() if parts else torch.stack(list(losses)).sum() * 0

    def after(self, losses: Tensor | Sequence[Tensor], reduce: Sum = alone, counts: Tensor | None = None) -> None:
        """Update a method that has `after` by the losses [m] after the optimizer's step; others do nothing.

        They are of the same batch, or, unless its `again` says so, of the next one before its step, as `counts` then are.
        """
        if self.config.spec.after is None:
            return
        values = summed(losses, reduce)
        inputs = self.method_input(values, self.last & self.present(values, counts), None, ())
        if len(inputs.losses):
            self.config.spec.after(inputs)

    # --- gradients ------------------------------------------------------------------------------------------------------

    def gather(
        self,
        passes: Sequence[Callable[[int], Tensor]],
        shared: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter] = (),
        reduce: Sum = alone,
        run: Callable[[Tensor], None] = torch.Tensor.backward,
        around: Callable[[bool], AbstractContextManager[Any]] = lambda more: nullcontext(),
        present: Tensor | None = None,
    ) -> tuple[Rows, Tensor, Tensor]:
        """Compute one gradient per task by plain backward passes into `grad`: DDP, FSDP2 and checkpointing work as usual.

        Args:
            passes: one for each micro-batch: runs the forward for a task, given by its number, and returns its loss.
            run: calls backward; `grad` must hold the sum over processes after a task's last micro-batch.
            around: context of each forward and backward; true where another micro-batch of the task follows, so that gradients
                need no exchange yet.
            present: tasks to run, [m] bool, the same on all processes; all by default.

        Returns:
            rows [m, P] of the shared parameters (zeros for tasks not run), those of the own ones, this process's losses [m].
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
                    run(loss)
            tables.append((take_gradients(shared), take_gradients(own) if own else torch.zeros(0)))
        rows, rest = (torch.stack(part) for part in zip(*tables, strict=True))
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
    ) -> BalanceReport:
        """Combine the rows of `gather` (`others`: those of further batches), and add the result to `grad`."""
        choice, report = self.choose(summed(losses, reduce), counts, rows, tuple(others))
        here = report.absent == 0
        put_gradients(shared, choice.combine(rows.take(here)))
        if own and rest is not None:
            factors = torch.where(report.zero == 1, 1.0, report.weights)[here]  # 1 where the row is zero: no weight was chosen
            factors = factors if self.config.own == "weighted" else torch.ones_like(factors)
            put_gradients(own, mixed(factors, rest[here.to(rest.device)]))
        return report


def report_of(weights: Tensor, present: Tensor, zero: Tensor, gramian: Tensor | None, measured: Tensor) -> BalanceReport:
    """The report of a step, with norms and cosines by the inner products of the gradients [m, m]; nan where there are none, and
    for tasks that are not `measured` [m] bool."""
    m = len(weights)
    norms, cosines = torch.full((m,), torch.nan), torch.full((m, m), torch.nan)
    if gramian is not None:
        length = gramian.diagonal().clamp_min(0).sqrt()
        lengths = length[:, None] * length
        pairs = measured[:, None] & measured & (lengths > 0)
        norms = torch.where(measured, length, torch.nan).float()
        cosines = torch.where(pairs, gramian / lengths, torch.nan).float().clamp(-1, 1)
    return BalanceReport(weights, norms, cosines, (~present).long(), zero.long())


class Bilevel(Balancer):
    """Balances the tasks by a bilevel method: weights are softmax(w), and w is trained by Adam.

    A step is `update_weights(inner, outer, parameters, lr)`, then, for methods that are `linear`, one backward of the losses
    times the weights; others leave the whole gradient in `grad`. Tasks that are absent from `inner` are left out.
    """

    def ahead(self) -> Tensor:
        """The current weights, [m]."""
        m = len(self.tasks)
        return self.state.values.setdefault("logits", torch.full((m,), 1 / m, dtype=torch.float64)).softmax(0)

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
            lr: the optimizer's learning rate.
            run: calls backward; `grad` must hold the sum over processes after it.
            settled: called after a forward without backward, before parameters change: FSDP2 must free the root's whole ones.
        """
        settings = self.config.values
        step = BilevelStep(
            inner, outer, list(parameters), lr, self.ahead(), settings, self.state, self.steps, reduce, run, settled
        )
        with step.restored():
            gradient, present, rows = self.config.spec.rule(step)
        m = len(present)
        inputs = self.method_input(torch.ones(m, dtype=torch.float64), present, rows, ())
        inputs.adam("logits", gradient, 1 / m, settings["lr"])
        self.steps += 1
        self.absences += ~present
        weights, every = torch.where(present, self.ahead(), 0.0), torch.ones_like(present)
        return report_of(weights, present, ~every, None if rows is None else rows.gramian(), every)


def build(config: BalanceConfig, tasks: Sequence[str], seed: int = 0) -> Balancer | Bilevel:
    """Builds the balancer of a run for the named tasks; UserError for fewer than two, or more than can be balanced."""
    return (Bilevel if config.spec.bilevel else Balancer)(config, tasks, seed)


class FeatureHook:
    """Combines the tasks' gradients at the features: called in the forward pass, `hook(features, task)`, acts in the backward.

    Between the two the training loop may set the attributes.

    Attributes:
        losses: the step's losses [m], summed over processes; ones by default, for methods that do not need them.
        counts: targets of each task in the step, [m]; all present by default. A task without any feature is absent anyway.
        last: this is the step's last micro-batch, so that the method's state is updated. The weights of an earlier one are
            chosen by the micro-batches so far.
        scale: of the gradients (a loss scaler's).
        report: of the last backward pass.
    """

    def __init__(self, balancer: Balancer, reduce: Sum = alone) -> None:
        self.balancer, self.reduce = balancer, reduce
        self.losses: Tensor | None = None
        self.counts: Tensor | None = None
        self.last, self.scale = True, 1.0
        self.report: BalanceReport | None = None
        self._rows: Tensor | None = None

    def __call__(self, features: Tensor, task: Tensor) -> Tensor:
        """Return the features [N, C] unchanged; task [N] long, below 0 for a position of no task."""
        return _Hooked.apply(features, task, self) if torch.is_grad_enabled() else features

    def change(self, features: Tensor, task: Tensor, gradient: Tensor) -> Tensor:
        """Replace the features' gradient [N, C] by the combined one."""
        balancer, m = self.balancer, len(self.balancer.tasks)
        values = gradient.float() / self.scale
        if balancer.config.spec.signs:
            values = values * features.sign()
        row = torch.where(task < 0, m, task)
        counted = torch.cat([values, torch.ones_like(values[:, :1])], 1)
        # Not by `index_add_`: a GPU would add in any order, and the sums choose weights.
        table = self.reduce(torch.stack([torch.where((row == i)[:, None], counted, 0).sum(0) for i in range(m)]))
        self._rows = table if self._rows is None else self._rows + table
        rows, heard = Rows(self._rows[:, :-1]), self._rows[:, -1].cpu() > 0
        before = None if self.last else balancer.state_dict()
        losses = torch.ones(m, dtype=torch.float64) if self.losses is None else self.losses.to("cpu", torch.float64)
        here = heard if self.counts is None else heard & (self.counts.cpu() > 0)
        choice, self.report = balancer.choose(losses, here, rows)
        if before is not None:
            balancer.load_state_dict(before)
        else:
            self._rows = None
        factors = choice.weights[:, None] if choice.factors is None else choice.factors
        every = values.new_zeros(m + 1, factors.shape[1])
        present = torch.cat([self.report.absent == 0, torch.zeros(1, dtype=torch.bool)])
        every[present.to(every.device)] = factors.to(every)
        kept = torch.where(every[row] == 0, 0.0, gradient.float() * every[row])  # an absent task may be nan
        return kept.to(gradient.dtype)


class _Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, task: Tensor, hook: FeatureHook) -> Tensor:
        ctx.save_for_backward(features, task)
        ctx.hook = hook
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        features, task = ctx.saved_tensors
        return ctx.hook.change(features, task, gradient), None, None
