"""Measures the memory and time of a piece of work on this machine."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from omni.utils.hardware import synchronize


@contextmanager
def peak_memory(device: torch.device | str = "cpu", every: float = 0.003) -> Iterator[SimpleNamespace]:
    """Context whose `peak` is, at its end, the peak memory above the memory held at entry, in bytes: of the device on CUDA, of
    the process elsewhere. On the CPU a thread reads the resident size every few milliseconds: the allocator returns large
    blocks at once, so the resident size follows the memory in use."""
    device, measured = torch.device(device), SimpleNamespace(peak=0)
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        yield measured
        synchronize(device)
        measured.peak = torch.cuda.max_memory_allocated() - start
        return
    process, over = psutil.Process(), threading.Event()
    start = top = process.memory_info().rss

    def watch() -> None:
        nonlocal top
        while not over.wait(every):
            top = max(top, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield measured
    finally:
        measured.peak = max(top, process.memory_info().rss) - start
        over.set()
        watcher.join()


GIB = 1 << 30


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `work` takes until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def timed(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median seconds of `work` after one warm-up."""
    return statistics.median([seconds_of(work, device) for _ in range(repeat + 1)][1:])


def free_memory() -> float:
    """Bytes of memory that this process may still take: of the machine, and of its control group (cgroups v2) where that has a
    limit; files that the system can drop count as free."""
    free = float(psutil.virtual_memory().available)
    root = Path("/sys/fs/cgroup")
    try:
        own = root / Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        groups = [group for group in (own, *own.parents) if group.is_relative_to(root)]
        limits = {group: (group / "memory.max").read_text().strip() for group in groups if (group / "memory.max").is_file()}
        for group in (group for group, limit in limits.items() if limit != "max"):
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = float(counts["active_file"]) + float(counts["inactive_file"])
            free = min(free, float(limits[group]) - float((group / "memory.current").read_text()) + cached)
    except (OSError, ValueError, KeyError):  # another system
        pass
    return free


def high_water() -> int:
    """Largest resident size this process has had, in bytes (Linux: `VmHWM` of proc_pid_status(5); else getrusage(2))."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="ignore").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
