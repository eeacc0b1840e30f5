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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from omni.errors import UserError
from omni.utils.arguments import match_names
from train.balance.balancer import Balancer, BalanceReport, FeatureHook
from train.balance.bilevel import build
from train.balance.config import BalanceConfig
from train.distributed.fabric import accumulating, reshard
from train.distributed.process_group import ProcessGroup
from train.objective.objective import Losses
from train.objective.task_losses import GraphLosses, TaskLosses, cells_by_stream, cells_by_task, mean_factors
from train.trainer.feed import Batch, StepBatches
from train.trainer.logs import BALANCE
from train.trainer.metrics import BalanceTally
from train.trainer.parts import Balanced


@dataclass
class _StepState:
    """The current step: its counts, the used share of the budget, the learning rate, and the receiver of each pass's losses."""

    denominators: Tensor
    cells: Tensor
    progress: float
    lr: float
    add: Callable[[Losses], None]


class Balancing:
    """Balances the tasks of a loop's steps: holds the method with its state, and runs all passes of a step.

    Args:
        module: the objective as Fabric wraps it.
        learning: trainable parameters, by name.
        tasks, streams: names, in the order of `Losses.sums`.
        targets: number of targets of a batch by stream, and of heads on the encoder, [K + HEADS].
        micro_batches: of this process in a step.
        aligned: heads on the encoder are trained.
    """

    def __init__(
        self,
        section: BalanceConfig,
        balanced: Balanced,
        fabric: Fabric,
        module: Any,
        learning: Sequence[tuple[str, nn.Parameter]],
        tasks: Sequence[str],
        streams: Sequence[str],
        targets: Callable[[Batch], Tensor],
        group: ProcessGroup,
        micro_batches: int,
        aligned: bool,
    ) -> None:
        self.section, self.balanced, self.fabric, self.module, self.group = section, balanced, fabric, module, group
        self.targets, self.aligned = targets, aligned
        self.names = list(streams if section.tasks == "streams" else balanced.names)
        self.balancer = build(section, self.names)
        by_stream = section.tasks == "streams"
        shape = len(tasks), len(streams)
        self.cell = cells_by_stream(*shape) if by_stream else cells_by_task(self.names, tasks, len(streams))
        names = [name for name, _ in learning]
        chosen = section.separate != BalanceConfig.separate
        apart = match_names(section.separate, names, "balance.separate", strict=chosen)
        self.shared = [p for name, p in learning if name not in apart]
        self.own = [p for name, p in learning if name in apart]
        self.hook = FeatureHook(self.balancer, group.sum) if section.at == "features" else None
        self.tally = BalanceTally()
        self.steps = 0
        self.warned: set[str] = set()
        self.before: Mapping[str, Tensor] | None = None
        self.after: list[tuple[Batch, TaskLosses]] = []
        self._check(micro_batches)

    def _check(self, micro_batches: int) -> None:
        method, at, spec = self.section.method, self.section.at, self.section.spec
        if at == "features" and not any(p.requires_grad for p in self.balanced.encoder_parameters()):
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
        if spec.bilevel and not self.balanced.outer:
            raise UserError(f"balance.method {method} judges by held-out rows, and the run has none")

    # --- a step -----------------------------------------------------------------------------------------------------------

    def take(self, step: StepBatches, denominators: Tensor, progress: float, lr: float, add: Callable[[Losses], None]) -> None:
        """Runs all forward and backward passes of a step, whose targets are `denominators` [K + HEADS]; gradients are in
        `grad` afterwards. `add` receives the losses of each pass; every target is in one of them, and `total` is the plain
        objective."""
        assert step.cells is not None
        now = _StepState(denominators, step.cells, progress, lr, add)
        level, bilevel = self.section.at, self.section.spec.bilevel
        large = level == "parameters" and not bilevel  # a state that holds gradients is not copied
        self.before = None if large else self.balancer.state_dict()
        levels = {"loss": self._by_losses, "features": self._by_features, "parameters": self._by_parameters}
        report = (self._bilevel if bilevel else levels[level])(self.balancer, step.batches, now)
        self.steps += 1
        self.tally.add(report.figures(self.names))
        self._report(report)

    def _report(self, report: BalanceReport) -> None:
        """Warns, once for each task, that its gradient of the shared part was zero."""
        zero = [name for name, flag in zip(self.names, report.zero.tolist(), strict=True) if flag and name not in self.warned]
        self.warned.update(zero)
        if zero and self.group.rank == 0:
            warnings.warn(
                f"{', '.join(zero)} did not touch the shared {self.section.at}: balance.method {self.section.method} chooses "
                f"without such a task (weight 0), and trains what it does not share by the plain loss; {BALANCE} counts such "
                f"steps in zero/{zero[0]}. Leave it out of balance.names, or make a shared part trainable that it uses",
                stacklevel=2,
            )

    def settle(self, left_out: Tensor, progress: float) -> None:
        """Updates the method after the optimizer's step, or restores its state of before where that step was left out (1,
        else 0). At level parameters the state is kept: the gradients were numbers, or the method left their tasks out."""
        balancer, after, self.after = self.balancer, self.after, []
        if self.before is not None and bool(left_out):
            absences = balancer.absences.clone()
            balancer.load_state_dict(self.before)
            balancer.absences = absences
        elif after:
            assert isinstance(balancer, Balancer)
            with torch.no_grad(), torch.random.fork_rng(self._devices()):
                losses = [_own(self.module(batch, self.denominators, progress, task_losses)) for batch, task_losses in after]
            reshard(self.module)
            balancer.after(torch.stack(losses).sum(0), self.group.sum)
        self.before = None

    def counts(self, cells: Tensor) -> Tensor:
        """Number of targets of each balanced task, and of the rest, [M + 1]."""
        return torch.zeros(len(self.names) + 1, dtype=cells.dtype).index_add_(0, self.cell.flatten(), cells.flatten())

    def _task_losses(self, now: _StepState, weights: Tensor | None = None, graph: bool = False, **options: Any) -> TaskLosses:
        """How a pass of this step weighs the tasks; `graph` keeps the graph of each loss."""
        m = len(self.names)
        ratio = mean_factors(self.cell, now.cells, m) if self.section.losses == "mean" else None
        loss_class = GraphLosses if graph else TaskLosses
        return loss_class(self.cell, torch.ones(m + 1) if weights is None else weights, ratio, **options)

    def _with_rest(self, weights: Tensor) -> Tensor:
        return torch.cat([weights.float(), torch.ones(1)])

    def _pass(self, batch: Batch, task_losses: TaskLosses, now: _StepState, note: bool = True) -> Losses:
        """Runs a forward pass; `note` reports its losses."""
        losses: Losses = self.module(batch, now.denominators, now.progress, task_losses)
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

    def _alone(self, more: bool) -> Any:
        """A context for the passes of a micro-batch: while `more` follow, processes exchange no gradients."""
        return accumulating(self.fabric, self.module, more)

    def _devices(self) -> list[torch.device]:
        return [self.fabric.device] if self.fabric.device.type == "cuda" else []

    # --- levels -----------------------------------------------------------------------------------------------------------

    def _by_losses(self, balancer: Any, batches: Sequence[Batch], now: _StepState) -> BalanceReport:
        counts, device = self.counts(now.cells)[:-1], self.fabric.device
        if self.section.spec.after is not None and self.section.spec.again(self.section.values):
            batches = [batch.to(device) for batch in batches]
            self.after, self.denominators = [(batch, self._task_losses(now)) for batch in batches], now.denominators
        ahead = balancer.ahead()
        if ahead is None and len(batches) == 1:
            losses = self._pass(batches[0].to(device), self._task_losses(now, graph=True), now)
            report = self._chosen(balancer, _own(losses), counts)
            self._backward(balancer.total(losses.by_task[:-1], report) + losses.by_task[-1])  # type: ignore[index]
            return report
        chosen: BalanceReport | None = None
        if ahead is None:
            with torch.no_grad(), torch.random.fork_rng(self._devices()):
                seen = [_own(self._pass(b.to(device), self._task_losses(now), now, False)) for b in batches]
            chosen = self._chosen(balancer, torch.stack(seen).sum(0), counts)
            ahead = chosen.weights
        own = torch.zeros(len(self.names), device=device)
        for i, batch in enumerate(batches):
            with self._alone(i + 1 < len(batches)):
                losses = self._pass(batch.to(device), self._task_losses(now, self._with_rest(ahead)), now)
                self._backward(losses.total)
            own += _own(losses)
        return chosen or balancer.weights(own, counts, self.group.sum)

    def _chosen(self, balancer: Balancer, losses: Tensor, counts: Tensor) -> BalanceReport:
        if not self.section.spec.again(self.section.values) and balancer.steps:
            balancer.after(losses, self.group.sum, counts)
        return balancer.weights(losses, counts, self.group.sum)

    def _by_features(self, balancer: Any, batches: Sequence[Batch], now: _StepState) -> BalanceReport:
        hook = self.hook
        assert hook is not None
        hook.counts, hook.scale, hook.report = self.counts(now.cells)[:-1], float(self.group.world), None
        own = torch.zeros(len(self.names), device=self.fabric.device)
        by_losses = self.section.spec.losses(self.section.values)
        for i, batch in enumerate(batches):
            with self._alone(i + 1 < len(batches)):
                losses = self._pass(batch.to(self.fabric.device), self._task_losses(now, hook=hook), now)
                own += _own(losses)
                hook.last, hook.losses = i + 1 == len(batches), self.group.sum(own) if by_losses else None
                self._backward(losses.total)
        assert hook.report is not None
        return hook.report

    def _by_parameters(self, balancer: Any, batches: Sequence[Batch], now: _StepState) -> BalanceReport:
        parts = balancer.config.spec.parts
        groups = [batches[i * len(batches) // parts : (i + 1) * len(batches) // parts] for i in range(parts)]
        steps = [now] if parts == 1 else [self._part(group, now) for group in groups]
        counts = torch.stack([self.counts(step.cells)[:-1] for step in steps]).amin(0)
        gathered, device = [], self.fabric.device
        for number, (group, step) in enumerate(zip(groups, steps, strict=True)):
            here = [batch.to(device) for batch in group]
            passes = [lambda task, b=b, s=step, n=number: self._of_task(task, b, s, n == 0) for b in here]
            gathered.append(
                balancer.gather(passes, self.shared, self.own, self.group.sum, self._backward, self._alone, present=counts > 0)
            )
        (rows, rest, losses), others = gathered[0], [table for table, _, _ in gathered[1:]]
        report = balancer.combine(losses, rows, self.shared, self.own, rest, self.group.sum, counts, others)
        self._rest(batches, now)
        return report

    def _part(self, batches: Sequence[Batch], now: _StepState) -> _StepState:
        """The step with some of its micro-batches only, and their counts."""
        own = torch.stack(
            [torch.cat([self.targets(b).double(), self.balanced.cells(b).double().flatten()]) for b in batches]
        ).sum(0)
        whole, plain = self.group.sum(own), len(now.denominators)
        denominators = whole[:plain].to(now.denominators)
        return _StepState(denominators, whole[plain:].view(now.cells.shape), now.progress, now.lr, now.add)

    def _of_task(self, task: int, batch: Batch, now: _StepState, note: bool) -> Tensor:
        weights = torch.zeros(len(self.names) + 1)
        weights[task] = 1
        return self._pass(batch, self._task_losses(now, weights), now, note).total

    def _rest(self, batches: Sequence[Batch], now: _StepState, note: bool = True) -> None:
        """Adds the gradients of losses that belong to no balanced task, if there are any."""
        others = bool(self.counts(now.cells)[-1] > 0)
        if not others and not self.aligned:
            return
        weights = torch.zeros(len(self.names) + 1)
        weights[-1] = 1
        for i, batch in enumerate(batches):
            with self._alone(i + 1 < len(batches)):
                task_losses = self._task_losses(now, weights, alignment_only=not others)
                self._backward(self._pass(batch.to(self.fabric.device), task_losses, now, note).total)

    def _bilevel(self, balancer: Any, batches: Sequence[Batch], now: _StepState) -> BalanceReport:
        device, world, rank = self.fabric.device, self.group.world, self.group.rank
        outers = [self.balanced.outer[(self.steps * world + i) % len(self.balanced.outer)] for i in range(world)]
        cells = torch.stack([self.balanced.cells(b) for b in outers]).sum(0).double()
        denominators = torch.stack([self.targets(b) for b in outers]).sum(0).to(now.denominators)
        other = _StepState(denominators, cells, now.progress, now.lr, now.add)
        inside, outside = batches[0].to(device), outers[rank].to(device)
        both = torch.minimum(self.counts(now.cells), self.counts(cells))[:-1] > 0
        seen: list[Losses] = []

        def losses_of(batch: Batch, step: _StepState) -> Tensor:
            with torch.random.fork_rng(self._devices()):  # the same noise each time: only parameters differ
                losses = self._pass(batch, self._task_losses(step, graph=True), step, False)
            seen.append(losses)
            return torch.where(both.to(device), losses.by_task[:-1], torch.nan)  # type: ignore[index]

        report = balancer.update_weights(
            lambda: losses_of(inside, now), lambda: losses_of(outside, other), [*self.shared, *self.own], now.lr,
            self.group.sum, self._backward, lambda: reshard(self.module),
        )  # fmt: skip
        if not self.section.spec.linear:
            if bool(both.any()) and bool(report.absent.all()):  # gradients become NaN, so that the step is left out
                for p in (*self.shared, *self.own):
                    p.grad = None if p.grad is None else p.grad * torch.nan
            self._note(seen[0], now)
            self._rest(batches, now, False)
        else:
            self._backward(self._pass(inside, self._task_losses(now, self._with_rest(balancer.ahead())), now).total)
        return report

    # --- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the balance as plain tensors; of sharded gradients, this process's part."""
        return {**self.balancer.state_dict(), "taken": torch.tensor(self.steps), "names": self._checksum()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if int(state["names"]) != int(self._checksum()):
            raise UserError(
                f"the stored balance is of other tasks than this run's {', '.join(self.names)}, or in another order; go on "
                "with the same, or say --resume restart"
            )
        self.steps = int(state["taken"])
        self.balancer.load_state_dict({name: t for name, t in state.items() if name not in ("taken", "names")})

    def _checksum(self) -> Tensor:
        return torch.tensor(zlib.crc32("\n".join(self.names).encode()))


def _own(losses: Losses) -> Tensor:
    """The balanced tasks' losses [M], without graph."""
    assert losses.by_task is not None
    return losses.by_task.detach()[:-1]
