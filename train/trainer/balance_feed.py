"""Targets by task and stream, counted in the loop's one exchange.

Dimensions: T tasks of the task table, K streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.distributed.fabric import Team
from train.trainer.feed import Batch, Feed, Step
from train.trainer.signals import Stop


@dataclass(frozen=True)
class CountedStep(Step):
    """A step of which is known how many targets each task has: `cells` [T, K], over all processes."""

    cells: Tensor


class CountingFeed(Feed):
    """Counts targets by task and stream in the loop's one exchange."""

    def __init__(
        self,
        batches: Iterator[Sequence[Batch]],
        targets: Callable[[Batch], Tensor],
        flops: Callable[[Batch, Tensor], float] | None,
        clock: Callable[[], float],
        shape: tuple[int, int],
        cells: Callable[[Batch], Tensor],
        team: Team,
        stop: Stop,
    ) -> None:
        self.shape, plain = shape, shape[1] + 1

        def both(batch: Batch) -> Tensor:
            return torch.cat([targets(batch).float(), cells(batch).flatten().float()])

        def work(batch: Batch, counts: Tensor) -> float:
            return 0.0 if flops is None else flops(batch, counts[:plain])

        super().__init__(batches, both, work, clock, shape[1] + shape[0] * shape[1], team, stop)

    def next(self) -> CountedStep:
        step, plain = super().next(), self.shape[1] + 1
        given = {name: getattr(step, name) for name in Step.__dataclass_fields__} | {"denominators": step.denominators[:plain]}
        return CountedStep(**given, cells=step.denominators[plain:].double().view(self.shape))
