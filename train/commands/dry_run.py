"""`omni-train fit --dry_run`: describes a run, and measures two steps of its fullest rows on the device, in a new process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from omni.config import ModelConfig
from omni.plugins import load_plugins, loaded
from omni.utils.hardware import peak_flops, synchronize
from omni.utils.profiling import GIB, PeakMemory
from train.config.run import FitConfig
from train.distributed.fabric import compile_blocks
from train.objective.flops import StepFlops
from train.objective.objective import targets
from train.plan.memory import estimate, meta_model
from train.plan.plan import kind_of, placed
from train.plan.step import build_workbench, take_step
from train.plan.worst_batch import worst_batch
from train.trainer import dry_run as description
from train.trainer.build import with_alignment
from train.trainer.initial_model import shape_of
from train.trainer.usage import is_out_of_memory, out_of_memory

T = TypeVar("T")


def dry_run(config: FitConfig, profile: str | None = None) -> None:
    """Describes the run's model and first batch, and prints memory and pace of two steps of the fullest rows on its device.

    Raises:
        UserError: what is wrong with the configuration; `OutOfMemory` where the device does not hold the steps.
    """
    print(description.dry_run(config, profile))
    config = with_alignment(config)
    shape, kind = shape_of(config.model), kind_of(config)
    config, device = placed(config, None, kind), torch.device(kind)
    if config.fabric.strategy == "fsdp" or (kind == "cuda" and not torch.cuda.is_available()):
        print("no steps are taken: the run's devices are not here, or share its weights; `omni-train plan` counts them")
        return
    try:
        peak, seconds = in_new_process(measure_steps, replace(config, plugins=loaded()), shape, device)
    except (BrokenProcessPool, MemoryError, RuntimeError) as error:
        if not isinstance(error, BrokenProcessPool) and not is_out_of_memory(error):
            raise
        raise out_of_memory(error, device, step=1) from error
    batch, one, model = worst_batch(config.data, shape), config.fabric.processes or 1, meta_model(config, shape)
    work = StepFlops(model, config.objective)(batch, targets(batch)) * config.data.micro_batches / one
    speed, columns = peak_flops(device), batch.positions * config.data.micro_batches
    counted = estimate(config, model, kind == "cuda").needed(in_step=True)
    own = f"peak {peak / GIB:.3f} GiB on each device ({counted / GIB:.3f} by the plan's arithmetic)"
    print(f"two steps of the fullest rows: {own}")
    share = f", {work / seconds / speed:.1%} of the device's peak" if speed else ""
    print(f"pace: {seconds:.3g} s a step, {columns / seconds:,.0f} time steps a second{share}")


def in_new_process(work: Callable[..., T], *args: Any) -> T:
    """The result of `work` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def measure_steps(config: FitConfig, shape: ModelConfig, device: torch.device) -> tuple[int, float]:
    """Takes two steps of the fullest rows on a device; of a balanced run, on the plain sum of its losses. At most two
    micro-batches are run, as more need no more memory. Meant for a process of its own, which holds nothing else.

    Returns:
        the peak in bytes, over what the process held with its libraries loaded, and seconds of a step of one process.
    """
    load_plugins(config.plugins, "plugins")
    count = max(1, config.data.micro_batches // (config.fabric.processes or 1))
    packing = replace(config.data.packing, rows=1, length=min(32, config.data.packing.length))
    small = replace(config, data=replace(config.data, packing=packing), fabric=replace(config.fabric, compile=False))
    if device.type == "cpu":
        _two_steps(small, shape, device, 1)  # loads libraries
    with PeakMemory(device) as memory:
        seconds = _two_steps(config, shape, device, min(2, count))
    return memory.peak, seconds * count / min(2, count)


def _two_steps(config: FitConfig, shape: ModelConfig, device: torch.device, count: int) -> float:
    bench, batch = build_workbench(config, shape, device), worst_batch(config.data, shape)
    if config.fabric.compile:
        compile_blocks(bench.objective)
        bench.objective.compiled = True
    wanted, batches, start = (targets(batch) * count).to(device), [batch.to(device)] * count, 0.0
    for number in (1, 2):
        start = time.perf_counter()
        take_step(bench, batches, wanted, number)
        synchronize(device)
    return time.perf_counter() - start
