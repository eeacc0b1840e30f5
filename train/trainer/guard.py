"""Runs steps under the graph guard, and finds streams and tasks that get no target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from omni.diagnostics import Finding, GraphError, Guard, report
from omni.diagnostics.findings import shortlist
from omni.errors import UserError
from omni.layout import Layout
from omni.tasks import TASKS
from train.data.batching.batch import Batch
from train.distributed.fabric import reshard
from train.objective.objective import cells
from train.trainer.feed import StepBatches

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
