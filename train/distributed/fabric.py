"""Distributed training: builds Fabric from the configuration, with its precision and order of sums, wraps modules, and gathers
their state."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins import HalfPrecision
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from omni.convert.lazy import Lazy, LazyTensors
from omni.errors import UserError
from omni.lora.attach import adapted
from omni.model.decoder import Decoder
from omni.utils.private import ddp_kwargs
from omni.utils.process import silence
from train.config.sections import FabricConfig
from train.distributed.process_group import PATIENCE, ProcessGroup
from train.distributed.sharding import clip_over_meshes, shard, sharded_parts, unsynchronized

T = TypeVar("T")

GRACE = 0.2  # seconds that `leave` waits for the threads of the process group


def build_fabric(config: FabricConfig) -> Fabric:
    """Build Fabric from the configuration, not launched yet. UserError where Fabric refuses the combination, or flags of
    `fabric run` contradict it."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    config = config.decided()
    devices, num_nodes = placement(config, os.environ)
    if "SLURM_NTASKS" in os.environ and isinstance(devices, int):  # Fabric asks for it; srun sets it only where it was given
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(devices))
    if os.environ.get("LT_STRATEGY", "").startswith("fsdp"):
        raise UserError("`fabric run --strategy fsdp` is another, older one: leave it out there, and set fabric.strategy fsdp")
    strategy: Any = config.strategy
    if strategy == "fsdp":
        strategy = ModelParallelStrategy(lambda module, mesh: shard(module, config, mesh.device_type), timeout=PATIENCE)
    if os.environ.get("LT_PRECISION") == "bf16-true":
        raise UserError("`fabric run --precision bf16-true` rounds adapters: leave it out there, and set fabric.precision")
    # `fabric run` sets LT_* variables, which only Fabric's own defaults do not contradict.
    precision: Any = None if config.precision in ("32-true", "bf16-true") else config.precision
    half = AdapterPrecision("bf16-true") if config.precision == "bf16-true" else None
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=strategy,
            precision=precision,
            plugins=half,
        )
    except (ValueError, RuntimeError, ImportError, TypeError) as error:  # Fabric raises all of these for bad combinations
        reason = " ".join(str(error).split())
        if int(os.environ.get("LT_CLI_USED", "0")):
            reason += " (give each setting once: to `fabric run` or in the configuration)"
        raise UserError(
            f"fabric: accelerator {config.accelerator}, devices {devices}, strategy {config.strategy}, precision "
            f"{config.precision} is not available here: {reason}"
        ) from error
    if half is not None:
        half.device = fabric.device.type
    if isinstance(fabric.strategy, DDPStrategy):  # no buffer changes while it trains
        name = "forward_sync_buffers"
        known = inspect.signature(DistributedDataParallel).parameters
        ddp_kwargs(fabric.strategy)[name if name in known else "broadcast_buffers"] = False
    return fabric


def leave() -> None:
    """Destroy the process group, if there is one, and let its threads finish. A gloo thread that needs the interpreter's lock
    while the interpreter shuts down, to free a tensor, aborts the process after all its work is done (PyTorch issue 190489).
    Destroying the group waits for its threads only where nothing else references the group; wrappers such as DDP do, in
    reference cycles, hence the garbage collection."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        time.sleep(GRACE)


def placement(config: FabricConfig, environ: Mapping[str, str]) -> tuple[int | str, int]:
    """Number of devices per node, and of nodes: as configured, or as torchrun or srun has started the processes; UserError
    where the configuration asks for another number than was started."""
    devices: int | str = config.devices
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    started: tuple[int, int] | None = None
    launcher = "torchrun"
    if "TORCHELASTIC_RUN_ID" in environ:
        local = int(environ["LOCAL_WORLD_SIZE"])
        started = local, int(environ["WORLD_SIZE"]) // local
    elif "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        launcher = "srun"
        nodes = int(environ.get("SLURM_NNODES", "1"))
        started = int(environ.get("SLURM_NTASKS_PER_NODE", int(environ["SLURM_NTASKS"]) // nodes)), nodes
    if started is None:
        return devices, config.num_nodes
    for key, wanted, count in (("devices", devices, started[0]), ("num_nodes", config.num_nodes, started[1])):
        free = "auto" if key == "devices" else 1
        if wanted not in (free, -1, count) and isinstance(wanted, int):
            raise UserError(f"fabric.{key} is {wanted}, but {launcher} has started {count}; give --fabric.{key} {free}")
    return (devices if isinstance(devices, str) and devices != "auto" else started[0]), started[1]


def reshard(module: nn.Module) -> None:
    """Free gathered parameters after forwards without backward: FSDP2 keeps the root's whole, and would miss their changes."""
    for part in sharded_parts(module):
        part.reshard()


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def accumulating(fabric: Fabric, module: Any, more: bool) -> AbstractContextManager[None]:
    """Context of a backward pass that skips the exchange of gradients where more of them follow in the step (`more`). Around
    the last one it is a null context. Fabric's own for FSDP2 is not used: it leaves the exchange switched off when it ends
    (lightning-fabric 2.6, `_FSDPNoSync.__exit__`)."""
    if not more:
        return nullcontext()
    return unsynchronized(module) if sharded_parts(module) else fabric.no_backward_sync(module)


def clip(fabric: Fabric, module: Any, stepper: Any, limit: float) -> Tensor:
    """Scales gradients down to a norm of `limit`; returns the norm of before."""
    trained = [p for p in module.parameters() if p.grad is not None]
    if len({p.device_mesh if isinstance(p, DTensor) else None for p in trained}) > 1:
        return clip_over_meshes(trained, limit)
    norm = fabric.clip_gradients(module, stepper, max_norm=limit, error_if_nonfinite=False)
    assert norm is not None
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def count_processes(config: FabricConfig, environ: Mapping[str, str]) -> int:
    """Number of processes that a run on this machine, or one that torchrun or srun has started, is going to have."""
    devices, nodes = placement(config, environ)
    if isinstance(devices, str) and "," in devices:
        devices = len([device for device in devices.split(",") if device.strip()])
    if isinstance(devices, str) or devices < 0:
        on_gpu = config.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
        devices = torch.cuda.device_count() if on_gpu else 1
    return max(1, devices) * nodes


def restarted(environ: Mapping[str, str]) -> bool:
    """True where torchrun has started the processes again, or Slurm has requeued their job."""
    return any(int(environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def launch_names(environ: Mapping[str, str]) -> set[str]:
    """Names of a launch, which stay where it starts its processes again; empty where nothing would. Of torchrun on one node
    they have its own process id, on several `--rdzv-id`."""
    names = {f"slurm {environ['SLURM_JOB_ID']}"} if "SLURM_JOB_ID" in environ else set()
    if "TORCHELASTIC_RUN_ID" in environ:
        here = f" {socket.gethostname()} {os.getppid()}" if environ.get("GROUP_WORLD_SIZE", "1") == "1" else ""
        names.add(f"torchrun {environ['TORCHELASTIC_RUN_ID']}{here}")
    return names


def with_whole_state(
    module: nn.Module,
    replace: Mapping[str, Tensor] | None,
    group: ProcessGroup,
    work: Callable[[Mapping[str, Tensor]], T],
    prefix: str = "",
    device: torch.device | str = "cpu",
) -> T | None:
    """Runs `work` in the first process, as `run_on_first` does, with the whole state; all processes call it.

    A tensor is gathered when it is read, and dropped when it has been (`omni.convert.lazy.LazyTensors`): the first process says
    which one it reads, and the others follow it until its work has ended or failed.

    Args:
        replace: values to be given instead of the module's, such as the running average.
        prefix: start of the names of the tensors that are given, without it.
        device: what is whole and there already shares memory with what is given; sharded values come to the CPU.
    """
    own = {name[len(prefix) :]: value for name, value in module.state_dict().items() if name.startswith(prefix)}
    values = {name: (value.dtype, (replace or {}).get(prefix + name, value)) for name, value in own.items()}

    @torch.no_grad()
    def gather(name: str) -> Tensor:
        dtype, value = values[name]
        if not isinstance(value, DTensor):
            return value.detach().to(device, dtype)
        if group.first:
            group.broadcast(name)
        return value.full_tensor().detach().to("cpu", dtype)

    def lead() -> T:
        lazies = {name: Lazy.once(tuple(value.shape), dtype, partial(gather, name)) for name, (dtype, value) in values.items()}
        try:
            return work(LazyTensors(lazies))
        finally:
            group.broadcast(None)

    name: str | None = ""
    while not group.first and name is not None:
        name = group.broadcast(None)
        if name is not None:
            gather(name)
    return group.run_on_first(lead)


def compile_blocks(module: nn.Module) -> None:
    """Compile the decoder's blocks in place: names stay, and blocks of one kind share their code. The encoder's are not
    compiled: the lengths of a batch's clips are new every time and would cause recompilation."""
    silence("torch.utils.cpp_extension")
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and name.endswith(("decoder.blocks", "decoder.post_blocks")):
            for block in part:
                block.compile()


def product_type(precision: str, adapters: bool) -> torch.dtype | None:
    """Dtype of products under autocast; None without autocast, where weights are multiplied in their own dtype.

    Args:
        adapters: LoRA adapters are trained beside a frozen base.
    """
    if adapters and precision == "bf16-true":
        return torch.bfloat16
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)


def quantized_type(precision: str) -> torch.dtype:
    """Dtype in which weights of 4 bits are multiplied."""
    return torch.bfloat16 if precision.startswith("bf16") else torch.float32


class AdapterPrecision(HalfPrecision):
    """`bf16-true` that also suits runs with adapters: the base is stored in bf16, the trainable parameters in fp32. bf16 has 8
    bits of precision: an update of 2.5e-5 is lost in every value from 2^-7 on. PEFT keeps adapters in fp32 likewise
    (`autocast_adapter_dtype`). Trainable parameters are cast for each product, by autocast."""

    device = "cpu"
    """Device type of autocast."""
    _adapters = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        self._adapters = bool(adapted(module))
        if not self._adapters:
            return super().convert_module(module)
        for part in module.modules():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if tensor.is_floating_point():
                    # A LayerNorm in bf16 refuses fp32 inputs on the CPU; a Decoder's own tensor are its rotary frequencies.
                    full = tensor.requires_grad or isinstance(part, nn.LayerNorm | Decoder)
                    tensor.data = tensor.data.to(torch.float32 if full else torch.bfloat16)
        return module

    def forward_context(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16) if self._adapters else super().forward_context()


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """A context in which PyTorch takes deterministic kernels only, where `on`; what was set before is restored. An operation
    without such a kernel is an error: flash and memory-efficient attention take their deterministic backward pass only if it is
    (`warn_only` off; aten/src/ATen/native/transformers/cuda/attention_backward.cu). To be entered before CUDA starts, since
    cuBLAS reads its workspace's size once."""
    if not on:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    kept = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory, os.environ.get(WORKSPACE)
    os.environ[WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = False  # nothing reads it, and filling costs a pass over every buffer
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory, workspace = kept
        os.environ.pop(WORKSPACE, None)
        if workspace is not None:
            os.environ[WORKSPACE] = workspace
