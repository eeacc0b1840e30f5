"""Measures the rate at which weights are read from memory on this machine.

A step of a language model at small batch is bound by reading its weights from memory; so its speed is compared with the
rate of a plain reading of the same tensors, by the same threads, in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from omni.hardware import capture_lock, synchronize
from omni.profiling import seconds_of

# --- reading -------------------------------------------------------------------------------------------------------

_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: w.sum(),
    "dot": lambda w: torch.dot(w.view(-1), w.view(-1)),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "matrix-vector": lambda w: torch.mv(w, w[0]),
}
"""Ways to read a matrix once. The fastest depends on the processor; each reads every element and writes next to
none."""


class WeightReader:
    """Reads matrices in every way of `_READERS`; `fastest` is the way with the least median.

    On CUDA each way is captured as a graph, so that the launches of many small kernels do not count.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        # Whole numbers have none of these ways; as many bytes are read instead.
        self.matrices = [m.detach() if m.is_floating_point() else torch.ones(len(m), m[0].nbytes // 4) for m in matrices]
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
            with capture_lock(self.device), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                way()
        return graph.replay

    def read(self) -> None:
        """Read everything once in each way."""
        for how, way in self._ways.items():
            self._seconds[how].append(seconds_of(way, self.device))

    @property
    def fastest(self) -> tuple[str, float]:
        """Name of the fastest way, and its median seconds over all matrices."""
        medians = {how: statistics.median(taken) for how, taken in self._seconds.items()}
        return min(medians.items(), key=lambda way: way[1])
