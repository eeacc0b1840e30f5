"""The processes of a run, and the small values that they exchange; who is lost ends the run, and is named, with the collective
that this process waits in, by what PyTorch's flight recorder keeps of the newest ones."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

from omni.errors import LostError, UserError
from omni.files import PASSING
from omni.utils.private import flight_recorder

T = TypeVar("T")

PATIENCE = timedelta(hours=4)
"""Timeout of processes that wait for one of them, as in validation; a process that dies is noticed at once."""
NAMING, LEAVING = timedelta(seconds=10), 30.0
"""Time in which the others answer where one is looked for, and seconds in which the process group has to end then."""
AGAIN = "the same command goes on from the last checkpoint, if there is one"
LOST = ("Connection closed by peer", "gloo/transport", "Connection reset by peer", "Timed out waiting", "NCCL communicator",
        "monitoredBarrier")  # fmt: skip
"""Parts of the messages of errors that mean that another process cannot be reached."""


class ProcessGroup:
    """Exchanges small values between the processes of a run, on the CPU (gloo), without waiting for a device.

    Attributes:
        rank, world: number of this process, and how many there are.
        data_rank, data_world: the same of processes with batches of their own, or groups of `tensor` tensor-parallel ones.
        counts: whether this process's sums count, which are those of all of its tensor-parallel group.
        step, phase: of the training, and what this process does, for messages.
        timeout: in which all processes have to come to a step's exchange (`meet`).
    """

    def __init__(self, fabric: Fabric, tensor: int = 1, timeout: float = PATIENCE.total_seconds()) -> None:
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self.data_rank, self.data_world, self.counts = self.rank // tensor, self.world // tensor, self.rank % tensor == 0
        self.step, self.phase, self.timeout = 0, "start", timedelta(seconds=timeout)
        self.group: Any = None
        self.steps: Any = None  # of what all do at once
        if self.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
            self.steps = dist.new_group(backend="gloo", timeout=self.timeout)

    @property
    def first(self) -> bool:
        """True for the process of rank 0, which writes files and shows progress."""
        return self.rank == 0

    def meet(self) -> None:
        """Wait for all processes; RuntimeError of PyTorch where one does not come in time, which the first process names."""
        if self.world > 1:
            dist.monitored_barrier(self.steps, self.timeout, wait_all_ranks=True)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over processes, those of a tensor-parallel group once, in float64 on the CPU."""
        values = values.detach().to("cpu", torch.float64)
        return self.sum_all(values if self.counts else torch.zeros_like(values))

    def sum_all(self, values: Tensor) -> Tensor:
        """Sum a float64 tensor on the CPU over all processes."""
        if self.world > 1:
            dist.all_reduce(values, group=self.steps)
        return values

    def broadcast(self, value: T) -> T:
        """Send the first process's value (plain data) to all of them, and return it."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Collect every process's value (plain data), in the order of ranks, on all of them."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value, group=self.group)
        return box

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.group)

    def raise_if_any_failed(self, error: UserError | None) -> None:
        """Raise a UserError in all processes where one has failed: a process's own error, or else that of the lowest rank."""
        failures = self.gather(None if error is None else (str(error), error.again))
        for rank, failure in enumerate(failures):
            if failure is not None:
                shared = error or UserError(f"{failure[0]} (process {rank})")
                shared.again, shared.shared = shared.again or failure[1], True
                raise shared

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` in every process; the UserError of any is raised in all."""
        result: Any = None
        failure: UserError | None = None
        try:
            result = work()
        except UserError as error:
            failure = error
        self.raise_if_any_failed(failure)
        return result  # type: ignore[no-any-return]

    def run_on_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` in the first process alone and return its result (None in the others).

        Its UserError is raised in all processes, and so is an OSError, as a UserError.
        """
        result, failure = None, None
        if self.first:
            try:
                result = work()
            except UserError as error:
                failure = error
            except OSError as error:
                file, reason = error.filename or "a file", error.strerror or error
                failure = UserError(f"{file} cannot be read or written ({reason}); fix that and run the same command again")
                failure.again = error.errno in PASSING
        self.raise_if_any_failed(failure)
        return result


@contextmanager
def lost_named(group: ProcessGroup) -> Iterator[None]:
    """A context in which errors that mean that another process cannot be reached become one line.

    Raises:
        LostError: with the processes that PyTorch names, and the collective in which this one waited.
    """
    try:
        yield
    except Exception as error:
        if not is_lost(error):
            raise
        threading.Thread(target=_end_what_hangs, daemon=True).start()
        waited = last_collective()
        absent = _absent(group) if "Timed out" in str(error) and "monitoredBarrier" not in str(error) else ""
        text = f"{_reason(error)}{absent}{waited and f'; it waited in {waited}'}"
        raise LostError(f"step {group.step}, process {group.rank}, {group.phase}: {text}; {AGAIN}") from error


def is_lost(error: BaseException | None) -> bool:
    """True where an error, or one that led to it, says that another process cannot be reached."""
    while error is not None:
        names = [base.__name__ for base in type(error).__mro__]
        if "DistError" in names or ("RuntimeError" in names and any(part in str(error) for part in LOST)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _absent(group: ProcessGroup) -> str:
    """Which processes do not answer, in PyTorch's words; the first process knows."""
    try:
        dist.monitored_barrier(group.group, NAMING, wait_all_ranks=True)
    except RuntimeError as error:
        return f"; {_reason(error)}"
    return ""


def _end_what_hangs() -> None:
    """End a process whose process group does not: NCCL may wait for a process that is lost."""
    time.sleep(LEAVING)
    if dist.is_initialized():
        os._exit(LostError.code)


KEPT = "2000"
"""Collectives that are kept: NCCL's default, which gloo has to be told."""


def keep_collectives() -> None:
    """Have the newest collectives kept; called before a process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", KEPT)


def last_collective() -> str:
    """The collective that waits, such as `gloo:all_reduce of [1000], the group's number 12`; "" where none is known."""
    description = ""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, and NCCL's
        with suppress(AttributeError, RuntimeError, ValueError, TypeError):
            description = described(json.loads(flight_recorder(name)).get("entries", [])) or description
    return description


def described(entries: list[Mapping[str, Any]]) -> str:
    """The first of the recorder's entries that has started and not ended; the last one where the recorder does not see ends."""
    ends = any(entry.get("state") == "completed" for entry in entries)
    waiting = [entry for entry in entries if entry.get("state") != "completed"] if ends else entries[-1:]
    if not waiting:
        return ""
    entry = waiting[0]
    sizes = " and ".join(map(str, entry.get("input_sizes") or [])) or "nothing"
    return f"{entry.get('profiling_name', 'a collective')} of {sizes}, the group's number {entry.get('collective_seq_id', '?')}"
