"""Writes checkpoints while the run trains on: copies of the state on the host, and a thread that writes them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from omni.checkpoint.tensors import file_layout
from omni.files import pages
from omni.utils.profiling import GIB, free_memory, high_water
from train.checkpoint.state import CheckpointContent
from train.distributed.process_group import ProcessGroup

SHARE = 0.9
"""Largest share of a machine's free memory that copies may take."""

PIECE, THREADS = 16 << 20, 4
"""Bytes that a thread copies at once, and the most threads, which use a processor's memory fully."""


class StateCopy:
    """Host memory for a copy of the training state, kept from one checkpoint to the next; pinned where the state is on a
    GPU.

    Tensors of one file are copied to the places that they have in the file, which is written from there without another copy
    (`omni.files.LargeFile`). Shards are copied by PyTorch's stager.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._blocks: dict[str, Tensor] = {}
        self._stager: DefaultStager | None = None

    def take(self, held: CheckpointContent) -> CheckpointContent:
        """Copies what a checkpoint will hold; the copy is complete, and valid until the next one, when this returns.

        Raises:
            RuntimeError, OSError: no memory.
        """
        tensors = self._staged(held.tensors) if held.sharded else self._copied("tensors", held.tensors)
        balance = None if held.balance is None else self._copied("balance", held.balance)
        if self.cuda:
            torch.cuda.synchronize()
        return replace(held, tensors=tensors, balance=balance)

    def _staged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._stager is None or torch.__version__ < "2.13":  # before, a stager serves once
            options = StagingOptions(
                use_pinned_memory=self.cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=self.cuda
            )
            self._stager = DefaultStager(options)
        staged = self._stager.stage(dict(tensors))
        assert isinstance(staged, dict)
        return staged

    @torch.no_grad()
    def _copied(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not tensors:
            return {}
        _, offsets, size = file_layout(tensors)
        block, out = self._block(file, size), {}
        pieces: list[tuple[Any, Any]] = []
        for name, offset in offsets.items():
            tensor = tensors[name]
            out[name] = block[offset : offset + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
            if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes:
                both = (t.detach().reshape(-1).view(torch.uint8).numpy() for t in (out[name], tensor))
                pieces += zip(*([t[at : at + PIECE] for at in range(0, len(t), PIECE)] for t in both), strict=True)
            else:
                out[name].copy_(tensor, non_blocking=self.cuda)
        _copy(pieces)
        return out

    def _block(self, file: str, size: int) -> Tensor:
        block = self._blocks.get(file)
        if block is None or len(block) < size:
            self._unpin(self._blocks.pop(file, None))
            self._blocks[file] = block = torch.frombuffer(pages(size), dtype=torch.uint8)
            if self.cuda:  # where pinning is refused, copies are only slower
                torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)
        return block

    def _unpin(self, block: Tensor | None) -> None:
        if self.cuda and block is not None:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def release(self) -> None:
        """Gives the memory back."""
        for file in list(self._blocks):
            self._unpin(self._blocks.pop(file))
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _copy(pieces: Sequence[tuple[Any, Any]]) -> None:
    """Copies arrays, each by one thread: PyTorch's threads wait for each other at every tensor, long where cores are shared."""
    with ThreadPoolExecutor(min(THREADS, torch.get_num_threads())) as pool:
        for _ in pool.map(lambda piece: np.copyto(*piece), pieces):
            pass


def copied_bytes(held: CheckpointContent) -> int:
    """Bytes that this process takes to copy and write what a checkpoint will hold; of shards, their file's bytes besides."""
    tensors = (*held.tensors.values(), *(held.balance or {}).values())
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors) * (1 + held.sharded)


def lacking_memory(needed: int, on_cpu: bool, group: ProcessGroup) -> str | None:
    """Says where a machine has no room for its processes' copies (`needed` bytes of this one), and why; None where all have.
    Steps `on_cpu` take its memory as well: as much as they have taken at most so far. All processes must call it."""
    growth = max(0, high_water() - int(psutil.Process().memory_info().rss)) if on_cpu else 0
    needs = group.gather((socket.gethostname(), needed, growth, free_memory()))
    for host in sorted({host for host, *_ in needs}):
        sizes, more, rooms = zip(*(rest for name, *rest in needs if name == host), strict=True)
        free = max(0.0, min(rooms) - sum(more))
        if sum(sizes) > SHARE * free:
            return f"a copy of the state takes {sum(sizes) / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free on {host}"
    return None


class Background:
    """A piece of work in a thread of its own, which does not keep the process from ending.

    Attributes:
        error: what it has raised.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Waits until it is done."""
        self._thread.join()
