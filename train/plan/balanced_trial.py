"""Runs a balanced step without Fabric: the run's own `train.trainer.balanced_step.Balancing` in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from omni.tasks import TASKS
from train.balance.section import balanced_tasks
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.distributed.precision import product_type
from train.distributed.process_group import ProcessGroup
from train.objective.objective import cells, targets
from train.plan.step import Balance, Workbench
from train.trainer.balanced_step import Balanced, Balancing
from train.trainer.feed import CountedStep


class _Fabric:
    """The part of Fabric's interface that `Balancing` uses, for one process."""

    global_rank, world_size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_backward_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


class _Wrapped(nn.Module):
    """The objective in the run's precision."""

    def __init__(self, objective: nn.Module, kind: str, products: torch.dtype | None) -> None:
        super().__init__()
        self.objective, self.kind, self.products = objective, kind, products

    def forward(self, *args: Any) -> Any:
        with torch.autocast(self.kind, self.products) if self.products is not None else nullcontext():
            return self.objective(*args)


def balance_of(bench: Workbench, config: FitConfig, batch: Batch, micro_batches: int, device: torch.device) -> Balance:
    """Builds the function that runs the passes of a step; `batch` is also the held-out one, where the method needs it."""
    section = config.balance
    assert section is not None
    outer = (batch,) if section.kind.bilevel else ()
    given = Balanced(balanced_tasks(section, config.data), cells, bench.objective.encoder_parameters, outer)
    fabric: Any = _Fabric(device)
    streams = bench.objective.model.layout.names
    module = _Wrapped(bench.objective, device.type, product_type(config.fabric.precision, config.lora is not None))
    group = ProcessGroup(fabric)
    aligned = config.objective.by_heads
    balancing = Balancing(
        section, given, fabric, module, bench.named, tuple(TASKS), streams, targets, group, micro_batches, aligned
    )

    def take(
        batches: Sequence[Batch], wanted: Tensor, forward: Callable[[Batch], Tensor], backward: Callable[[Tensor], None]
    ) -> None:
        counts = torch.stack([cells(b.to("cpu")) for b in batches]).sum(0).double()
        step = CountedStep(batches, wanted, positions=0, flops=0, seconds=0, stop=0, cells=counts)
        balancing.take(step, wanted, 1.0, config.optimizer.lr, lambda losses: None)

    return take
