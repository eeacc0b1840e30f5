"""Takes one training step: fetches its micro-batches, with the counts that processes must agree on before they compute it, runs
forward and backward of each, then one step of the optimizer; under the graph guard where that is asked for, which also finds
streams and tasks that get no target.

Each of `PlainStep`, `GuardedStep` and `TimedStep` is a `Step`: whoever trains calls one, and does not ask which.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from omni.diagnostics import Finding, GraphError, Guard, report
from omni.diagnostics.findings import shortlist
from omni.errors import UserError
from omni.layout import Layout
from omni.tasks import TASKS
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.data.sources.mixture import UsedUp
from train.distributed.fabric import accumulating, clip, reshard
from train.distributed.process_group import ProcessGroup
from train.objective.objective import HEADS, cells
from train.optim.optimizer import Optimizers
from train.trainer.balanced_step import Balancing
from train.trainer.logs import HighestLosses
from train.trainer.metrics import StepMetrics, base_rate
from train.trainer.parts import Observer, Parts, StepBatches
from train.trainer.signals import SIGNALS, Stop


@dataclass
class Feed:
    """Fetches steps. All processes call `next` together: it makes the loop's one exchange between them, on the CPU.

    Attributes:
        flops: FLOPs of a batch, given its targets.
        clock: seconds that the run has taken.
        balanced: a batch's targets are also counted by task and stream, [T, K].
        used_up: the data of any process have ended: the last `next` is no whole step.
    """

    batches: Iterator[Sequence[Any]]
    parts: Parts
    flops: Callable[[Any, Tensor], float] | None
    clock: Callable[[], float]
    group: ProcessGroup
    stop: Stop
    balanced: bool = False
    used_up: bool = False

    def next(self) -> StepBatches:
        """Fetches the next step. UserError, on all processes, where the data of any are broken."""
        start, group = time.perf_counter(), self.group
        group.phase = "waiting for data"
        batches: Sequence[Any] = ()
        failure: UserError | None = None
        ended, shape = False, (len(self.parts.tasks), len(self.parts.streams))
        sizes = [2, shape[1] + HEADS, math.prod(shape) * self.balanced]
        counts = torch.zeros(sum(sizes), dtype=torch.float64)
        try:
            batches = next(self.batches)
            for batch in batches:
                targets = self.parts.targets(batch)
                work = [batch.positions, self.flops(batch, targets) if self.flops is not None else 0.0]
                by_task = cells(batch).flatten() if self.balanced else torch.zeros(0)
                counts += torch.cat([torch.tensor(work, dtype=torch.float64), targets.double(), by_task.double()])
        except UsedUp:
            ended = True
        except UserError as error:
            failure = error
        waited = time.perf_counter() - start
        flags = [failure is not None, ended, *(self.stop.number == s for s in SIGNALS)]
        clock = self.clock() if group.first else 0.0
        own = torch.cat([counts * group.counts, torch.tensor([clock, *flags], dtype=torch.float64)])
        group.phase = "exchange of counts"
        whole = group.meet(own)
        held_up = time.perf_counter() - start - waited
        seconds, failed, ended_in, *stops = whole[len(counts) :].tolist()
        if failed:
            group.raise_if_any_failed(failure)
        self.used_up = ended_in > 0
        stop = next((int(s) for s, flag in zip(SIGNALS, stops, strict=True) if flag), 0)
        (positions, flops), targets, by_task = whole[: len(counts)].split(sizes)
        own_cells = by_task.view(shape) if self.balanced else None
        return StepBatches(batches, targets.long(), float(positions), float(flops), seconds, stop, own_cells, waited, held_up)


Step = Callable[[StepBatches, float], object]
"""Takes a step of these batches, given the share of the budget that is used."""


@dataclass(eq=False)
class PlainStep:
    """Trains on the sum of the losses, or on the tasks' losses as a balance method combines them.

    Each loss is divided by the counts of the whole step, over all processes; gradients are averaged over processes, hence
    the factor. A step whose gradients are not finite is left out on the device: the host does not wait for the norm.

    Attributes:
        module, stepper: the objective and the optimizer as Fabric wraps them.
        meter, highest: get the losses, the gradients' norm, and whether the step was left out; the losses of the examples.
        idle: parameters that are not trained at that share of the budget.
        balance: of the tasks, from the share `start` of the budget on; None for the plain sum.
    """

    fabric: Fabric
    module: Any
    optimizer: Optimizers
    stepper: Any
    group: ProcessGroup
    meter: StepMetrics
    idle: Callable[[float], Iterable[nn.Parameter]]
    config: FitConfig
    highest: HighestLosses
    balance: Balancing | None = None
    start: float = 0.0

    def __call__(self, step: StepBatches, progress: float) -> None:
        self.group.phase = "forward and backward"
        denominators = step.denominators.to(self.fabric.device, non_blocking=True)
        balance = self.balance if progress >= self.start else None
        if balance is None:
            self.gradients(step, denominators, progress)
        else:
            balance.take(step, denominators, progress, base_rate(self.optimizer), self.meter.add)
        self.group.phase = "optimizer step"
        for p in self.idle(progress):
            p.grad = None
        limit = math.inf if self.config.clip is None else self.config.clip
        norm = clip(self.fabric, self.module, self.stepper, limit)
        self.optimizer.skip = skip = (~norm.isfinite()).float()
        self.stepper.step()
        self.stepper.zero_grad()
        if balance is not None:
            balance.settle(skip)
        self.meter.step(step.positions, step.flops, skip, norm)

    def gradients(self, step: StepBatches, denominators: Tensor, progress: float) -> None:
        """Runs forward and backward of every micro-batch; gradients are in `grad` afterwards. `denominators`: on the device."""
        for i, batch in enumerate(step.batches):
            with accumulating(self.fabric, self.module, i + 1 < len(step.batches)):
                self.group.phase = "forward pass"
                losses = self.module(batch.to(self.fabric.device), denominators, progress, *self.highest.options)
                self.group.phase = "backward pass"
                self.fabric.backward(losses.total * self.group.data_world)
            self.meter.add(losses)
            self.highest.add(losses, batch)


SEEN = 30  # micro-batches with a task after which its targets, if there were none, count as missing
REMEDY = "look at the rows of these tasks and at unused.csv, which counts those that were left out, or leave the task out"


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
        idle: parameters that are not trained at that share of the budget.
        number: steps taken, for messages.
        say: prints new findings.
        seen: as of `Targets`.
        trace: record every operation.
    """

    take: Step
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    idle: Callable[[float], Iterable[nn.Parameter]]
    number: int = 0
    say: Callable[[str], None] = lambda text: None
    seen: int = SEEN
    trace: bool = False

    def __post_init__(self) -> None:
        self.guard = Guard(self.objective, self.optimizer)
        layout = getattr(getattr(self.objective, "model", None), "layout", None)
        weights = getattr(self.objective, "stream_weights", None)
        self.targets = Targets(layout, weights, self.seen) if isinstance(layout, Layout) else None

    def __call__(self, step: StepBatches, progress: float) -> list[Finding]:
        """Takes a step; reports and returns the guard's new findings. UserError where autograd failed; with the diagnosis."""
        self.number += 1
        guard = self.guard
        reshard(self.objective)
        guard.idle = {id(p): p for p in self.idle(progress)}
        known = {finding.key for finding in guard.findings}
        try:
            guard.run(lambda: self.take(step, progress), step.batches, trace=self.trace)
        except GraphError as error:
            raise UserError(f"step {self.number}: {error}") from error
        if self.targets is not None:
            guard.add(self.targets.look(step.batches))
        new = [finding for finding in guard.findings if finding.key not in known]
        if new:
            self.say(f"guard, step {self.number}:\n{report(new)}")
        return new


FACTOR, LEAST = 3.0, 1.0
"""A step is reported where it takes more than `FACTOR` times the median, and more than `LEAST` seconds."""
KNOWN = 5
"""Steps before there is a median; until then only steps that compile graphs are reported."""
COMPILING = "compiling"


def graphs_compiled() -> int:
    """Number of graphs that torch.compile has compiled in this process. Imports nothing: that alone takes over a second."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"].get("unique_graphs", 0))


@dataclass(eq=False)
class TimedStep(Observer):
    """Takes the steps of another, and says which of them took long, and why. Time between a step's end and the next one's
    begin does not count, such as that in which the device finishes what the steps have queued on it.

    Attributes:
        idle: parameters that are not trained at that share of the budget: with others a step takes another time.
        graphs: number of graphs compiled so far.
        recent: seconds of the last steps with these idle parameters.
        unexplained: outliers without a part that explains them, of which the 1st, 2nd, 4th, 8th and so on are reported.
        line: what is to be said of the last step.
    """

    take: Step
    idle: Callable[[float], Iterable[nn.Parameter]]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.perf_counter
    graphs: Callable[[], int] = graphs_compiled
    resting: frozenset[int] = frozenset()
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    unexplained: int = 0
    begun: tuple[float, int] = (0.0, 0)
    line: str | None = None

    def on_step_begin(self, step: int) -> None:
        self.begun = self.clock(), self.graphs()

    def __call__(self, step: StepBatches, progress: float) -> None:
        resting = frozenset(map(id, self.idle(progress)))
        if resting != self.resting:
            self.recent.clear()
            self.resting = resting
        self.take(step, progress)
        since, compiled = self.begun
        seconds = self.clock() - since
        parts = {"waiting for data": step.waited, "waiting for another process": step.held_up}
        parts[COMPILING] = seconds - sum(parts.values()) if self.graphs() > compiled else 0.0
        self.line = self._outlier(seconds, parts)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if self.line is not None:
            self.say(f"step {step} {self.line}")

    def _outlier(self, seconds: float, parts: Mapping[str, float]) -> str | None:
        """What is to be said of a step of so many seconds, with those of its parts; None where it is no outlier."""
        usual = statistics.median(self.recent) if len(self.recent) >= KNOWN else None
        name, longest = max(parts.items(), key=lambda part: part[1])
        self.recent.append(seconds)
        if seconds <= LEAST or (usual is None and name != COMPILING) or seconds <= FACTOR * (usual or 0.0):
            return None
        cause, again = f"{name} took {longest:.1f} s", ""
        if 2 * longest < seconds - (usual or 0.0):
            self.unexplained += 1
            if self.unexplained & (self.unexplained - 1):  # no power of two
                return None
            cause = "nothing that is measured explains it"
            again = f" (the {self.unexplained}th such step)" if self.unexplained > 2 else ""
        compared = "" if usual is None else f", {usual:.2g} s are usual"
        return f"took {seconds:.1f} s{compared}: {cause}{again}"
