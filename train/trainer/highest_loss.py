"""Keeps the examples with the highest loss, by which broken rows are found: a wrong transcript, the codes of another sound."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from heapq import nlargest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from omni.files import replacing
from train.data.batching.batch import Batch
from train.distributed.process_group import ProcessGroup
from train.objective.objective import Losses
from train.objective.task_losses import ExampleLosses

HIGHEST = "highest_loss.jsonl"
WINDOW = 1000
"""Steps after which an example is forgotten: at the start of a run the loss of every row is high."""


class NamedLoss(NamedTuple):
    """Mean loss per target of an example (nats), its row and tasks, its number of targets, and the step that it was in."""

    loss: float
    row: str
    task: str
    targets: int
    step: int

    def line(self) -> str:
        """As JSON; a loss that is not finite is null."""
        return json.dumps(self._asdict() | {"loss": round(self.loss, 4) if math.isfinite(self.loss) else None})


class HighestLosses:
    """The examples with the highest mean loss per target of the last `WINDOW` steps, over all processes.

    A row that several steps had is one of them once for each task, as it was last. Losses stay on the device until `write`.

    Args:
        count: number of examples; 0 to keep none.
        folder: of the run.

    Attributes:
        step: number of the step that is taken.
    """

    def __init__(self, count: int, folder: Path, group: ProcessGroup) -> None:
        self.count, self.file, self.group = count, folder / HIGHEST, group
        self.options = (ExampleLosses(),) if count else ()  # last arguments of the objective
        self.step = 0
        self.found: dict[tuple[str, str], NamedLoss] = {}
        self._waiting: deque[tuple[int, Tensor, Sequence[tuple[str, str]]]] = deque()

    def add(self, losses: Losses, batch: Batch) -> None:
        """Adds the examples of a micro-batch; none where the objective gave no losses by example."""
        if losses.by_example is not None:
            self._waiting.append((self.step, losses.by_example, batch.names.each))
            while self._waiting[0][0] <= self.step - WINDOW:
                self._waiting.popleft()

    def write(self) -> None:
        """Writes the file, in the first process. Waits for the device; all processes must call it."""
        if not self.count:
            return
        own = self._highest()
        self._waiting.clear()
        new = [one for of in self.group.gather(own) for one in of]
        for one in sorted(new, key=lambda one: one.step):
            self.found[one.row, one.task] = one
        self.found = {key: one for key, one in self.found.items() if one.step > self.step - WINDOW}
        if new and self.group.first:
            with replacing(self.file) as part:  # without waiting for the disk: the next row of the log writes it again
                part.write_text("".join(f"{one.line()}\n" for one in nlargest(self.count, self.found.values())))

    def _highest(self) -> list[NamedLoss]:
        """The highest of this process since the last `write`."""
        if not self._waiting:
            return []
        sums, counts = torch.cat([values for _, values, _ in self._waiting], dim=1)
        means = (sums / counts.clamp_min(1)).nan_to_num(math.inf)
        top = means.topk(min(self.count, len(means)))
        found = torch.stack([x.double() for x in (top.values, counts[top.indices], top.indices)]).tolist()
        names = [(*name, step) for step, _, names in self._waiting for name in names]
        each = [(loss, round(targets), names[round(at)]) for loss, targets, at in zip(*found, strict=True) if targets]
        return [NamedLoss(loss, row, task, targets, step) for loss, targets, (row, task, step) in each]
