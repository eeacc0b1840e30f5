"""Lays a module out over processes: sharded parameters (FSDP2), replicas of them, and tensor parallelism of the decoder.

Processes form a mesh of replicas x shards x tensor, the last dimension running fastest:

    replicas   hold the same parameters; their gradients are averaged (hybrid sharding)
    shards     hold a slice of every parameter each, and gather it where it is used
    tensor     hold a slice of the decoder's matrices and of both heads' vocabulary each, and compute the same batch

Every process begins with parameters on the meta device; the first one's values are sent to the others, a tensor at a time, so
that no other holds the whole model.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor

from omni.errors import UserError
from omni.model.blocks import Attention, SwiGLU
from omni.model.decoder import Decoder
from omni.model.linears import is_quantized
from omni.utils.private import foreach_mul_, own_parameters
from train.config.sections import FabricConfig

REPLICAS, SHARDS, TENSOR = "replicas", "shards", "tensor"


@dataclass(frozen=True)
class ParallelDims:
    """Number of processes along each dimension of the mesh."""

    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, config: FabricConfig, world: int) -> ParallelDims:
        """The dimensions of `world` processes; UserError where replicas and tensor-parallel processes do not divide them."""
        if config.strategy != "fsdp":
            return cls(replicas=world)
        if world % (config.replicas * config.tensor_parallel):
            factors = {"fabric.replicas": config.replicas, "fabric.tensor_parallel": config.tensor_parallel}
            named = {key: value for key, value in factors.items() if value > 1}
            raise UserError(
                f"{' x '.join(named)} is {' x '.join(map(str, named.values()))}, which does not divide the {world} processes; "
                "start a multiple of it, or make it less"
            )
        return cls(config.replicas, world // (config.replicas * config.tensor_parallel), config.tensor_parallel)

    @property
    def data(self) -> int:
        """Number of processes, or groups of tensor-parallel ones, that have batches of their own."""
        return self.replicas * self.shards


def shard(module: nn.Module, config: FabricConfig, device_type: str) -> nn.Module:
    """Shard a module by FSDP2, every block of a module list by itself and the rest as the root, after its decoder's matrices
    are distributed where `tensor_parallel` asks for it.

    Quantised weights are packed in shapes of their library's own and cannot be sliced: every process holds all of them. The
    trainable parameters of an FSDP group have one dtype, as FSDP2 requires; frozen ones may have another.

    Args:
        device_type: type of the devices.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dims = ParallelDims.of(config, dist.get_world_size())
    mesh = init_device_mesh(device_type, (dims.replicas, dims.shards, dims.tensor), mesh_dim_names=(REPLICAS, SHARDS, TENSOR))
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    coded: list[Any] = [part for part in module.modules() if is_quantized(part)]
    for part in coded:  # FSDP2 does not move modules that it does not shard
        part.weight = part.weight.to(device)
    whole: Any = {part.weight for part in coded}
    values = to_meta(module)
    if dims.tensor > 1:
        for decoder in [part for part in module.modules() if isinstance(part, Decoder)]:
            distribute_decoder(decoder, mesh[TENSOR])
    over = mesh[REPLICAS, SHARDS] if dims.replicas > 1 else mesh[SHARDS]
    half = torch.bfloat16 if config.precision == "bf16-mixed" else None  # as autocast would: it halves what is sent
    summed = torch.float32 if config.precision.startswith("bf16") else None
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=summed, cast_forward_inputs=False)
    options: Any = {"mesh": over, "ignored_params": whole, "mp_policy": precision}
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for block in part:
                fully_shard(block, **options)
    fully_shard(module, **options)
    fill(module, values, device)
    for part in sharded_parts(module):  # a part that no forward pass has used yet fails where gradients stay whole (torch 2.14)
        part.unshard()
        part.reshard()
    return module


# --- values -----------------------------------------------------------------------------------------------------------


@contextmanager
def _without_quantized(module: nn.Module) -> Iterator[None]:
    """A context in which a module lacks its quantised weights, which all processes have already (`omni.model.linears`)."""
    held = [(part, own_parameters(part).get("weight")) for part in module.modules() if is_quantized(part)]
    for part, _ in held:
        own_parameters(part)["weight"] = None
    try:
        yield
    finally:
        for part, weight in held:
            own_parameters(part)["weight"] = weight


def to_meta(module: nn.Module) -> dict[str, Tensor]:
    """Move a module to the meta device, without its quantised weights; returns its parameters and buffers by name where it had
    values, else empty."""
    with _without_quantized(module):
        named = [*module.named_parameters(), *module.named_buffers()]
        values = {name: tensor.detach() for name, tensor in named if not tensor.is_meta}
        module.to("meta")
    return values


@torch.no_grad()
def fill(module: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    """Allocate a module of the meta device on `device`, sharded or not, with the first process's values; all processes call it.
    One tensor at a time is whole on the others, and the first one's are let go as they are sent."""
    with _without_quantized(module):
        module.to_empty(device=device)
        named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        value = values.pop(name, None)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if dist.get_rank() == 0:
            assert value is not None, name
            whole.copy_(value)
        dist.broadcast(whole, 0)
        if isinstance(tensor, DTensor):  # each process takes its own slice of what it has whole
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(whole)


# --- the decoder's matrices -------------------------------------------------------------------------------------------


def distribute_decoder(decoder: Any, mesh: DeviceMesh) -> None:
    """Distribute a decoder's matrices over tensor-parallel processes (Shoeybi et al. 2019): heads of attention, the width
    inside an MLP, rows of tables and heads; UserError where they do not divide evenly."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import Replicate

    check_divides(decoder.config, mesh.size())
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advice on orders of few numbers
    for block in [*decoder.blocks, *decoder.post_blocks]:
        parallelize_module(
            block,
            mesh,
            {
                **{f"attention.{name}": ColwiseParallel() for name in Attention.TOGETHER},
                "attention.out": RowwiseParallel(),
                **{f"mlp.{name}": ColwiseParallel() for name in SwiGLU.TOGETHER},
                "mlp.down": RowwiseParallel(),
            },
        )
        for norm in (block.attention.q_norm, block.attention.k_norm):
            if norm is not None:
                distribute_module(norm, mesh)
        block.attention.heads //= mesh.size()
        block.attention.kv_heads //= mesh.size()
    plan: dict[str, Any] = {
        "text_embedding": RowwiseParallel(input_layouts=Replicate()),
        "audio_embedding": RowwiseParallel(input_layouts=Replicate()),
        "audio_head": ColwiseParallel(),
    }
    if decoder.text_head is not None:
        plan["text_head"] = ColwiseParallel()
    parallelize_module(decoder, mesh, plan)


def check_divides(config: Any, tensor: int) -> None:
    """Refuse (UserError) a decoder whose matrices tensor-parallel processes cannot share evenly."""
    for name, size in (("heads", config.heads), ("kv_heads", config.kv_heads), ("mlp_width", config.mlp_width)):
        if size % tensor:
            raise UserError(
                f"fabric.tensor_parallel is {tensor}, which does not divide the decoder's {name}, {size}; "
                + ("leave it out" if size == 1 else "take a divisor of it")
            )


# --- steps ------------------------------------------------------------------------------------------------------------


@contextmanager
def unsynchronized(module: nn.Module) -> Iterator[None]:
    """A context for a backward pass of a sharded module that more of them follow in the step: gradients stay whole, and so do
    the parameters that the next forward pass needs again."""
    roots = sharded_parts(module)[:1]  # both settings apply to all below
    try:
        for root in roots:
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)
        yield
    finally:
        for root in roots:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)


def sharded_parts(module: nn.Module) -> list[Any]:
    """Modules that FSDP2 shards, the outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def clip_over_meshes(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients down to a norm of `limit` where parameters lie on different meshes; returns the norm of before."""
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p.grad)
    norms = [torch.nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grads in by_mesh.values():
        local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        foreach_mul_(local, scale)
    return norm
