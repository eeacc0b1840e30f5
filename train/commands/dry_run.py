"""`omni-train fit --dry_run`: checks and describes a run and its first batch, and measures two steps of its fullest rows on the
device, in a new process, as the loop takes them but without Fabric."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from omni.checkpoint.folder import read_config
from omni.config import ModelConfig
from omni.errors import UserError
from omni.lora.attach import add_adapter
from omni.model.linears import quantize
from omni.model.speech_model import SpeechModel
from omni.plugins import load_plugins, loaded
from omni.utils.hardware import peak_flops, synchronize
from omni.utils.profiling import GIB, peak_memory
from train.config.run import FitConfig
from train.console.progress import counted
from train.data.batching.batch import Batch
from train.data.batching.batch import describe as draw
from train.data.batching.loader import StepLoader
from train.data.build import build_pipeline
from train.data.sources.mixture import UsedUp
from train.distributed.fabric import AdapterPrecision, compile_blocks, product_type, quantized_type
from train.objective.objective import Objective, targets
from train.optim.optimizer import Average, build_optimizer, describe, parameter_groups, set_trainable
from train.plan.memory import estimate, meta_model, worst_batch
from train.plan.plan import kind_of, placed
from train.trainer.build import with_alignment
from train.trainer.initial_model import apply_lora, build_initial, shape_of, teacher_of
from train.trainer.metrics import StepFlops
from train.trainer.preflight import check_machine, check_start
from train.trainer.usage import is_out_of_memory, out_of_memory, step_range

T = TypeVar("T")


def dry_run(config: FitConfig, profile: str | None = None) -> None:
    """Describes the run's model and first batch, and prints memory and pace of two steps of the fullest rows on its device.

    Raises:
        UserError: what is wrong with the configuration; `OutOfMemory` where the device does not hold the steps.
    """
    print(describe_run(config, profile))
    config = with_alignment(config)
    shape, device_type = shape_of(config.model), kind_of(config)
    config, device = placed(config, None, device_type), torch.device(device_type)
    if config.fabric.strategy == "fsdp" or (device_type == "cuda" and not torch.cuda.is_available()):
        print("no steps are taken: the run's devices are not here, or share its weights; `omni-train plan` counts them")
        return
    try:
        peak, seconds = in_new_process(measure_steps, replace(config, plugins=loaded()), shape, device)
    except (BrokenProcessPool, MemoryError, RuntimeError) as error:
        if not isinstance(error, BrokenProcessPool) and not is_out_of_memory(error):
            raise
        raise out_of_memory(error, device, step=1) from error
    batch, processes, model = worst_batch(config.data, shape), config.fabric.processes or 1, meta_model(config, shape)
    work = StepFlops(model, config.objective)(batch, targets(batch)) * config.data.micro_batches / processes
    speed, columns = peak_flops(device), batch.positions * config.data.micro_batches
    counted = estimate(config, model, device_type == "cuda").needed(in_step=True) / GIB
    print(f"two steps of the fullest rows: peak {peak / GIB:.3f} GiB on each device ({counted:.3f} by the plan's arithmetic)")
    share = f", {work / seconds / speed:.1%} of the device's peak" if speed else ""
    print(f"pace: {seconds:.3g} s a step, {columns / seconds:,.0f} time steps a second{share}")


def in_new_process(work: Callable[..., T], *args: Any) -> T:
    """The result of `work` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def measure_steps(config: FitConfig, shape: ModelConfig, device: torch.device) -> tuple[int, float]:
    """Takes two steps of the fullest rows on a device; of a balanced run, on the plain sum of its losses. At most two
    micro-batches are run, as more need no more memory. Meant for a process of its own, which holds nothing else. Returns the
    peak in bytes, over what it held with its libraries loaded, and seconds of a step of one process."""
    load_plugins(config.plugins, "plugins")
    count = max(1, config.data.micro_batches // (config.fabric.processes or 1))
    packing = replace(config.data.packing, rows=1, length=min(32, config.data.packing.length))
    small = replace(config, data=replace(config.data, packing=packing), fabric=replace(config.fabric, compile=False))
    if device.type == "cpu":
        _two_steps(small, shape, device, 1)  # loads libraries
    with peak_memory(device) as memory:
        seconds = _two_steps(config, shape, device, min(2, count))
    return memory.peak, seconds * count / min(2, count)


def _two_steps(config: FitConfig, shape: ModelConfig, device: torch.device, count: int) -> float:
    bench, batch = Workbench(config, shape, device), worst_batch(config.data, shape)
    if config.fabric.compile:
        compile_blocks(bench.objective)
        bench.objective.compiled = True
    wanted, batches, start = (targets(batch) * count).to(device), [batch.to(device)] * count, 0.0
    for number in (1, 2):
        start = time.perf_counter()
        bench.step(batches, wanted, number)
        synchronize(device)
    return time.perf_counter() - start


def describe_run(config: FitConfig, profile: str | None = None) -> str:
    """Builds the model and one batch, and describes both. Devices and packages that this machine lacks are notes, not errors:
    the run may be for another machine.

    Args:
        profile: as of `fit`; only checked.
    """
    if profile is not None:
        step_range(profile, config.budget)
    config, notes = with_alignment(config), list[str]()
    check_start(config)
    try:
        check_machine(config)
    except UserError as error:
        notes.append(f"note: {error}")
    initial = build_initial(config.model, config.seed)
    model = initial.model
    if config.lora is not None:
        apply_lora(model, config.lora)
    also = set_trainable(model, config.trainable_patterns)
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    pipeline = build_pipeline(config.data, model.config, initial.tokenizer, initial.codec, config.objective.encoder_alone)
    steps = iter(StepLoader(pipeline, config.data.micro_batches))
    batch, start = next(steps)[0], time.perf_counter()
    with suppress(UsedUp):
        next(steps)
    made = time.perf_counter() - start
    whole, data = sum(p.numel() for p in model.parameters()), config.data
    return "\n".join(
        [
            f"model: {whole / 1e6:.2f} M parameters, {sum(p.numel() for _, p in learning) / 1e6:.2f} M trainable",
            f"optimizer: {describe(parameter_groups(learning, config.optimizer, also))}",
            f"step: {counted(data.micro_batches, 'micro-batch')} of {data.packing.rows} x {data.packing.length} time steps",
            draw(batch, model.layout, initial.tokenizer),
            f"data: one process makes the rows of a step in {made:.3g} s, and data.workers is {data.workers}",
            *notes,
        ]
    )


class Workbench:
    """Objective (with the model), optimizer and running average of a run, in its precision, with random weights; `named`: the
    trainable parameters, by the model's names."""

    def __init__(self, config: FitConfig, shape: ModelConfig, device: torch.device | str = "cpu") -> None:
        model, lora, precision, start = SpeechModel(shape), config.lora, config.fabric.precision, config.model.start
        teacher = teacher_of(config, model, start is not None and read_config(start).encoder.fixed_length)
        if lora is not None:
            if lora.quantize is not None:
                quantize(model, lora.quantize, lora.quantize_targets, quantized_type(precision))
            add_adapter(model, lora)
        model.set_checkpointing(config.fabric.checkpointing)
        self.config, self.objective = config, Objective(model, config.objective, teacher)
        also = set_trainable(model, config.trainable_patterns)
        if precision == "bf16-true":
            AdapterPrecision("bf16-true").convert_module(self.objective)
        self.objective.to(device)
        learning = [(name, p) for name, p in self.objective.named_parameters() if p.requires_grad]
        self.named = [(name.removeprefix("model."), p) for name, p in learning]
        self.optimizer = build_optimizer(self.named, config.optimizer, precision, also)
        self.average = Average(learning, config.ema) if config.ema is not None else None

    @property
    def learning(self) -> list[nn.Parameter]:
        return [p for _, p in self.named]

    def step(self, batches: Sequence[Batch], wanted: Tensor, number: int) -> None:
        """Runs forward and backward of every micro-batch, clipping, the optimizer and the running average; `wanted` are the
        step's targets, [K + HEADS] float on the batches' device, and `number` counts steps from 1."""
        half = product_type(self.config.fabric.precision, self.config.lora is not None)
        for batch in batches:
            with torch.autocast(wanted.device.type, half) if half is not None else nullcontext():
                total: Tensor = self.objective(batch, wanted, 1.0).total
            total.backward()
        norm = nn.utils.clip_grad_norm_(self.learning, self.config.clip if self.config.clip is not None else float("inf"))
        self.optimizer.skip = (~norm.isfinite()).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(number)
