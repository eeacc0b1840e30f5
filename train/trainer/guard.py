"""Runs steps under the graph guard, and finds streams and tasks that get no target and streams whose end is not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from omni.diagnostics import Finding, GraphError, Guard, report
from omni.diagnostics.checks.labels import REMEDY_END
from omni.diagnostics.findings import some
from omni.errors import UserError
from omni.layout import IGNORE, Layout
from omni.tasks import TASKS, find_task
from train.data.batching.batch import Batch
from train.data.config import DataConfig, tasks_of
from train.data.sources.mixture import least_shares
from train.objective.objective import cells
from train.trainer.feed import StepBatches

SEEN = 30
"""Micro-batches with a task after which its targets, if there were none, count as missing."""
DRAWS = 16.0
"""Expected examples of a task after which its targets count as missing: none by chance has then a probability of e^-16."""


class StepGuard:
    """Runs steps under a guard.

    Args:
        idle: parameters that are not trained at that share of the budget.
        data: the mixture, so that tasks that no batch has are found, too.
    """

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        idle: Callable[[float], Iterable[nn.Parameter]],
        data: DataConfig | None = None,
    ) -> None:
        self.guard, self.idle = Guard(objective, optimizer), idle
        self.targets = targets_of(objective, data)
        self.ends = ends_of(objective)

    def step(
        self,
        number: int,
        step: StepBatches,
        progress: float,
        train: Callable[[StepBatches], None],
        say: Callable[[str], None] = lambda text: None,
        trace: bool = False,
    ) -> list[Finding]:
        """Takes a step; reports and returns the guard's new findings.

        Args:
            number: of the step, from 1.
            progress: share of the budget that is used.
            train: takes the step.
            trace: record every operation.

        Raises:
            UserError: autograd failed; with the diagnosis.
        """
        guard = self.guard
        guard.idle = {id(p): p for p in self.idle(progress)}
        known = {finding.key for finding in guard.findings}
        try:
            guard.run(lambda: train(step), step.batches, trace=trace)
        except GraphError as error:
            raise UserError(f"step {number}: {error}") from error
        if self.targets is not None:
            guard.add(self.targets.look(step.batches))
        if self.ends is not None:
            guard.add(self.ends.look(step.batches))
        new = [finding for finding in guard.findings if finding.key not in known]
        if new:
            say(f"guard, step {number}:\n{report(new)}")
        return new


class Targets:
    """Counts targets until every stream and task that should have some has had one.

    A task counts as missing where `seen` micro-batches had it, or where the mixture should have drawn it `DRAWS` times (at the
    lowest weight that any stage gives it; not where rows name tasks of their own that the mixture lacks); a stream where that
    holds of the tasks that train it together. Streams whose loss has no weight are left alone.

    Dimensions: T tasks, K streams.

    Args:
        weights: of the streams' losses [K]; all 1 by default.
        data: the mixture; without it only tasks that batches have can be missing.
    """

    def __init__(self, layout: Layout, weights: Tensor | None = None, data: DataConfig | None = None, seen: int = SEEN) -> None:
        self.tasks, self.streams, self.seen = tuple(TASKS), tuple(layout.names), seen
        trained = torch.tensor([task.trained(layout) for task in TASKS.values()])
        self.trained = trained if weights is None else trained & (weights.cpu() > 0)  # [T, K]
        self.shares = shares_of(data)
        named = [] if data is None else tasks_of(data)
        self.unlisted = torch.tensor([task not in named for task in TASKS.values()])
        self.drawn = torch.zeros(len(self.tasks))
        self.counts = torch.zeros(self.trained.shape)
        self.examples = self.steps = 0
        self.said: set[str] = set()
        self.done = False

    def look(self, batches: Sequence[Any]) -> list[Finding]:
        """Counts a step's batches; returns a finding of what is newly missing."""
        if self.done:
            return []
        self.steps += 1
        for batch in batches:
            if isinstance(batch, Batch):
                self.examples += batch.examples
                self.drawn += (torch.bincount(batch.task.flatten() + 1, minlength=len(self.tasks) + 1)[1:] > 0).float()
                self.counts += cells(batch)
        return self._missed()

    def _missed(self) -> list[Finding]:
        with_tasks, with_streams = (self.counts * self.trained).sum(1) > 0, self.counts.sum(0) > 0
        has_unlisted = bool(
            (self.drawn[self.unlisted] > 0).any()
        )  # rows name their own tasks: the mixture's shares do not hold
        due = torch.zeros_like(self.shares) if has_unlisted else self.shares * self.examples
        late = (self.drawn >= self.seen) | (due >= DRAWS)
        trained = self.trained.float()
        late_streams = (self.drawn @ trained >= self.seen) | (due @ trained >= DRAWS)
        wanted = (self.shares > 0) & self.trained.any(1)
        self.done = bool(wanted.any() and with_tasks[wanted].all() and with_streams[self.trained[wanted].any(0)].all())
        tasks = _names(self.tasks, late & self.trained.any(1) & ~with_tasks)
        streams = _names(self.streams, late_streams & ~with_streams)
        names = [name for name in [*tasks, *streams] if name not in self.said]
        if not names:
            return []
        self.said.update(names)
        what = f"{some(names)} got no target in {self.steps} steps ({self.examples} examples): nothing is trained there"
        return [Finding("no_target", what, REMEDY, tensor=f"targets of {some(names, 12)}")]


class Ends:
    """Finds streams whose true ends are all masked; each is checked until it has had a target that is its end.

    A finding needs both: no target of a step or of those before is the end, and the end follows targets without being one. So
    answers that are cut off, streams and turns without targets, and prompts (which have an end, too) give none. Streams whose
    loss has no weight are left alone.

    Args:
        weights: of the streams' losses [K]; all 1 by default.
    """

    def __init__(self, layout: Layout, weights: Tensor | None = None) -> None:
        self.names = layout.names
        ends = layout.ids("end").tolist()
        self.left = {k: end for k, end in enumerate(ends) if weights is None or float(weights[k]) > 0}

    def look(self, batches: Sequence[Any]) -> list[Finding]:
        """Checks a step's batches; returns a finding of the streams at fault, each once."""
        masked = {}
        for k, end in list(self.left.items()):
            having = [batch for batch in batches if isinstance(batch, Batch) and len(batch.supervised[k])]
            if any(bool((batch.targets[:, k] == end).any()) for batch in having):
                del self.left[k]
                continue
            at = [place for batch in having for place in masked_ends(batch, k, end)]
            if at:
                del self.left[k]
                masked[self.names[k]] = at
        if not masked:
            return []
        count, (row, column) = sum(map(len, masked.values())), next(iter(masked.values()))[0]
        what = (
            f"no end is trained on {some(list(masked))}: {count} times it follows what is trained, with target {IGNORE}; "
            "the model will not stop"
        )
        where = f"targets of {some(list(masked), 12)}; {next(iter(masked))}: row {row}, column {column}"
        return [Finding("label_end", what, REMEDY_END, tensor=where)]


def masked_ends(batch: Batch, stream: int, end: int) -> list[list[int]]:
    """Row and column of the masked targets that should be the end: the end follows, and a target of the example precedes."""
    tokens, targets, segments = batch.tokens[:, stream], batch.targets[:, stream], batch.segments
    trained, masked = targets[:, :-2] != IGNORE, targets[:, 1:-1] == IGNORE
    found = trained & masked & (tokens[:, 2:] == end) & (segments[:, 2:] == segments[:, :-2])
    rows, columns = found.nonzero(as_tuple=True)
    return torch.stack([rows, columns + 1], dim=1).tolist()


REMEDY = (
    "look at the rows that the mixture draws (a row that names its own task keeps it, broken and too long ones are left out: "
    "rows_broken and rows_skipped of the log), or leave the task out of the mixture"
)


def _names(names: Sequence[str], chosen: Tensor) -> list[str]:
    return [name for name, is_chosen in zip(names, chosen.tolist(), strict=True) if is_chosen]


def shares_of(data: DataConfig | None) -> Tensor:
    """The lowest share of the draws that each task has at any time, [T]; zeros without a mixture, and of sources that end."""
    shares = torch.zeros(len(TASKS))
    for source, share in zip(data.sources, least_shares(data.weights), strict=True) if data is not None else ():
        if source.max_epochs is not None or source.max_rows is not None:
            continue
        stages = [_shares(weights) for weights in (source.tasks, *(stage.tasks for stage in source.stages))]
        own_tasks = source.made.own_tasks
        mixed = 1 - sum(own_tasks.values())
        shares += share * mixed * torch.stack(stages).amin(0)
        for name, own in own_tasks.items():
            shares[list(TASKS).index(name)] += share * own
    return shares


def _shares(weights: dict[str, float]) -> Tensor:
    out = torch.zeros(len(TASKS))
    for name, weight in weights.items():
        out[list(TASKS).index(find_task(name).name)] += weight
    return out / out.sum()


def targets_of(objective: nn.Module, data: DataConfig | None = None, seen: int = SEEN) -> Targets | None:
    """The `Targets` of an objective whose model has streams; None for others."""
    layout = getattr(getattr(objective, "model", None), "layout", None)
    weights = getattr(objective, "stream_weights", None)
    return Targets(layout, weights, data, seen) if isinstance(layout, Layout) else None


def ends_of(objective: nn.Module) -> Ends | None:
    """The `Ends` of an objective, as `targets_of`."""
    layout = getattr(getattr(objective, "model", None), "layout", None)
    return Ends(layout, getattr(objective, "stream_weights", None)) if isinstance(layout, Layout) else None
