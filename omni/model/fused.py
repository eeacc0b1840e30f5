"""Linears of one input as one product, of a model that serves on a GPU: a launch instead of two or three.

Their weights become views of one tensor, so that names and checkpoints stay as they are, and what changes a weight in place
changes the product. Where a weight is replaced, or something acts beside a linear (an adapter, an edit, a hook), each is
multiplied alone again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.utils.private import has_forward_hooks


class FusedWeight(NamedTuple):
    """Weights [sum of N, K] of linears, one after another, with their biases, and where each was."""

    weight: Tensor
    bias: Tensor | None
    places: tuple[tuple[int, int], ...]


def fuse(model: nn.Module) -> int:
    """Fuse the linears that modules name in `TOGETHER`; returns how many groups. Others, and sharded ones, stay as they are."""
    count = 0
    for part in model.modules():
        linears = [getattr(part, name) for name in getattr(type(part), "TOGETHER", ())]
        if linears and all(map(_plain, linears)) and len({linear.bias is None for linear in linears}) == 1:
            with torch.inference_mode(False), torch.no_grad():
                weight = fuse_weights([linear.weight for linear in linears])
                bias = None if linears[0].bias is None else fuse_weights([linear.bias for linear in linears])
            linears[0].__dict__["fused"] = FusedWeight(weight, bias, tuple(map(_place, linears)))
            count += 1
    return count


def _plain(linear: nn.Module) -> bool:
    return type(linear) is nn.Linear and all(type(p.data) is Tensor for p in linear.parameters())


def _place(linear: nn.Linear) -> tuple[int, int]:
    """Addresses of its weight and bias, 0 for none."""
    return linear.weight.data_ptr(), 0 if linear.bias is None else linear.bias.data_ptr()


def fuse_weights(weights: Sequence[Tensor]) -> Tensor:
    """Weights one after another, of which they become views."""
    if len(weights) == 1 and weights[0].is_contiguous():
        return weights[0].detach()
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, view in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = view
    return whole


def fused_product(x: Tensor, *linears: nn.Linear) -> Tensor | None:
    """Outputs of linears of one input x [..., K], side by side; None where they are not fused."""
    fused: FusedWeight | None = linears[0].__dict__.get("fused")
    if fused is None or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return None
    for linear, place in zip(linears, fused.places, strict=True):
        if _place(linear) != place or has_forward_hooks(linear):
            return None
    return F.linear(x, fused.weight, fused.bias)
