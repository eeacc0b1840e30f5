"""Distributed training: builds Fabric from the configuration, shards modules, and exchanges small values between processes."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.convert.lazy import Lazy, LazyTensors
from omni.errors import UserError
from omni.model.quantize import is_quantized
from train.config.sections import FabricConfig
from train.distributed.precision import AdapterPrecision

T = TypeVar("T")

PATIENCE = timedelta(hours=4)
"""Timeout of processes that wait for each other, validation by one of them included; a process that dies is noticed at once."""

GRACE = 0.2
"""Seconds that `leave` waits for the threads of the process group."""


def build_fabric(config: FabricConfig) -> Fabric:
    """Build Fabric from the configuration, not launched yet.

    Raises:
        UserError: Fabric refuses the combination, or flags of `fabric run` contradict the configuration.
    """
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    config = config.decided()
    devices, num_nodes = placement(config, os.environ)
    if os.environ.get("LT_STRATEGY", "").startswith("fsdp"):
        raise UserError("`fabric run --strategy fsdp` is another, older one: leave it out there, and set fabric.strategy fsdp")
    strategy: Any = config.strategy
    if strategy == "fsdp":
        strategy = ModelParallelStrategy(shard, timeout=PATIENCE)
    if os.environ.get("LT_PRECISION") == "bf16-true":
        raise UserError("`fabric run --precision bf16-true` rounds adapters: leave it out there, and set fabric.precision")
    # `fabric run` sets LT_* variables, which only Fabric's own defaults do not contradict.
    precision: Any = None if config.precision in ("32-true", "bf16-true") else config.precision
    half = AdapterPrecision() if config.precision == "bf16-true" else None
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
        if _by_fabric_run():
            reason += " (give each setting once: to `fabric run` or in the configuration)"
        raise UserError(
            f"fabric: accelerator {config.accelerator}, devices {devices}, strategy {config.strategy}, precision "
            f"{config.precision} is not available here: {reason}"
        ) from error
    if half is not None:
        half.device = fabric.device.type
    return fabric


def launch(fabric: Fabric) -> None:
    """Start the run's other processes; under `fabric run` they are there already."""
    if not _by_fabric_run():
        fabric.launch()


def leave() -> None:
    """Destroy the process group, if there is one, and let its threads finish.

    A gloo thread that needs the interpreter's lock while the interpreter shuts down, to free a tensor, aborts the process after
    all its work is done (PyTorch issue 190489). Destroying the group waits for its threads only where nothing else references
    the group; wrappers such as DDP do, in reference cycles, hence the garbage collection.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        time.sleep(GRACE)


def _by_fabric_run() -> bool:
    return bool(int(os.environ.get("LT_CLI_USED", "0")))


def placement(config: FabricConfig, environ: Mapping[str, str]) -> tuple[int | str, int]:
    """Number of devices per node, and of nodes: as configured, or as torchrun or srun has started the processes.

    Raises:
        UserError: the configuration asks for another number than was started.
    """
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
    for key, wanted, found in (("devices", devices, started[0]), ("num_nodes", config.num_nodes, started[1])):
        free = "auto" if key == "devices" else 1
        if wanted not in (free, -1, found) and isinstance(wanted, int):
            raise UserError(f"fabric.{key} is {wanted}, but {launcher} has started {found}; leave fabric.{key} out")
    return (devices if isinstance(devices, str) and devices != "auto" else started[0]), started[1]


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    """Shard a module by FSDP2: every block of a module list by itself, and the rest as the root.

    Quantised weights are packed in shapes of their library's own and cannot be sliced: every process holds all of them. The
    trainable parameters of an FSDP group have one dtype, as FSDP2 requires; frozen ones may have another.

    Fabric passes a mesh of nodes x devices meant for tensor parallelism within a node; here parameters are sharded over all
    processes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    flat = init_device_mesh(mesh.device_type, (dist.get_world_size(),))
    coded = [part for part in module.modules() if is_quantized(part)]
    for part in coded:  # FSDP2 does not move modules that it does not shard
        part.to(torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else mesh.device_type)
    whole: Any = {part.weight for part in coded}
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for block in part:
                fully_shard(block, mesh=flat, ignored_params=whole)
    fully_shard(module, mesh=flat, ignored_params=whole)
    return module


def reshard(module: nn.Module) -> None:
    """Free gathered parameters after forwards without backward: FSDP2 keeps the root's whole, and would miss their changes."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def accumulating(fabric: Fabric, module: Any, more: bool) -> AbstractContextManager[None]:
    """Context of a backward pass that skips the exchange of gradients where more of them follow in the step (`more`).

    Around the last one it is a null context. Fabric's `no_backward_sync(enabled=False)` would leave the exchange of FSDP2
    switched off when it ends (lightning-fabric 2.6, `_FSDPNoSync.__exit__`), and later backwards without gradients.
    """
    return fabric.no_backward_sync(module) if more else nullcontext()


class ProcessGroup:
    """Exchanges small values between the processes of a run, on the CPU (gloo), without waiting for a device."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self.group: Any = None
        if self.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        """True for the process of rank 0, which writes files and shows progress."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over processes, in float64 on the CPU."""
        values = values.detach().to("cpu", torch.float64)
        if self.world > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Send the first process's value (plain data) to all of them, and return it."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Collect every process's value (plain data), in the order of ranks, on all of them."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value, group=self.group)
        return box

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.group)

    def raise_if_any_failed(self, error: UserError | None) -> None:
        """Raise a UserError in all processes where one has failed: a process's own error, or else that of the lowest rank."""
        messages = self.gather(None if error is None else str(error))
        for rank, message in enumerate(messages):
            if message is not None:
                raise error or UserError(f"{message} (process {rank})")

    def run_on_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` in the first process alone and return its result (None in the others).

        Its UserError is raised in all processes, and so is an OSError, as a UserError.
        """
        result, failure = None, None
        if self.first:
            try:
                result = work()
            except UserError as error:
                failure = error
            except OSError as error:
                what, reason = error.filename or "a file", error.strerror or error
                failure = UserError(f"{what} cannot be read or written ({reason}); fix that and run the same command again")
                failure.__cause__ = error
        self.raise_if_any_failed(failure)
        return result


@torch.no_grad()
def full_state(
    module: nn.Module,
    replace: Mapping[str, Tensor] | None,
    group: ProcessGroup,
    prefix: str = "",
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """The whole state dict, on the first process (empty on the others); all processes must call it.

    Values that are whole and on `device` already share memory with the module (or with `replace`).

    Args:
        replace: values that replace the module's own, such as the running average; converted to its dtypes.
        prefix: only names that start with it are kept, without it.
        device: of the result; sharded values come to the CPU.
    """
    whole: dict[str, Tensor] = {}
    for name, own in module.state_dict().items():
        if not name.startswith(prefix):
            continue
        value, place = own if replace is None else replace.get(name, own), device
        if isinstance(value, DTensor):
            value, place = value.full_tensor(), "cpu"
        if group.first:
            whole[name[len(prefix) :]] = value.detach().to(place, own.dtype)
    return whole


def with_whole_state(
    module: nn.Module,
    replace: Mapping[str, Tensor] | None,
    group: ProcessGroup,
    work: Callable[[Mapping[str, Tensor]], T],
    prefix: str = "",
) -> T | None:
    """Run `work` in the first process, as `run_on_first` does, with the whole state on the CPU; all processes must call it.

    A tensor is gathered when it is read, and dropped when it has been (`omni.convert.lazy.LazyTensors`): the first process says
    which one it reads, and the others follow it until its work has ended or failed. See `full_state` for the arguments.
    """
    values = {
        name[len(prefix) :]: (own.dtype, own if replace is None else replace.get(name, own))
        for name, own in module.state_dict().items()
        if name.startswith(prefix)
    }

    @torch.no_grad()
    def gather(name: str) -> Tensor:
        dtype, value = values[name]
        if isinstance(value, DTensor):
            if group.first:
                group.broadcast(name)
            value = value.full_tensor()
        return value.detach().to("cpu", dtype)

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
    """Compile the decoder's blocks in place: names stay, and blocks of one kind share their code.

    The encoder's are not compiled: the lengths of a batch's clips are new every time and would cause recompilation.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and name.endswith(("decoder.blocks", "decoder.post_blocks")):
            for block in part:
                block.compile()
