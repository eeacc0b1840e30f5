"""How much memory a piece of work takes at its peak."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil
import torch


class PeakMemory:
    """Peak memory over what was held at entry, in bytes: of the device on CUDA, of the process elsewhere.

    On the CPU a thread reads the resident size every few milliseconds: the allocator returns large blocks at once, so the
    resident size follows what is held.
    """

    def __init__(self, device: torch.device | str = "cpu", every: float = 0.003) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.every = every
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return self
        self._process = psutil.Process()
        self.start = self._top = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(self.every):
            self._top = max(self._top, self._process.memory_info().rss)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self.start
            return
        self._top = max(self._top, self._process.memory_info().rss)
        self._stop.set()
        self._thread.join()
        self.peak = self._top - self.start
