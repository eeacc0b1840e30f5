"""Measures what a run does with its time and memory, for the rows of its log; says what the run held where memory ran out; and
traces steps with `torch.profiler` (`omni-train fit FILE --profile 10:15`)."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor

from omni.errors import LostError, UserError, in_one_line
from omni.utils.hardware import synchronize
from omni.utils.profiling import GIB
from train.config.sections import BudgetConfig
from train.distributed.process_group import AGAIN, ProcessGroup
from train.optim.optimizer import Average
from train.trainer.metrics import StepMetrics
from train.trainer.parts import Figures, Observer


@dataclass(eq=False)
class Usage(Observer):
    """What the processes of a run wait for, and the memory that this one holds.

    Attributes:
        waited: seconds that this process waited for data since the last row.
        pairs: events between which a CUDA device had nothing queued. Its own clock is read at rows of the log, when it has
            passed them: no step waits for them.
    """

    objective: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    meter: StepMetrics
    device: torch.device
    group: ProcessGroup
    waited: float = 0.0
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"

    @contextmanager
    def idle(self) -> Iterator[None]:
        """A context in which the host does something else than queue work on the device."""
        if not self.cuda:
            yield
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self.pairs.append((start, end))

    def on_log(self, step: int, figures: Figures) -> None:
        """Adds figures of the steps since the last row, as docs/training.md has them, after those of the meter."""
        gaps = sum(start.elapsed_time(end) for start, end in self.pairs) / 1e3
        own = torch.tensor([self.waited, gaps, self.meter.measured], dtype=torch.float64)
        waited, idle, whole = self.group.sum(own).tolist()
        self.waited, self.pairs = 0.0, []
        if whole:
            figures["data_wait"] = waited / whole
            if self.cuda:
                figures["host_gap"] = idle / whole
        figures |= {f"memory/{name}": size / GIB for name, size in self.parts().items()}
        figures["memory/peak"] = self.peak() / GIB
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def parts(self) -> dict[str, int]:
        """Bytes of weights, their gradients, the optimizer's state and the running average; of sharded ones this process's.

        Gradients count for the parameters that have had some, whenever it is asked.
        """
        state = self.optimizer.state
        return {
            "weights": bytes_of([*self.objective.parameters(), *self.objective.buffers()]),
            "gradients": bytes_of(state),
            "optimizer": bytes_of(value for of in state.values() for value in of.values() if isinstance(value, Tensor)),
            "average": bytes_of(self.average.values.values() if self.average is not None else ()),
        }

    def peak(self) -> int:
        """Most bytes that a CUDA device has held since the last row, or those that the process holds now."""
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else psutil.Process().memory_info().rss


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


def worker_lost(error: BaseException, step: int, rank: int) -> LostError | None:
    """The error of a run whose data worker has died in a step, as PyTorch's loader says; None for other errors."""
    match = re.search(r"DataLoader worker \(pid\S* (\d+)", str(error))
    if match is None:
        return None
    why = "for lack of memory perhaps: fewer data.workers, or a smaller data.prefetch, take less"
    return LostError(f"step {step}: a data worker (pid {match[1]}) of process {rank} was killed, {why}; {AGAIN}")


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
    memory = psutil.virtual_memory()
    limit, room = float(memory.total), f"the machine has {_size(memory.total)}, {_size(memory.available)} of it free"
    if on_gpu:
        try:
            free, limit = torch.cuda.mem_get_info(device)
            room = f"{device} has {_size(limit)}, {_size(free)} of it free"
        except RuntimeError:  # no room for the driver's own
            room, limit = f"{device} is full", math.inf
    lines = [f"memory ran out{'' if step is None else f' in step {step}'}: {asked}; {room}"]
    if usage is not None:
        gradients = [p.grad for p in usage.objective.parameters() if p.grad is not None]
        parts = usage.parts() | {"gradients": bytes_of(gradients)}  # those that there are just now
        if on_gpu == usage.cuda:
            parts["activations and all else"] = max(0, usage.peak() - sum(parts.values()))
        largest = sorted(parts.items(), key=lambda part: -part[1])
        lines.append(f"the run holds {', '.join(f'{name} {_size(size)}' for name, size in largest if size)}")
    lines.append(f"the last checkpoint is {saved}" if saved is not None else "no checkpoint was written yet")
    explained = OutOfMemory("\n  ".join(lines))
    explained.in_step, explained.limit = step is not None, limit
    return explained


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.2f} MiB"


# --- a profile ---------------------------------------------------------------------------------------------------------

FOLDER = "profile"
TOP = 25
"""Rows of the table."""
NONE = range(0)


def step_range(text: str, budget: BudgetConfig) -> range:
    """The steps of a run that `FIRST:LAST` names; UserError for anything else, or where they lie beyond the budget."""
    named = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, last = (int(named[1]), int(named[2])) if named is not None else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"profile is {text!r}; give the first and the last step, counted from 1, such as 10:15")
    if budget.steps is not None and last > budget.steps:
        raise UserError(f"profile is {text}, but budget.steps is {budget.steps}; name steps of the run")
    return range(first, last + 1)


class StepProfiler(Observer):
    """Profiles the steps of a range (counted from 1), in the first process, and leaves a trace and a table of them, named after
    the steps.

    Args:
        first: this start's first step.
        folder: of the run.
    """

    def __init__(self, steps: range, first: int, folder: Path, device: torch.device, say: Callable[[str], None]) -> None:
        left = range(max(first, steps.start), steps.stop)
        if len(left) < len(steps):
            message = f"only {named_steps(left)} can be profiled" if left else f"{named_steps(steps)} cannot be profiled"
            say(f"this start begins at step {first}: {message}")
        self.steps, self.folder, self.device, self.say = left, folder / FOLDER, device, say
        self.taken: list[int] = []
        self.profile: Any = None
        self.label: Any = None
        self.since = self.seconds = 0.0

    def on_step_begin(self, step: int) -> None:
        """Starts the profile where this is the first of its steps."""
        if step not in self.steps:
            return
        if self.profile is None:
            cuda = self.device.type == "cuda"
            os.environ.setdefault("KINETO_LOG_LEVEL", "4" if cuda else "6")  # else the library prints what it does
            activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * cuda]
            self.profile = torch.profiler.profile(activities=activities)
            self.profile.start()
            self.since = time.perf_counter()
        self.label = torch.profiler.record_function(f"ProfilerStep#{step}")
        self.label.__enter__()

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if self.profile is not None:
            self.label.__exit__(None, None, None)
            self.taken.append(step)
            if step == self.steps[-1]:
                self.on_steps_end()

    def on_steps_end(self) -> None:
        """Writes what there is; says where there is nothing, or no room for it, and the run goes on."""
        profile = self.profile
        self.close()
        if self.steps and not self.taken:
            self.say(f"nothing is profiled: the run ended before step {self.steps[0]}")
        if profile is None or not self.taken:
            return
        try:
            self._write(profile)
        except (OSError, RuntimeError, UserError) as error:
            self.say(f"the profile cannot be written to {self.folder}: {in_one_line(error)}")

    def close(self) -> None:
        """Stops the profile, where one has started."""
        profile, self.profile = self.profile, None
        if profile is not None:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self.since
            profile.stop()

    def _write(self, profile: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self.taken[0]}-{self.taken[-1]}"
        trace, table = self.folder / f"{name}.json.gz", self.folder / f"{name}.txt"
        profile.export_chrome_trace(str(trace))
        events = profile.key_averages()
        own = [e.self_device_time_total for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
        title = f"{named_steps(self.taken)} took {self.seconds:.2f} s"
        if own:
            title += f", in which kernels ran for {sum(own) / 1e6:.2f} s"
        elif self.device.type == "cuda":
            title += "; the driver let no kernels be seen"
        by = "self_device_time_total" if own else "self_cpu_time_total"
        table.write_text(f"{title}\n\n{events.table(sort_by=by, row_limit=TOP)}\n", encoding="utf-8")
        self.say(f"profile: {title}; what took it is in {table}, the trace in {trace}")


def named_steps(steps: Sequence[int]) -> str:
    """`step 3`, or `steps 10 to 15`."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
