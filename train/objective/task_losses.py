"""Losses of balanced tasks: assigns every target of a step to one, and weighs each task in a forward pass.

The objective is a sum over targets. A task's loss is its part of that sum: the sum of all tasks at weight 1 and of the rest,
which belongs to no balanced task, is the plain objective.

Dimensions: T tasks of the task table, K streams, M balanced tasks, N features or positions with a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from train.balance.feature_hook import FeatureHook
    from train.data.batching.batch import Batch


def cells_by_task(names: Sequence[str], tasks: Sequence[str], streams: int) -> Tensor:
    """Index of the balanced task that each task's targets on each stream belong to, [T, K]; M for none of them."""
    place = [names.index(task) if task in names else len(names) for task in tasks]
    return torch.tensor(place)[:, None].repeat(1, streams)


def cells_by_stream(tasks: int, streams: int) -> Tensor:
    """Index of the balanced task as `cells_by_task`, where every stream is a task of its own, [T, K]."""
    return torch.arange(streams).repeat(tasks, 1)


def mean_factors(cell: Tensor, counts: Tensor, tasks: int) -> Tensor:
    """Factors that turn a task's part of the streams' means into the sum of its own means by stream, [T, K].

    Args:
        cell: [T, K], see `cells_by_task`.
        counts: targets of the step by task and stream, [T, K].
    """
    own = counts.new_zeros(tasks + 1, counts.shape[1]).scatter_add_(0, cell, counts)
    factor = counts.sum(0).clamp_min(1) / own.clamp_min(1)
    factor[-1] = 1
    return factor.gather(0, cell).float()


class TaskLosses:
    """Weights of the tasks in one forward pass. A plain class: Fabric converts the tensors of other containers.

    Args:
        cell: [T, K], see `cells_by_task`.
        weights: weight of each task's loss in the total, and last that of the rest, [M + 1] on the CPU. Targets of weight 0
            are left out altogether, and so is the alignment loss where the last is 0.
        ratio: factor of a target in its task's loss, [T, K], beside the objective's weights; 1 by default.
        graph: return losses with their graph, and multiply them by the weights (`task_cross_entropy`).
        hook: called between encoder and decoder.
        silent: compute the alignment loss only.
    """

    def __init__(
        self,
        cell: Tensor,
        weights: Tensor,
        ratio: Tensor | None = None,
        *,
        graph: bool = False,
        hook: FeatureHook | None = None,
        alignment_only: bool = False,
    ) -> None:
        self.cell, self.weights, self.ratio = cell, weights.float(), ratio
        self.graph, self.hook, self.alignment_only = graph, hook, alignment_only

    def __len__(self) -> int:
        """Number of balanced tasks, M."""
        return len(self.weights) - 1

    def split(self, batch: Batch, index: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None, list[Tensor]]:
        """Select the targets that take part, their factors (None for 1 each) and their balanced tasks: [N] for each stream.

        Args:
            index: flat positions of all targets.
        """
        task, device = batch.task.reshape(-1), batch.task.device
        cell = self.cell.to(device, non_blocking=True)
        ratio = torch.ones(self.cell.shape) if self.ratio is None else self.ratio
        counts = ratio if self.graph else ratio * self.weights[self.cell]
        table = counts.to(device, non_blocking=True)
        some = not self.graph and bool((counts == 0).any())
        kept, factors, places = [], [], []
        for k, at in enumerate(index):
            if some:
                at = at[table[task[at], k] != 0]
            kept.append(at)
            factors.append(table[task[at], k])
            places.append(cell[task[at], k])
        plain = not self.graph and bool((counts[counts != 0] == 1).all())
        return kept, None if plain else factors, places

    def losses(self, sums: Tensor, scale: Tensor) -> Tensor:
        """Losses of the tasks before their weights, and last that of the rest, [M + 1].

        Args:
            sums: summed losses by task and stream, [T, K].
            scale: of the objective, by stream, [K].
        """
        each = sums * scale if self.ratio is None else sums * scale * self.ratio.to(sums.device, non_blocking=True)
        found = each.new_zeros(len(self) + 1)
        return found.index_add_(0, self.cell.to(sums.device, non_blocking=True).flatten(), each.flatten())

    def tasks_of_features(self, batch: Batch, features: int) -> Tensor:
        """Index of each feature's balanced task, [N] long, -1 for none."""
        own = self.cell[:, 0].to(batch.task.device, non_blocking=True)
        task = feature_tasks(batch, features)
        return torch.where((task < 0) | (own[task] == len(self)), -1, own[task])


def feature_tasks(batch: Batch, features: int) -> Tensor:
    """Index into the table of tasks for each feature of a batch, [N] long, -1 for none."""
    index = batch.feature_index.reshape(-1)
    found = index.new_full((features + 1,), -1)
    found[torch.where(index >= 0, index, features)] = batch.task.reshape(-1)
    return found[:features]
