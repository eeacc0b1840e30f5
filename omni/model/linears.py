"""A model's linears by name, and a checksum of their weights that is the same at every precision."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear by name; quantised ones are linears too."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


def checksum(names: Iterable[str], read: Callable[[str], Tensor]) -> int:
    """CRC-32 over the weights of linears, in bfloat16: the same for a model in fp32 and in bfloat16.

    Args:
        names: of the linears; their order does not matter.
        read: the weight of a linear.
    """
    value = 0
    for name in sorted(names):
        value = crc_of(read(name).to(torch.bfloat16), zlib.crc32(name.encode(), value))
    return value


def crc_of(tensor: Tensor, value: int = 0) -> int:
    """CRC-32 of a tensor's bytes, going on from `value`."""
    data = tensor.detach().cpu().contiguous()
    return zlib.crc32(data.flatten().view(torch.uint8).numpy().data, value)
