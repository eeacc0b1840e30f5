"""Estimates what each process of a run sends in a step, by the ring algorithms.

N processes that gather B bytes, or add them up and keep a part each, send (N - 1) / N x B each; adding up for all takes both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from omni.model.quantize import is_quantized
from omni.model.speech_model import SpeechModel
from train.config.run import FitConfig
from train.distributed.sharding import ParallelDims


@dataclass(frozen=True)
class Traffic:
    """Bytes that each process sends in a step, and the formula with its numbers; tensor-parallel exchanges are not counted."""

    sent: float
    formula: str


def traffic(config: FitConfig, model: SpeechModel, dims: ParallelDims, size: int, learning: int) -> Traffic:
    """What a plain step sends.

    DDP adds up all gradients for all once. FSDP2 gathers the parameters of blocks in each forward and backward pass of a
    micro-batch, but those that the micro-batch before has left there, and all others once; it adds up gradients once, in fp32
    under bf16, and between replicas once more.

    Args:
        model: with what is trained marked.
        size, learning: bytes of a frozen value, and of a trainable one.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.fabric.strategy != "fsdp":
        n = dims.replicas
        bytes_ = 2 * (n - 1) / n * trained * learning
        return Traffic(bytes_, f"2 x {n - 1}/{n} x {trained / 1e6:,.0f} M gradients x {learning} bytes")
    held = {id(part.weight) for part in model.modules() if is_quantized(part)}
    blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    inside = sum(p.numel() for block in blocks for p in block.parameters() if id(p) not in held)
    root = sum(p.numel() for p in model.parameters() if id(p) not in held) - inside
    width = 2 if config.fabric.precision == "bf16-mixed" else size
    summed = 4 if config.fabric.precision.startswith("bf16") else learning
    passes, n, r = 1 + config.data.micro_batches // dims.data, dims.shards, dims.replicas
    gathered = (n - 1) / n * (root + passes * inside) * width / dims.tensor
    shared = (n - 1) / n * trained * summed / dims.tensor
    between = 2 * (r - 1) / r * trained * summed / (n * dims.tensor)
    formula = (
        f"{n - 1}/{n} x (({root / 1e6:,.0f} M + {passes} x {inside / 1e6:,.0f} M parameters) x {width} bytes + "
        f"{trained / 1e6:,.0f} M gradients x {summed} bytes)"
    )
    formula += f" / {dims.tensor}" * (dims.tensor > 1)
    formula += f" + 2 x {r - 1}/{r} x {trained / n / 1e6:,.1f} M x {summed} bytes between replicas" * (r > 1)
    return Traffic(gathered + shared + between, formula)
