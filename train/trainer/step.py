"""Takes one training step: forward and backward of every micro-batch, then one step of the optimizer; under the graph guard
where that is asked for, which also finds streams and tasks that get no target.

Each of `PlainStep`, `BalancedStep` and `GuardedStep` is a `Step`: whoever trains calls one, and does not ask which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from omni.diagnostics import Finding, GraphError, Guard, report
from omni.diagnostics.findings import shortlist
from omni.errors import UserError
from omni.layout import Layout
from omni.tasks import TASKS
from train.data.batching.batch import Batch
from train.distributed.fabric import accumulating, clip, reshard
from train.distributed.process_group import ProcessGroup
from train.objective.objective import cells
from train.optim.optimizer import Optimizers
from train.trainer.balanced_step import Balancing
from train.trainer.feed import StepBatches
from train.trainer.logs import HighestLosses
from train.trainer.metrics import StepMetrics
from train.trainer.parts import Observer
from train.trainer.usage import StepTimes, Usage


class Step(Protocol):
    """Takes a step of these batches, `progress` being the share of the budget that is used."""

    def __call__(self, step: StepBatches, progress: float) -> None: ...


@dataclass(eq=False)
class PlainStep:
    """Trains on the sum of the losses.

    Each loss is divided by the counts of the whole step, over all processes; gradients are averaged over processes, hence
    the factor. A step whose gradients are not finite is left out on the device: the host does not wait for the norm.

    Attributes:
        module, stepper: the objective and the optimizer as Fabric wraps them.
        meter, highest: get the losses, the gradients' norm, and whether the step was left out; the losses of the examples.
        idle: parameters that are not trained at that share of the budget.
        clip: largest norm of the gradients; None for any.
    """

    fabric: Fabric
    module: Any
    optimizer: Optimizers
    stepper: Any
    group: ProcessGroup
    meter: StepMetrics
    idle: Callable[[float], Iterable[nn.Parameter]]
    clip: float | None
    highest: HighestLosses

    def __call__(self, step: StepBatches, progress: float) -> None:
        self.group.phase = "forward and backward"
        self.gradients(step, step.denominators.to(self.fabric.device, non_blocking=True), progress)
        self.group.phase = "optimizer step"
        for p in self.idle(progress):
            p.grad = None
        limit = math.inf if self.clip is None else self.clip
        norm = clip(self.fabric, self.module, self.stepper, limit)
        self.optimizer.skip = skip = (~norm.isfinite()).float()
        self.stepper.step()
        self.stepper.zero_grad()
        self.settle(skip, progress)
        self.meter.step(step.positions, step.flops, skip, norm)

    def gradients(self, step: StepBatches, denominators: Tensor, progress: float) -> None:
        """Runs forward and backward of every micro-batch; gradients are in `grad` afterwards.

        Args:
            denominators: of the step, on the device.
        """
        for i, batch in enumerate(step.batches):
            with accumulating(self.fabric, self.module, i + 1 < len(step.batches)):
                self.group.phase = "forward pass"
                losses = self.module(batch.to(self.fabric.device), denominators, progress, *self.highest.options)
                self.group.phase = "backward pass"
                self.fabric.backward(losses.total * self.group.data_world)
            self.meter.add(losses)
            self.highest.add(losses, batch)

    def settle(self, left_out: Tensor, progress: float) -> None:
        """Called after the optimizer's step; `left_out` is 1 where it was left out, else 0."""


@dataclass(eq=False)
class BalancedStep(PlainStep):
    """Trains on the tasks' losses as a balance method combines them, and plainly before `start`.

    Attributes:
        start: share of the budget from which tasks are balanced.
    """

    balance: Balancing
    start: float

    def gradients(self, step: StepBatches, denominators: Tensor, progress: float) -> None:
        if progress < self.start:
            super().gradients(step, denominators, progress)
            return
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        self.balance.take(step, denominators, progress, lr, self.meter.add)

    def settle(self, left_out: Tensor, progress: float) -> None:
        if progress >= self.start:
            self.balance.settle(left_out, progress)


SEEN = 30  # micro-batches with a task after which its targets, if there were none, count as missing
REMEDY = "look at the rows of these tasks and at unused.csv, which counts those that were left out, or leave the task out"


class StepGuard:
    """Runs steps under a guard.

    Args:
        idle: parameters that are not trained at that share of the budget.
        seen: as of `Targets`.
    """

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        idle: Callable[[float], Iterable[nn.Parameter]],
        seen: int = SEEN,
    ) -> None:
        self.objective, self.idle, self.guard = objective, idle, Guard(objective, optimizer)
        layout = getattr(getattr(objective, "model", None), "layout", None)
        weights = getattr(objective, "stream_weights", None)
        self.targets = Targets(layout, weights, seen) if isinstance(layout, Layout) else None

    def step(
        self,
        number: int,
        step: StepBatches,
        progress: float,
        train: Callable[[StepBatches], None],
        say: Callable[[str], None] = lambda text: None,
        trace: bool = False,
    ) -> list[Finding]:
        """Takes the step of this number (from 1) by `train`; reports and returns the guard's new findings.

        Args:
            progress: share of the budget that is used.

        Raises:
            UserError: autograd failed; with the diagnosis.
        """
        guard = self.guard
        reshard(self.objective)
        guard.idle = {id(p): p for p in self.idle(progress)}
        known = {finding.key for finding in guard.findings}
        try:
            guard.run(lambda: train(step), step.batches, trace=trace)
        except GraphError as error:
            raise UserError(f"step {number}: {error}") from error
        if self.targets is not None:
            guard.add(self.targets.look(step.batches))
        new = [finding for finding in guard.findings if finding.key not in known]
        if new:
            say(f"guard, step {number}:\n{report(new)}")
        return new


class Targets:
    """Counts the targets of streams and tasks, and finds those that should have had some and had none.

    A task counts as missing once `seen` micro-batches had it, a stream once that holds of the tasks that train it together.

    Args:
        weights: of the K streams' losses [K]; all 1 by default. Streams without weight are left alone.
    """

    def __init__(self, layout: Layout, weights: Tensor | None = None, seen: int = SEEN) -> None:
        self.names, self.seen = [*TASKS, *layout.names], seen
        trained = torch.tensor([task.trained(layout) for task in TASKS.values()])
        self.trained = trained if weights is None else trained & (weights.cpu() > 0)  # [T, K], of T tasks
        self.batches = torch.zeros(len(TASKS))
        self.counts = torch.zeros(self.trained.shape)
        self.steps = self.examples = 0
        self.reported: set[str] = set()

    def look(self, batches: Sequence[Any]) -> list[Finding]:
        """Counts a step's batches; returns a finding of what is newly missing."""
        self.steps += 1
        for batch in (batch for batch in batches if isinstance(batch, Batch)):
            self.examples += batch.examples
            self.batches += (torch.bincount(batch.task.flatten() + 1, minlength=len(TASKS) + 1)[1:] > 0).float()
            self.counts += cells(batch)
        has_targets = torch.cat([(self.counts * self.trained).sum(1), self.counts.sum(0)]) > 0
        is_due = torch.cat([self.batches * self.trained.any(1), self.batches @ self.trained.float()]) >= self.seen
        names = [name for name in compress(self.names, (is_due & ~has_targets).tolist()) if name not in self.reported]
        self.reported.update(names)
        message = f"{shortlist(names)} got no target in {self.steps} steps ({self.examples} examples): nothing is trained there"
        return [Finding("no_target", message, REMEDY, tensor=f"targets of {shortlist(names, 12)}")] if names else []


@dataclass(eq=False)
class GuardedStep:
    """Takes the steps of another under the graph guard.

    Attributes:
        number: steps taken, for messages.
        say: prints new findings.
        trace: record every operation.
    """

    take: Step
    guard: StepGuard
    number: int = 0
    say: Callable[[str], None] = lambda text: None
    trace: bool = False

    def __call__(self, step: StepBatches, progress: float) -> None:
        self.number += 1
        self.guard.step(self.number, step, progress, lambda step: self.take(step, progress), self.say, self.trace)


@dataclass(eq=False)
class TimedStep(Observer):
    """Takes the steps of another, and says which of them took long.

    Attributes:
        idle: parameters that are not trained at that share of the budget: with others a step takes another time.
    """

    take: Step
    times: StepTimes
    usage: Usage
    idle: Callable[[float], Iterable[nn.Parameter]]
    say: Callable[[str], None]
    number: int = 0
    line: str | None = None

    def on_step_begin(self, step: int) -> None:
        self.number = step
        self.times.begin()

    def __call__(self, step: StepBatches, progress: float) -> None:
        self.times.of_kind(frozenset(map(id, self.idle(progress))))
        self.take(step, progress)
        self.usage.waited += step.waited
        self.times.add("waiting for data", step.waited)
        self.times.add("waiting for another process", step.held_up)
        self.line = self.times.end(self.number)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if self.line is not None:
            self.say(self.line)
