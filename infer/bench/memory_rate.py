"""Measuring on the machine at hand: medians, peak memory, and how fast weights can be read.

A step of a language model at small batch is bound by reading its weights from memory; so the rate of a plain
reading of the same tensors, by the same threads, in the same run, is what its speed is compared with.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from omni.hardware import synchronize

GIB = 1 << 30


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """How long `work` takes, until the device has done it."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def load() -> float | None:
    """Processes that wanted to run in the last minute, on average; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


class HighWater:
    """Peak memory since this was made, in bytes over what was held then: the device's on CUDA, the process's
    elsewhere.

    The process's peak is the kernel's own high-water mark, which misses no allocation. It is the mark of the
    process's whole life: where an earlier peak was higher, the figure is an upper bound.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        else:
            self._start = int(psutil.Process().memory_info().rss)

    @property
    def bytes(self) -> int:
        if self._cuda is not None:
            synchronize(self._cuda)
            return torch.cuda.max_memory_allocated(self._cuda) - self._start
        return high_water() - self._start


def high_water() -> int:
    """Largest resident size this process has had, in bytes (Linux: `VmHWM` of proc_pid_status(5); else
    getrusage(2))."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="ignore").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# --- reading -------------------------------------------------------------------------------------------------------

_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: w.sum(),
    "dot": lambda w: torch.dot(w.view(-1), w.view(-1)),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "matrix-vector": lambda w: torch.mv(w, w[0]),
}
"""Ways to pass over a matrix once. Which is fastest depends on the processor; each reads every element and writes
next to none."""


@dataclass(frozen=True)
class WeightReading:
    """The fastest plain reading: its name, and the seconds that it took over all tensors."""

    how: str
    seconds: float


class WeightReader:
    """Reads matrices in every way it knows; `fastest` is the way with the least median.

    On CUDA each way is captured as a graph, so that the launches of many small kernels do not count.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = [m.detach() for m in matrices]
        self.device = self.matrices[0].device
        self.bytes = sum(m.numel() * m.element_size() for m in self.matrices)
        self._ways = {how: self._prepare(one) for how, one in _READERS.items()}
        self._seconds: dict[str, list[float]] = {how: [] for how in self._ways}

    def _prepare(self, one: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        def way() -> list[Tensor]:
            return [one(m) for m in self.matrices]

        way()  # warm up
        if self.device.type != "cuda":
            return way
        synchronize(self.device)
        with torch.cuda.device(self.device):  # a graph is captured on a stream of the current device
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                way()
        return graph.replay

    def read(self) -> None:
        """Read everything once in each way."""
        for how, way in self._ways.items():
            self._seconds[how].append(seconds_of(way, self.device))

    @property
    def fastest(self) -> WeightReading:
        medians = {how: statistics.median(taken) for how, taken in self._seconds.items()}
        how = min(medians, key=lambda h: medians[h])
        return WeightReading(how, medians[how])
