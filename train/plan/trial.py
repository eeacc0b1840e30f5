"""Measures memory and time of two real steps of the worst batch, in a new process."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch

from omni.config import ModelConfig
from omni.errors import UserError
from omni.hardware import synchronize
from omni.profiling import PeakMemory
from train.config.run import FitConfig
from train.objective.objective import targets
from train.plan.balanced import assign_tasks, micro_batches_of
from train.plan.balanced_trial import balance_of
from train.plan.step import build_workbench, take_step
from train.plan.worst_batch import worst_batch

RETURN_ABOVE = 128 * 1024
"""Blocks from this many bytes on go back to the system when they are freed, in a measurement that asks for it. By default the
C library raises its own threshold as blocks are freed, keeps them, and cannot always use them again."""

RETURNED, KEPT = "freed blocks returned", "freed blocks kept, the C library's default"
"""The two ways in which memory is measured on a CPU."""


@dataclass(frozen=True)
class Attempt:
    """Measured memory and time.

    Attributes:
        peak: bytes over what the process held before the model was built.
        seconds: of the second step.
    """

    peak: int
    seconds: float


def attempt(config: FitConfig, shape: ModelConfig, micro_batches: int, device: str, keep_freed: bool = False) -> Attempt:
    """Build the model and take two steps of worst batches, in a new process, so that nothing else is measured.

    Args:
        micro_batches: of a step in one process; two are run at most (see `micro_batches_of`), as more need no more memory.
        keep_freed: on a CPU: let the C library keep freed blocks, as it does by default, instead of returning them
            (`MALLOC_MMAP_THRESHOLD_=131072` in the environment does the same for any command).

    Raises:
        UserError: there is not enough memory.
    """
    count = micro_batches_of(config, micro_batches)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            peak, seconds = pool.submit(_measure, config, shape, count, device, keep_freed).result()
        except (BrokenProcessPool, MemoryError, torch.OutOfMemoryError) as error:
            raise UserError(
                f"the worst batch does not fit on {device}: the attempt ran out of memory; turn one of the plan's knobs"
            ) from error
    return Attempt(peak, seconds * micro_batches / count)


def _measure(config: FitConfig, shape: ModelConfig, count: int, device: str, keep_freed: bool) -> tuple[int, float]:
    if not keep_freed:
        _return_freed()
    small = replace(shape, decoder=replace(shape.decoder, layers=1), encoder=shape.encoder.with_layers(1))
    packing = replace(config.data.packing, rows=1, length=min(32, config.data.packing.length))
    tiny = replace(config, data=replace(config.data, packing=packing))
    _steps(tiny, _narrow(small), micro_batches_of(config, 1), device)  # loads libraries and chooses kernels
    gc.collect()
    with PeakMemory(device) as memory:
        seconds = _steps(config, shape, count, device)
    return memory.peak, seconds


def _return_freed() -> None:
    """Ask the C library to map large blocks one by one (glibc's `mallopt(M_MMAP_THRESHOLD, ...)`; others have no such call)."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(-3, RETURN_ABOVE)


def _narrow(shape: ModelConfig) -> ModelConfig:
    """A small model with the same kinds of parts."""
    decoder = replace(shape.decoder, width=64, heads=2, kv_heads=1, head_dim=0, mlp_width=64)
    return replace(shape, decoder=decoder, encoder=shape.encoder.narrow(), projector=replace(shape.projector, hidden=64))


def _steps(config: FitConfig, shape: ModelConfig, count: int, device: str) -> float:
    torch.manual_seed(config.seed)
    bench = build_workbench(config, shape, device)
    batch = worst_batch(config.data, shape)
    if config.balance is not None:
        batch = replace(batch, task=assign_tasks(batch.task, config))
        bench.balance = balance_of(bench, config, batch, count, torch.device(device))
    wanted = (targets(batch) * count).to(device)
    batches = [batch.to(device) for _ in range(count)]
    start = 0.0
    for number in (1, 2):
        start = time.perf_counter()
        take_step(bench, batches, wanted, number)
        synchronize(torch.device(device))
    return time.perf_counter() - start
