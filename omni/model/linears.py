"""Finds a model's linears by name; checksums of their weights that are the same in every precision."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear by name, quantised ones included."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


TEXT_HEAD, TEXT_TABLE = "decoder.text_head", "decoder.text_embedding"


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps second names of parameters to the first: in a tied model the text head is the text embedding."""
    parameters = dict(model.named_parameters())
    head, table = f"{TEXT_HEAD}.weight", f"{TEXT_TABLE}.weight"
    return {head: table} if table in parameters and not any(name.startswith(f"{TEXT_HEAD}.") for name in parameters) else {}


def checksum_of(name: str, weight: Tensor, text_rows: int | None = None) -> int:
    """CRC-32 of a linear's weight in bfloat16: the same for a model in fp32 and in bfloat16.

    Args:
        text_rows: number of rows of the text head that are counted: those of a language model of the same tokenizer, where
            known (`text_rows_of`). The checksum is then the same before and after it is grown into a speech model.
    """
    if text_rows is not None and name == TEXT_HEAD:
        weight = weight[:text_rows]
    return crc_of(weight.to(torch.bfloat16), name_crc(name))


def name_crc(name: str) -> int:
    """CRC-32 of a linear's name, from which `checksum_of` its weight continues."""
    return zlib.crc32(name.encode())


def checksum(names: Iterable[str], read: Callable[[str], Tensor | int], text_rows: int | None = None) -> int:
    """One checksum for the weights of several linears.

    Args:
        names: of the linears; their order does not matter.
        read: the weight of a linear, or its `checksum_of` where that is known.
        text_rows: see `checksum_of`.
    """
    value = 0
    for name in sorted(names):
        one = read(name)
        one = one if isinstance(one, int) else checksum_of(name, one, text_rows)
        value = zlib.crc32(f"{name} {one};".encode(), value)
    return value


def text_rows_of(model: nn.Module) -> int | None:
    """Rows of a speech model's text head without those of our special ids; None for a model without a layout."""
    layout = getattr(getattr(model, "config", None), "layout", None)
    return None if layout is None else int(layout.text.size)


def crc_of(tensor: Tensor, value: int = 0) -> int:
    """CRC-32 of a tensor's bytes, continued from `value`."""
    data = tensor.detach().cpu().contiguous()
    return zlib.crc32(data.flatten().view(torch.uint8).numpy().data, value)
