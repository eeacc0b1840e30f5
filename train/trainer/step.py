"""Takes one training step: forward and backward of every micro-batch, then one step of the optimizer.

Each of `PlainStep`, `BalancedStep` and `GuardedStep` is a `Step`: whoever trains calls one, and does not ask which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_fabric import Fabric
from torch import Tensor, nn

from train.distributed.fabric import accumulating, clip
from train.distributed.process_group import ProcessGroup
from train.optim.optimizer import Optimizers
from train.trainer.balanced_step import Balancing
from train.trainer.feed import StepBatches
from train.trainer.guard import StepGuard
from train.trainer.logs import HighestLosses
from train.trainer.metrics import StepMetrics
from train.trainer.observer import Observer
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
