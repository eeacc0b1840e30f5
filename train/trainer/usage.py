"""Measures what a run does with its time and memory, for the rows of its log; says why a step took long, and what the run held
where memory ran out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.errors import LostError, UserError
from omni.utils.profiling import GIB
from train.distributed.process_group import AGAIN, ProcessGroup
from train.optim.optimizer import Average
from train.trainer.metrics import StepMetrics
from train.trainer.parts import Figures, Observer


class IdleTime:
    """Measures how long a CUDA device has nothing queued within a context, in which the host does something else.

    The device's own clock is read at rows of the log, when it has passed these events: no step waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self.cuda:
            self.entered = self._now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.cuda and error is None:
            self.pairs.append((self.entered, self._now()))

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """The sum since the last call; the device must have passed the contexts."""
        pairs, self.pairs = self.pairs, []
        return sum(start.elapsed_time(end) for start, end in pairs) / 1e3


class Usage(Observer):
    """What the processes of a run wait for, and the memory that this one holds.

    Attributes:
        waited: seconds that this process waited for data since the last row.
        idle: to be entered where a step queues nothing on the device.
    """

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: Average | None,
        meter: StepMetrics,
        device: torch.device,
        group: ProcessGroup,
    ) -> None:
        self.objective, self.optimizer, self.average, self.meter = objective, optimizer, average, meter
        self.device, self.group = device, group
        self.waited, self.idle = 0.0, IdleTime(device)
        self._parts: tuple[int, dict[str, int]] = -1, {}

    def on_log(self, step: int, figures: Figures) -> None:
        """Adds figures of the steps since the last row, as docs/training.md has them, after those of the meter."""
        own = torch.tensor([self.waited, self.idle.seconds(), self.meter.measured], dtype=torch.float64)
        waited, idle, whole = self.group.sum(own).tolist()
        self.waited = 0.0
        if whole:
            figures["data_wait"] = waited / whole
            if self.idle.cuda:
                figures["host_gap"] = idle / whole
        figures |= {f"memory/{name}": size / GIB for name, size in self.parts().items()}
        figures["memory/peak"] = self.peak() / GIB
        if self.idle.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def parts(self) -> dict[str, int]:
        """Bytes of weights, their gradients, the optimizer's state and the running average; of sharded ones this process's.

        Gradients count for the parameters that have had some, whenever it is asked. Found again only when there are more of
        these.
        """
        state = self.optimizer.state
        if self._parts[0] != len(state):
            values = [value for of in state.values() for value in of.values() if isinstance(value, Tensor)]
            sizes = {
                "weights": bytes_of([*self.objective.parameters(), *self.objective.buffers()]),
                "gradients": bytes_of(state),
                "optimizer": bytes_of(values),
                "average": bytes_of(self.average.values.values() if self.average is not None else ()),
            }
            self._parts = len(state), sizes
        return self._parts[1]

    def peak(self) -> int:
        """Most bytes that a CUDA device has held since the last row, or those that the process holds now."""
        return torch.cuda.max_memory_allocated(self.device) if self.idle.cuda else psutil.Process().memory_info().rss


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted once; of a sharded one those of this process."""
    each: dict[int, Any] = {id(tensor): tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in each.values())


# --- where memory runs out ----------------------------------------------------------------------------------------------


class OutOfMemory(UserError):
    """The memory of a device, or of the machine, ran out in a process of a run; `in_step` where it was taking a step."""

    alone = True
    in_step = True
    limit = math.inf
    """Bytes that there are for the run."""


UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def is_worker_lost(error: BaseException) -> bool:
    """Whether an error of PyTorch's loader says that a data worker has died."""
    return "DataLoader worker (pid" in str(error)


def worker_lost(error: BaseException, step: int, rank: int) -> LostError:
    """The error of a run whose data worker has died in a step."""
    match = re.search(r"\(pid\S* (\d+)", str(error))
    return LostError(
        f"step {step}: a data worker{f' (pid {match[1]})' if match else ''} of process {rank} was killed, for lack of memory "
        f"perhaps: fewer data.workers, or a smaller data.prefetch, take less; {AGAIN}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of PyTorch's allocators, of other libraries on a GPU, and of Python."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or bool(re.search(r"out of memory|can't allocate memory|ALLOC_FAILED", str(error)))


def out_of_memory(
    error: BaseException, device: torch.device, usage: Usage | None = None, saved: Path | None = None, step: int | None = None
) -> OutOfMemory:
    """The error that explains another one: what was asked for, what there is, what the run holds (unless it is not built
    yet), its last checkpoint, and the step that was being taken, if any."""
    match = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error), re.IGNORECASE)
    asked = f"{_size(float(match[1]) * UNITS[match[2]])} were asked for" if match is not None else "the request has no size"
    on_gpu = device.type == "cuda" and not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error)
    room, limit = _room(device if on_gpu else None)
    lines = [f"memory ran out{'' if step is None else f' in step {step}'}: {asked}; {room}"]
    if usage is not None:
        gradients = [p.grad for p in usage.objective.parameters() if p.grad is not None]
        parts = usage.parts() | {"gradients": bytes_of(gradients)}  # those that there are just now
        if on_gpu == usage.idle.cuda:
            parts["activations and all else"] = max(0, usage.peak() - sum(parts.values()))
        largest = sorted(parts.items(), key=lambda part: -part[1])
        lines.append(f"the run holds {', '.join(f'{name} {_size(size)}' for name, size in largest if size)}")
    lines.append(f"the last checkpoint is {saved}" if saved is not None else "no checkpoint was written yet")
    explained = OutOfMemory("\n  ".join(lines))
    explained.in_step, explained.limit = step is not None, limit
    return explained


def _room(gpu: torch.device | None) -> tuple[str, float]:
    """How much memory a GPU has, or the machine, and how much of it is free; and the bytes that a run may fill."""
    if gpu is None:
        memory = psutil.virtual_memory()
        return f"the machine has {_size(memory.total)}, {_size(memory.available)} of it free", memory.total
    try:
        free, whole = torch.cuda.mem_get_info(gpu)
    except RuntimeError:  # no room for the driver's own
        return f"{gpu} is full", math.inf
    return f"{gpu} has {_size(whole)}, {_size(free)} of it free", whole


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.2f} MiB"
