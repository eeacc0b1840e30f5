"""Runs the forward and backward passes of a balanced step, for every method and level.

    loss        one pass with weights that are known ahead. Where they follow from the step's own losses: one pass whose
                backward waits for them, or, with several micro-batches, a pass without gradients before it
    features    one pass; the hook acts in its backward
    parameters  one pass per task, then one for what belongs to none of them
    two levels  the passes of `train.balance.bilevel`, on the step's batch and on a held-out one, then one pass

Losses are divided by counts of the whole step; Fabric averages gradients over processes, hence the factor `world`.

Dimensions: T tasks of the task table, K streams, M balanced tasks.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from omni.errors import UserError
from omni.utils.arguments import match_names
from train.balance.balancer import BalanceReport, FeatureHook, build
from train.balance.config import BalanceConfig
from train.distributed.fabric import accumulating, reshard
from train.distributed.process_group import ProcessGroup
from train.objective.objective import GraphLosses, Losses, TaskLosses, cells_by_task, mean_factors
from train.objective.objective import cells as cells_of
from train.trainer.logs import BALANCE
from train.trainer.parts import Batch, Parts, StepBatches


@dataclass
class _StepState:
    """The current step. `add` receives the losses of each pass; `before` is the method's state before the step; with `again` it
    looks at the losses once more after the step."""

    batches: Sequence[Batch]
    denominators: Tensor
    cells: Tensor
    progress: float
    lr: float
    add: Callable[[Losses], None]
    before: Mapping[str, Tensor] | None = None
    again: bool = False


class Balancing:
    """Balances the tasks of a loop's steps: holds the method with its state, and runs all passes of a step.

    Args:
        parts: of the run, with the names of the balanced tasks and held-out batches.
        module: the objective as Fabric wraps it.
        learning: trainable parameters, by name.
        micro_batches: of this process in a step.
        seed: of the method's random draws.

    Attributes:
        names: the balanced tasks, or streams; `checksum` tells them from others.
        only: weights [M + 1] of one balanced task alone in each row, and last of the rest.
        tally: by figure: its sum since the last row of the log, and the number of steps that had it.
    """

    def __init__(
        self,
        section: BalanceConfig,
        parts: Parts,
        fabric: Fabric,
        module: Any,
        learning: Sequence[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        micro_batches: int,
        seed: int = 0,
    ) -> None:
        self.section, self.parts, self.fabric, self.module, self.group = section, parts, fabric, module, group
        by_stream = section.tasks == "streams"
        self.names = list(parts.streams if by_stream else parts.balanced or ())
        self.checksum, self.only = zlib.crc32("\n".join(self.names).encode()), torch.eye(len(self.names) + 1)
        self.balancer: Any = build(section, self.names, seed)
        tasks, streams = len(parts.tasks), len(parts.streams)
        each = torch.arange(streams).repeat(tasks, 1)  # every stream is a task of its own
        self.cell = each if by_stream else cells_by_task(self.names, parts.tasks, streams)
        chosen = section.separate != BalanceConfig.separate
        apart = match_names(section.separate, [name for name, _ in learning], "balance.separate", strict=chosen)
        self.shared = [p for name, p in learning if name not in apart]
        self.own = [p for name, p in learning if name in apart]
        self.tally, self.steps = dict[str, list[float]](), 0
        self.warned: set[str] = set()
        self.now: _StepState | None = None
        self._check(micro_batches)

    def _check(self, micro_batches: int) -> None:
        method, at, spec = self.section.method, self.section.at, self.section.spec
        objective: Any = self.parts.objective
        below = objective.model.encoder, objective.model.projector
        if at == "features" and not any(p.requires_grad for part in below for p in part.parameters()):
            raise UserError(
                f"balance.level is features, but nothing below the features is trainable, so that {method} would change "
                "nothing; make encoder or projector trainable, or choose level parameters or loss"
            )
        if at == "parameters" and not self.shared:
            raise UserError("balance.separate names all trainable parameters; leave some to be shared")
        if micro_batches % spec.parts:
            raise UserError(
                f"balance.method {method} takes {spec.parts} batches a step apart, and each process has "
                f"{micro_batches}; make data.micro_batches {spec.parts * self.group.world}"
            )
        if spec.bilevel and micro_batches > 1:
            raise UserError(
                f"balance.method {method} takes one micro-batch a step in each process; make data.micro_batches "
                f"{self.group.world}"
            )
        if spec.bilevel and not self.parts.outer:
            raise UserError(f"balance.method {method} judges by held-out rows, and the run has none")

    # --- a step -----------------------------------------------------------------------------------------------------------

    def take(self, step: StepBatches, denominators: Tensor, progress: float, lr: float, add: Callable[[Losses], None]) -> None:
        """Runs all forward and backward passes of a step, whose targets are `denominators` [K + HEADS]; gradients are in
        `grad` afterwards. `add` receives the losses of each pass; every target is in one of them, and `total` is the plain
        objective."""
        assert step.cells is not None
        section = self.section
        self.now = now = _StepState(step.batches, denominators, step.cells, progress, lr, add)
        if section.at != "parameters" or section.spec.bilevel:  # a state that holds gradients is not copied
            now.before = self.balancer.state_dict()
        levels = {"loss": self._by_losses, "features": self._by_features, "parameters": self._by_parameters}
        report = (self._bilevel if section.spec.bilevel else levels[section.at])(now)
        self.steps += 1
        for name, value in report.figures(self.names).items():
            total, count = self.tally.get(name, (0.0, 0.0))
            self.tally[name] = [total + value, count + 1]
        zero = [name for name, flag in zip(self.names, report.zero.tolist(), strict=True) if flag and name not in self.warned]
        self.warned.update(zero)
        if zero and self.group.rank == 0:
            warnings.warn(
                f"{', '.join(zero)} did not touch the shared {self.section.at}: balance.method {self.section.method} chooses "
                f"without such a task (weight 0), and trains what it does not share by the plain loss; {BALANCE} counts such "
                f"steps in zero/{zero[0]}. Leave it out of balance.names, or make a shared part trainable that it uses",
                stacklevel=2,
            )

    def settle(self, left_out: Tensor) -> None:
        """Updates the method after the optimizer's step, or restores its state of before where that step was left out (1,
        else 0). At level parameters the state is kept: the gradients were numbers, or the method left their tasks out."""
        now, self.now = self.now, None
        assert now is not None
        if now.before is not None and bool(left_out):
            absences = self.balancer.absences.clone()
            self.balancer.load_state_dict(now.before)
            self.balancer.absences = absences
        elif now.again:
            losses = self._losses_without_graph(now)
            reshard(self.module)
            self.balancer.after(losses, self.group.sum)

    def figures(self) -> dict[str, float]:
        """Mean weights, norms and cosines since the last call, and how often each task was absent or its gradient zero."""
        tally, self.tally = self.tally, {}
        return {name: total if name.startswith(("absent/", "zero/")) else total / n for name, (total, n) in tally.items()}

    def counts(self, cells: Tensor) -> Tensor:
        """Number of targets of each balanced task, and of the rest, [M + 1]."""
        return torch.zeros(len(self.names) + 1, dtype=cells.dtype).index_add_(0, self.cell.flatten(), cells.flatten())

    def _pass(self, batch: Batch, now: _StepState, weights: Tensor | None = None, note: bool = True, **options: Any) -> Losses:
        """Runs a forward pass with these weights of the tasks [M + 1], 1 by default; `note` reports its losses, `graph` keeps
        the graph of each."""
        m, graph = len(self.names), options.pop("graph", False)
        ratio = mean_factors(self.cell, now.cells, m) if self.section.losses == "mean" else None
        weights = torch.ones(m + 1) if weights is None else weights
        task_losses = (GraphLosses if graph else TaskLosses)(self.cell, weights, ratio, **options)
        losses: Losses = self.module(batch.to(self.fabric.device), now.denominators, now.progress, task_losses)
        if note:
            self._note(losses, now)
        return losses

    def _note(self, losses: Losses, now: _StepState) -> None:
        """Reports a pass's losses to `add`; those that are not finite are left out, as their step or task is."""
        assert losses.by_task is not None
        total, lost = losses.by_task.detach().nan_to_num(0, 0, 0).sum(), ~losses.sums.isfinite()
        sums, counts = losses.sums.masked_fill(lost, 0), losses.counts.masked_fill(lost, 0)
        turn, distill = (None if x is None else x.nan_to_num(0, 0, 0) for x in (losses.turn_sum, losses.distill_sum))
        aligned = losses.ctc_sum.nan_to_num(0, 0, 0)
        now.add(losses._replace(total=total, sums=sums, counts=counts, ctc_sum=aligned, turn_sum=turn, distill_sum=distill))

    def _backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss * self.group.world)

    def _passes(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, Any]]:
        """Micro-batches, each with the context of its passes: before the last one, processes exchange no gradients."""
        last = len(batches) - 1
        return ((batch, accumulating(self.fabric, self.module, i < last)) for i, batch in enumerate(batches))

    def _same_noise(self) -> Any:
        """A context whose random numbers are drawn once more after it."""
        return torch.random.fork_rng([self.fabric.device] if self.fabric.device.type == "cuda" else [])

    def _losses_without_graph(self, now: _StepState) -> Tensor:
        """The balanced tasks' losses [M] of the step's batches in this process, which are not reported."""
        with torch.no_grad(), self._same_noise():
            losses = [_own(self._pass(batch, now, note=False)) for batch in now.batches]
        return torch.stack(losses).sum(0)

    # --- levels -----------------------------------------------------------------------------------------------------------

    def _by_losses(self, now: _StepState) -> BalanceReport:
        balancer, counts, spec = self.balancer, self.counts(now.cells)[:-1], self.section.spec
        now.again = spec.after is not None and spec.again(self.section.values)
        ahead = balancer.ahead()
        if ahead is None and len(now.batches) == 1:
            losses = self._pass(now.batches[0], now, graph=True)
            report = self._chosen(_own(losses), counts, now.again)
            self._backward(balancer.total(losses.by_task[:-1], report) + losses.by_task[-1])  # type: ignore[index]
            return report
        chosen: BalanceReport | None = None
        if ahead is None:
            chosen = self._chosen(self._losses_without_graph(now), counts, now.again)
            ahead = chosen.weights
        own = torch.zeros(len(self.names), device=self.fabric.device)
        for batch, alone in self._passes(now.batches):
            with alone:
                losses = self._pass(batch, now, _with_rest(ahead))
                self._backward(losses.total)
            own += _own(losses)
        return chosen or balancer.weights(own, counts, self.group.sum)  # type: ignore[no-any-return]

    def _chosen(self, losses: Tensor, counts: Tensor, again: bool) -> BalanceReport:
        if self.balancer.steps and not again:
            self.balancer.after(losses, self.group.sum, counts)
        return self.balancer.weights(losses, counts, self.group.sum)  # type: ignore[no-any-return]

    def _by_features(self, now: _StepState) -> BalanceReport:
        hook, section = FeatureHook(self.balancer, self.group.sum), self.section
        hook.counts, hook.scale = self.counts(now.cells)[:-1], float(self.group.world)
        own = torch.zeros(len(self.names), device=self.fabric.device)
        by_losses = section.spec.losses(section.values)
        for i, (batch, alone) in enumerate(self._passes(now.batches)):
            with alone:
                losses = self._pass(batch, now, hook=hook)
                own += _own(losses)
                hook.last, hook.losses = i + 1 == len(now.batches), self.group.sum(own) if by_losses else None
                self._backward(losses.total)
        assert hook.report is not None
        return hook.report

    def _by_parameters(self, now: _StepState) -> BalanceReport:
        count, size = self.section.spec.parts, len(now.batches) // self.section.spec.parts
        steps = [now] if count == 1 else [self._part(now, now.batches[i * size : (i + 1) * size]) for i in range(count)]
        counts = torch.stack([self.counts(step.cells)[:-1] for step in steps]).amin(0)
        gathered = []
        for step in steps:

            def of_task(task: int, batch: Batch, step: _StepState = step) -> Tensor:
                return self._pass(batch, step, self.only[task], note=step is steps[0]).total

            passes = [partial(of_task, batch=batch.to(self.fabric.device)) for batch in step.batches]
            alone = partial(accumulating, self.fabric, self.module)
            running = self.group.sum, self._backward, alone, counts > 0
            gathered.append(self.balancer.gather(passes, self.shared, self.own, *running))
        (rows, rest, losses), others = gathered[0], [table for table, _, _ in gathered[1:]]
        report = self.balancer.combine(losses, rows, self.shared, self.own, rest, self.group.sum, counts, others)
        self._rest(now)
        return report  # type: ignore[no-any-return]

    def _part(self, now: _StepState, batches: Sequence[Batch]) -> _StepState:
        """The step with some of its micro-batches only, and their counts."""
        own = [torch.cat([self.parts.targets(b).double(), cells_of(b).double().flatten()]) for b in batches]
        denominators, cells = self.group.sum(torch.stack(own).sum(0)).split([len(now.denominators), now.cells.numel()])
        whole = {"denominators": denominators.to(now.denominators), "cells": cells.view(now.cells.shape)}
        return replace(now, batches=batches, **whole)

    def _rest(self, now: _StepState, note: bool = True) -> None:
        """Adds the gradients of losses that belong to no balanced task, if there are any."""
        objective: Any = self.parts.objective
        others = bool(self.counts(now.cells)[-1] > 0)
        for batch, alone in self._passes(now.batches if others or objective.config.by_heads else ()):
            with alone:
                self._backward(self._pass(batch, now, self.only[-1], note=note, alignment_only=not others).total)

    def _bilevel(self, now: _StepState) -> BalanceReport:
        balancer, group, outer = self.balancer, self.group, self.parts.outer
        outers = [outer[(self.steps * group.world + i) % len(outer)] for i in range(group.world)]
        cells = torch.stack([cells_of(b) for b in outers]).sum(0).double()
        denominators = torch.stack([self.parts.targets(b) for b in outers]).sum(0).to(now.denominators)
        other = replace(now, batches=[outers[group.rank]], denominators=denominators, cells=cells)
        both = torch.minimum(self.counts(now.cells), self.counts(cells))[:-1] > 0
        seen: list[Losses] = []

        def losses_of(step: _StepState) -> Tensor:
            with self._same_noise():  # only parameters differ
                losses = self._pass(step.batches[0], step, graph=True, note=False)
            seen.append(losses)
            return torch.where(both.to(self.fabric.device), losses.by_task[:-1], torch.nan)  # type: ignore[index]

        report: BalanceReport = balancer.update_weights(
            lambda: losses_of(now), lambda: losses_of(other), [*self.shared, *self.own], now.lr, group.sum, self._backward,
            lambda: reshard(self.module),
        )  # fmt: skip
        if self.section.spec.linear:
            self._backward(self._pass(now.batches[0], now, _with_rest(balancer.ahead())).total)
            return report
        if bool(both.any()) and bool(report.absent.all()):  # gradients become NaN, so that the step is left out
            for p in (*self.shared, *self.own):
                p.grad = None if p.grad is None else p.grad * torch.nan
        self._note(seen[0], now)
        self._rest(now, note=False)
        return report

    # --- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the balance as plain tensors; of sharded gradients, this process's part."""
        return {**self.balancer.state_dict(), "taken": torch.tensor(self.steps), "names": torch.tensor(self.checksum)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if int(state["names"]) != self.checksum:
            raise UserError(
                f"the stored balance is of other tasks than this run's {', '.join(self.names)}, or in another order; go on "
                "with the same, or say --resume restart"
            )
        self.steps = int(state["taken"])
        self.balancer.load_state_dict({name: t for name, t in state.items() if name not in ("taken", "names")})


def _own(losses: Losses) -> Tensor:
    """The balanced tasks' losses [M], without graph."""
    assert losses.by_task is not None
    return losses.by_task.detach()[:-1]


def _with_rest(weights: Tensor) -> Tensor:
    """Weights [M + 1]: those of the balanced tasks, and 1 of the rest."""
    return torch.cat([weights.float(), torch.ones(1)])
