"""The processes of a run, and the small values that they exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

from omni.errors import UserError
from omni.files import PASSING
from train.distributed.activity import Activity

T = TypeVar("T")

PATIENCE = timedelta(hours=4)
"""Timeout of processes that wait for each other, validation by one of them included; a process that dies is noticed at once."""


class ProcessGroup:
    """Exchanges small values between the processes of a run, on the CPU (gloo), without waiting for a device.

    Args:
        tensor: number of tensor-parallel processes: neighbours that compute the same batches.

    Attributes:
        rank, world: number of this process, and how many there are.
        data_rank, data_world: the same of processes with batches of their own, or groups of tensor-parallel ones.
        counts: whether this process's sums count, which are those of all of its tensor-parallel group.
        activity: what this process is doing, for `train.distributed.watchdog`.
        step: of the training.
    """

    def __init__(self, fabric: Fabric, tensor: int = 1) -> None:
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self.data_rank, self.data_world, self.counts = self.rank // tensor, self.world // tensor, self.rank % tensor == 0
        self.activity, self.step = Activity(since=time.monotonic()), 0
        self.outer: ProcessGroup | None = None
        self.group: Any = None
        if self.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        """True for the process of rank 0, which writes files and shows progress."""
        return self.rank == 0

    def enter_phase(self, name: str, long: bool = False) -> None:
        """Note what this process does from now on; all processes must call it alike.

        Args:
            long: it may take any time, as what the first process does alone.
        """
        self.activity = self.activity.phased(name, long, self.step)

    @contextmanager
    def waiting_for(self, inner: ProcessGroup) -> Iterator[None]:
        """A context in which this process waits for what exchanges in another group of the same processes, here or in a thread:
        that it waits for the others there is noted here, too."""
        inner.outer = self
        self._note_waiting(inner.activity.waiting)
        try:
            yield
        finally:
            inner.outer = None
            self._note_waiting(False)

    def _note_waiting(self, waits: bool) -> None:
        self.activity = self.activity._replace(waiting=waits, since=time.monotonic())

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Notes that this process waits for the others."""
        phase = self.activity
        self.activity = phase.exchanging()
        if (outer := self.outer) is not None:
            outer._note_waiting(True)
        yield
        self.activity = self.activity.phased(phase.phase, phase.long, phase.step)
        if (outer := self.outer) is not None:
            outer._note_waiting(False)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over processes, those of a tensor-parallel group once, in float64 on the CPU."""
        values = values.detach().to("cpu", torch.float64)
        return self.sum_all(values if self.counts else torch.zeros_like(values))

    def sum_all(self, values: Tensor) -> Tensor:
        """Sum a float64 tensor on the CPU over all processes."""
        if self.world > 1:
            with self._exchange():
                dist.all_reduce(values, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Send the first process's value (plain data) to all of them, and return it."""
        if self.world == 1:
            return value
        box = [value]
        with self._exchange():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Collect every process's value (plain data), in the order of ranks, on all of them."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        with self._exchange():
            dist.all_gather_object(box, value, group=self.group)
        return box

    def wait(self) -> None:
        if self.world > 1:
            with self._exchange():
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
                what, reason = error.filename or "a file", error.strerror or error
                failure = UserError(f"{what} cannot be read or written ({reason}); fix that and run the same command again")
                failure.again = error.errno in PASSING
        self.raise_if_any_failed(failure)
        return result
