"""Processes: Fabric as the configuration wants it, sharding, and what processes tell each other beside the gradients."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.errors import UserError
from omni.model.quantize import is_quantized
from train.config.sections import FabricConfig
from train.distributed.precision import AdapterPrecision

T = TypeVar("T")

PATIENCE = timedelta(hours=4)
"""How long processes wait for each other, validation by one of them included; a process that dies is noticed at once."""

GRACE = 0.2
"""Seconds a process that leaves gives the threads of its group."""


def build_fabric(config: FabricConfig) -> Fabric:
    """Fabric for the configuration; not launched yet.

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
    # `fabric run` speaks through LT_* variables; Fabric's own defaults are what does not contradict them.
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
            f"{config.precision} cannot be had here: {reason}"
        ) from error
    if half is not None:
        half.device = fabric.device.type
    return fabric


def launch(fabric: Fabric) -> None:
    """Start the run's other processes, unless somebody has: under `fabric run` they are there already."""
    if not _by_fabric_run():
        fabric.launch()


def leave() -> None:
    """End the process group, if there is one, and let its threads finish their last work.

    A thread of gloo that still wants the interpreter's lock when the interpreter ends, to free a tensor, aborts
    the process after all its work is done (PyTorch issue 190489). Ending the group waits for its threads only
    where nothing else holds the group, and wrappers as DDP do, in cycles.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        time.sleep(GRACE)


def _by_fabric_run() -> bool:
    return bool(int(os.environ.get("LT_CLI_USED", "0")))


def placement(config: FabricConfig, environ: Mapping[str, str]) -> tuple[int | str, int]:
    """Devices per node and nodes: as configured, or as torchrun or srun has started the processes.

    Raises:
        UserError: the configuration asks for another number than were started.
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
    """FSDP2: every block of a module list by itself, and the rest as the root. Quantised weights are packed in shapes of their
    library's and cannot be sliced: every process holds all of them.

    The trainable parameters of a group are of one type, as FSDP2 wants it; frozen ones may be of another.

    Fabric hands over a mesh of nodes x devices meant for tensor parallelism within a node; here parameters are sharded over
    all processes alike.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    flat = init_device_mesh(mesh.device_type, (dist.get_world_size(),))
    coded = [part for part in module.modules() if is_quantized(part)]
    for part in coded:  # what is not sharded is not moved either
        part.to(torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else mesh.device_type)
    whole: Any = {part.weight for part in coded}
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for block in part:
                fully_shard(block, mesh=flat, ignored_params=whole)
    fully_shard(module, mesh=flat, ignored_params=whole)
    return module


def reshard(module: nn.Module) -> None:
    """To be called after forwards without backward: FSDP2 keeps the root's parameters whole, and would not see them change."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def accumulating(fabric: Fabric, module: Any, more: bool) -> AbstractContextManager[None]:
    """Around a backward that others follow in the step (`more`): gradients need no exchange between processes yet.

    Around the last one it is nothing at all. Fabric's `no_backward_sync(enabled=False)` would leave the exchange of FSDP2
    switched off when it ends (lightning-fabric 2.6, `_FSDPNoSync.__exit__`), and later backwards without gradients.
    """
    return fabric.no_backward_sync(module) if more else nullcontext()


class ProcessGroup:
    """The control plane of a run: small exchanges between processes, on the CPU, without waiting for a device."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self.group: Any = None
        if self.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        """This process speaks for all: it writes files and shows progress."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes of a tensor, in float64 on the CPU."""
        values = values.detach().to("cpu", torch.float64)
        if self.world > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """The first process's value, on all of them (plain data)."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every process's value, in order, on all of them (plain data)."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value, group=self.group)
        return box

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.group)

    def agree(self, error: UserError | None) -> None:
        """Raise everywhere where any process failed: its own error, or the first other's."""
        messages = self.gather(None if error is None else str(error))
        for rank, message in enumerate(messages):
            if message is not None:
                raise error or UserError(f"{message} (process {rank})")

    def first_alone(self, work: Callable[[], T]) -> T | None:
        """The result of `work` in the first process (None in the others); its error, or the system's, is raised in all."""
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
        self.agree(failure)
        return result


@torch.no_grad()
def full_state(
    module: nn.Module, replace: Mapping[str, Tensor] | None, group: ProcessGroup, prefix: str = ""
) -> dict[str, Tensor]:
    """The whole state dict on the CPU, on the first process (empty on the others); all processes must call it.

    Args:
        replace: values that stand in for the module's own, such as the running average; converted to its types.
        prefix: names that start so are kept, without it.
    """
    whole: dict[str, Tensor] = {}
    for name, own in module.state_dict().items():
        if not name.startswith(prefix):
            continue
        value = own if replace is None else replace.get(name, own)
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if group.first:
            whole[name[len(prefix) :]] = value.detach().to("cpu", own.dtype, copy=True)
    return whole


def compile_blocks(module: nn.Module) -> None:
    """Compile the decoder's blocks in place: names stay, and blocks of one kind share their code.

    The encoder's are left alone: what they are told of a batch's clips is new every time, and so would their code be.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and name.endswith(("decoder.blocks", "decoder.post_blocks")):
            for block in part:
                block.compile()
