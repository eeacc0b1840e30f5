"""Captures a runner's steps as CUDA graphs and replays them.

A graph repeats the kernels that it captured, at the addresses that they had: what has changed since (other adapters active,
weights freed) it does not see. So whoever owns graphs drops them when the model changes (`omni.lora.attach.changes`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from omni.generate.rows import RunnerRow, Start
from omni.utils.hardware import capture_lock

REHEARSALS = 3
"""Runs before a capture, in which libraries make their workspaces and choose their kernels."""


class Graphs:
    """The captured steps of one runner, by what determines their shape.

    All share one pool of memory, so they are replayed one after another, on one stream. Rehearsals and captures have a
    stream of their own, of the device that is current: PyTorch's default one belongs to the device that captured first.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def keep(self, wanted: Callable[[Any], bool]) -> None:
        """Drop the graphs whose keys are not wanted. With the last one its pool goes: PyTorch cannot capture into a pool that
        no graph uses any more, but in which a workspace lives on."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if wanted(key)}
        if not self._graphs:
            self._pool = None

    def capture(self, key: Hashable, work: Callable[[], None], state: Sequence[Tensor], idle: Callable[[], None]) -> None:
        """Capture `work`, which must do nothing but launch kernels.

        Args:
            state: tensors that it writes; they have their values again afterwards, also where it fails.
            idle: called before the rehearsals; sets `state` so that they write nowhere else.
        """
        device = state[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        graph = torch.cuda.CUDAGraph()
        with capture_lock(device):  # who synchronizes the device meanwhile would break the capture
            saved = [tensor.clone() for tensor in state]
            try:
                idle()
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    for _ in range(REHEARSALS):
                        work()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
        self._graphs[key], self._pool = graph, pool


def powers(most: int) -> list[int]:
    """The powers of two up to a number."""
    return [1 << i for i in range(most.bit_length())]


def coming(starts: Sequence[Start], visible: Sequence[int]) -> Iterator[list[RunnerRow | None]]:
    """The rows of every step that answers will take, where a step is of a power of two rows, or of all.

    Args:
        starts: of the answers, from slot 0 on.
        visible: numbers of positions that steps read (0: all).
    """
    together = any(start.partner is not None for start in starts)
    counts = [len(starts)] if together else sorted({*powers(len(starts)), len(starts)})
    for count, seen, text, audio in product(counts, visible, (True, False), (True, False)):
        rows = [
            RunnerRow(slot, max(seen, 1) - 1, s.text and text, s.audio and audio, s.partner, s.selection, logprobs=s.logprobs)
            for slot, s in enumerate(starts[:count])
        ]
        found = [row if row.needs_text or row.needs_audio else None for row in rows]
        while found and found[-1] is None:
            found.pop()
        if found:
            yield found
