"""Fetches the micro-batches of a step, and exchanges the counts that processes must agree on before they compute it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni.errors import UserError
from train.data.sources.mixture import UsedUp
from train.distributed.process_group import ProcessGroup
from train.objective.objective import HEADS
from train.trainer.signals import SIGNALS, Stop

Batch = Any


@dataclass(frozen=True)
class StepBatches:
    """This process's micro-batches of one step, with the counts of the whole step.

    Attributes:
        denominators: targets of the whole step by stream, and of heads on the encoder, [K + HEADS] int64 (the precisions that
            Fabric casts floating-point inputs to cannot count).
        positions, flops: of the whole step.
        seconds: of the run, by the first process's clock.
        stop: number of a signal that any process has received, or 0.
        cells: targets of the whole step by task and stream, [T, K], where tasks are balanced.
        waited, held_up: seconds that this process waited for the step's data, and then for the other processes.
    """

    batches: Sequence[Batch]
    denominators: Tensor
    positions: float
    flops: float
    seconds: float
    stop: int
    cells: Tensor | None = None
    waited: float = 0.0
    held_up: float = 0.0


class Feed:
    """Fetches steps. All processes call `next` together: it makes the loop's one exchange between them, on the CPU.

    Args:
        targets: number of targets of a batch, [K + HEADS], with which `flops` gives its FLOPs.
        clock: seconds that the run has taken.
        tasks, cells: their number, and that of a batch's targets by task and stream, [T, K], where these are counted besides.

    Attributes:
        used_up: the data of any process have ended: the last `next` is no whole step.
    """

    def __init__(
        self,
        batches: Iterator[Sequence[Batch]],
        targets: Callable[[Batch], Tensor],
        flops: Callable[[Batch, Tensor], float] | None,
        clock: Callable[[], float],
        streams: int,
        group: ProcessGroup,
        stop: Stop,
        tasks: int = 0,
        cells: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        self.batches, self.targets, self.flops, self.clock, self.cells = batches, targets, flops, clock, cells
        self.streams, self.group, self.stop, self.tasks = streams, group, stop, tasks
        self.used_up = False

    def next(self) -> StepBatches:
        """Fetches the next step. UserError, on all processes, where the data of any are broken."""
        start = time.perf_counter()
        self.group.phase = "waiting for data"
        batches: Sequence[Batch] = ()
        failure: UserError | None = None
        ended = False
        counts, positions, flops = torch.zeros(self.streams + HEADS, dtype=torch.float64), 0.0, 0.0
        cells = torch.zeros(self.tasks * self.streams, dtype=torch.float64)
        try:
            batches = next(self.batches)
            for batch in batches:
                targets = self.targets(batch)
                counts += targets
                positions += batch.positions
                flops += self.flops(batch, targets) if self.flops is not None else 0.0
                if self.cells is not None:
                    cells += self.cells(batch).flatten()
        except UsedUp:
            ended = True
        except UserError as error:
            failure = error
        waited = time.perf_counter() - start
        clock = self.clock() if self.group.first else 0.0
        flags = [float(self.stop.number == s) for s in SIGNALS]
        extras = torch.tensor([positions, flops, clock, float(failure is not None), float(ended), *flags], dtype=torch.float64)
        counts = torch.cat([counts, cells])
        if not self.group.counts:
            counts, extras[:2] = torch.zeros_like(counts), 0
        self.group.phase = "exchange of counts"
        self.group.meet()
        everyone = self.group.sum_all(torch.cat([counts, extras]))
        held_up = time.perf_counter() - start - waited
        positions, flops, clock, failed, ended_in, *flags = everyone[len(counts) :].tolist()
        if failed:
            self.group.raise_if_any_failed(failure)
        self.used_up = ended_in > 0
        noted = next((int(s) for s, flag in zip(SIGNALS, flags, strict=True) if flag), 0)
        whole, cells = everyone[: len(counts)].split([self.streams + HEADS, len(cells)])
        by_task = cells.view(self.tasks, self.streams) if self.tasks else None
        return StepBatches(batches, whole.long(), positions, flops, clock, noted, by_task, waited, held_up)
