"""How a forward pass weighs the tasks: all alike (`PlainLosses`), or balanced ones each with a weight (`TaskLosses`).

The objective is a sum over targets. A balanced task's loss is its part of that sum: the sum of all tasks at weight 1 and of the
rest, which belongs to no balanced task, is the plain objective.

Dimensions: T tasks of the task table, K streams, M balanced tasks, N features or positions with a target, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from omni.tasks import TASKS
from omni.utils.hardware import to_device
from train.objective.cross_entropy import Heads, HeadTargets, linear_cross_entropy, sum_by, task_cross_entropy

if TYPE_CHECKING:
    from train.balance.balancer import FeatureHook
    from train.data.batching.batch import Batch


def cells_by_task(names: Sequence[str], tasks: Sequence[str], streams: int) -> Tensor:
    """Index of the balanced task that each task's targets on each stream belong to, [T, K]; M for none of them."""
    indices = [names.index(task) if task in names else len(names) for task in tasks]
    return torch.tensor(indices)[:, None].repeat(1, streams)


def cells_by_stream(tasks: int, streams: int) -> Tensor:
    """Index of the balanced task as `cells_by_task`, where every stream is a task of its own, [T, K]."""
    return torch.arange(streams).repeat(tasks, 1)


def mean_factors(cell: Tensor, counts: Tensor, tasks: int) -> Tensor:
    """Factors that turn a task's part of the streams' means into the sum of its own means by stream, [T, K]; of `cell` (see
    `cells_by_task`) and the step's targets by task and stream, [T, K]."""
    own = counts.new_zeros(tasks + 1, counts.shape[1]).scatter_add_(0, cell, counts)
    factor = counts.sum(0).clamp_min(1) / own.clamp_min(1)
    factor[-1] = 1
    return factor.gather(0, cell).float()


class Summed(NamedTuple):
    """Losses of a pass, as `Losses` has them."""

    total: Tensor
    sums: Tensor
    counts: Tensor
    by_task: Tensor | None
    by_example: Tensor | None = None


class PlainLosses:
    """All targets at weight 1. A plain class, as those below: Fabric converts the tensors of other containers.

    Attributes:
        aligned: the alignment loss takes part.
        alignment_only: and nothing else does.
        by_example: the losses of the examples are summed, too.
    """

    aligned = True
    alignment_only = False
    by_example = False

    def at_features(self, batch: Batch, features: Tensor) -> Tensor:
        """Called between encoder and decoder; returns the features [N, C]."""
        return features

    def split(self, batch: Batch, index: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        """Select the targets that take part, and their factors (None for 1 each): [N] for each stream.

        Args:
            index: flat positions of all targets.
        """
        return index, None

    def sum(self, batch: Batch, heads: Heads, targets: HeadTargets, alignment: Tensor) -> Summed:
        """Sum the losses of a batch.

        Args:
            targets: those of `split`.
            alignment: the weighted alignment loss.
        """
        total, each = linear_cross_entropy(heads, targets)
        examples = sums_by_example(batch, targets.index, each) if self.by_example else None
        return Summed(total + alignment, *sums_by_task(batch, targets.index, each), None, examples)

    def silent(self, alignment: Tensor) -> Tensor | None:
        """`by_task` of a pass of the losses of heads on the encoder only."""
        return None


class ExampleLosses(PlainLosses):
    """All targets at weight 1, and the sums of each example's losses besides."""

    by_example = True


class TaskLosses(PlainLosses):
    """Balanced tasks, each with its weight.

    Args:
        cell: [T, K], see `cells_by_task`.
        weights: weight of each task's loss in the total, and last that of the rest, [M + 1] on the CPU. Targets of weight 0
            are left out altogether, and so is the alignment loss where the last is 0.
        ratio: factor of a target in its task's loss, [T, K], beside the objective's weights; 1 by default.
        hook: called between encoder and decoder.
        alignment_only: compute the alignment loss only.
    """

    def __init__(
        self,
        cell: Tensor,
        weights: Tensor,
        ratio: Tensor | None = None,
        *,
        hook: FeatureHook | None = None,
        alignment_only: bool = False,
    ) -> None:
        self.cell, self.weights = cell, weights.float()
        self.ratio = torch.ones(cell.shape) if ratio is None else ratio
        self.hook, self.alignment_only, self.aligned = hook, alignment_only, bool(self.weights[-1] != 0)

    def __len__(self) -> int:
        """Number of balanced tasks, M."""
        return len(self.weights) - 1

    def at_features(self, batch: Batch, features: Tensor) -> Tensor:
        if self.hook is None:
            return features
        own, task = self.cell[:, 0].to(batch.task.device, non_blocking=True), feature_tasks(batch, len(features))
        return self.hook(features, torch.where((task < 0) | (own[task] == len(self)), -1, own[task]))

    def split(self, batch: Batch, index: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        factors = self.ratio * self.weights[self.cell]
        task, table = batch.task.reshape(-1), to_device(factors, batch.task.device)
        if bool((factors == 0).any()):
            index = [to_device(at[factors[own, k] != 0], task.device) for k, (at, own) in enumerate(batch.places)]
        if bool((factors[factors != 0] == 1).all()):
            return index, None
        return index, [table[task[at], k] for k, at in enumerate(index)]

    def sum(self, batch: Batch, heads: Heads, targets: HeadTargets, alignment: Tensor) -> Summed:
        summed = super().sum(batch, heads, targets, alignment)
        by_task = self.losses(summed.sums, targets.scale)
        return summed._replace(by_task=torch.cat([by_task[:-1], by_task[-1:] + alignment.detach()]))

    def silent(self, alignment: Tensor) -> Tensor | None:
        return torch.cat([alignment.new_zeros(len(self)), alignment.detach()[None]])

    def losses(self, sums: Tensor, scale: Tensor) -> Tensor:
        """Losses of the tasks before their weights, and last that of the rest, [M + 1]; of sums [T, K] and the objective's
        scale [K]."""
        each = sums * scale * self.ratio.to(sums.device, non_blocking=True)
        return sum_by(self.cell.to(sums.device, non_blocking=True).flatten(), each.flatten(), len(self) + 1)


class GraphLosses(TaskLosses):
    """Balanced tasks whose losses keep their graphs (`task_cross_entropy`), and are multiplied by the weights after that."""

    def split(self, batch: Batch, index: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        task, table = batch.task.reshape(-1), self.ratio.to(batch.task.device, non_blocking=True)
        return index, [table[task[at], k] for k, at in enumerate(index)]

    def sum(self, batch: Batch, heads: Heads, targets: HeadTargets, alignment: Tensor) -> Summed:
        task, cell = batch.task.reshape(-1), self.cell.to(batch.task.device, non_blocking=True)
        cells = [cell[task[at], k] for k, at in enumerate(targets.index)]
        by_task, each = task_cross_entropy(heads, targets, cells, len(self) + 1)
        by_task = torch.cat([by_task[:-1], by_task[-1:] + alignment])
        total = (by_task * to_device(self.weights, by_task.device)).sum()
        return Summed(total, *sums_by_task(batch, targets.index, each), by_task)


def sums_by_task(batch: Batch, index: Sequence[Tensor], each: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the losses of all targets (`each`, streams one after another), and count them, by task and stream, [T, K]; `index`
    has their positions, [N] per stream."""
    task, sizes = batch.task.reshape(-1), [len(at) for at in index]
    here = torch.cat([task[at] for at in index]) == torch.arange(len(TASKS), device=each.device)[:, None]
    losses = torch.where(here, each.detach(), 0)
    sums = torch.stack([own.sum(1) for own in losses.split(sizes, 1)], 1)
    return sums, torch.stack([own.sum(1) for own in here.split(sizes, 1)], 1).to(each.dtype)


def sums_by_example(batch: Batch, index: Sequence[Tensor], each: Tensor) -> Tensor:
    """Sum the losses of all targets, and count them, by segment of the batch (see `SegmentNames`), [2, S]."""
    bounds = batch.packed.ends.long()
    segment = torch.searchsorted(bounds, torch.cat(list(index)), right=True) - 1
    values = each.detach(), torch.ones_like(each)
    return torch.stack([each.new_zeros(len(bounds) - 1).index_add_(0, segment, value) for value in values])


def feature_tasks(batch: Batch, features: int) -> Tensor:
    """Index into the table of tasks for each feature of a batch, [N] long, -1 for none."""
    index = batch.feature_index.reshape(-1)
    tasks = index.new_full((features + 1,), -1)
    tasks[torch.where(index >= 0, index, features)] = batch.task.reshape(-1)
    return tasks[:features]
