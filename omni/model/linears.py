"""A model's linears by name, and a checksum of their weights that is the same at every precision."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from omni.old_names import first_name


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear by name; quantised ones are linears too."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


TEXT_HEAD, TEXT_TABLE = "decoder.text_head", "decoder.text_embedding"


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of parameters, with the first ones: in a tied model the text embedding is the text head too."""
    parameters = dict(model.named_parameters())
    head, table = f"{TEXT_HEAD}.weight", f"{TEXT_TABLE}.weight"
    return {head: table} if table in parameters and not any(name.startswith(f"{TEXT_HEAD}.") for name in parameters) else {}


def checksum_of(name: str, weight: Tensor, text_rows: int | None = None) -> int:
    """CRC-32 of the weight of a linear, in bfloat16: the same for a model in fp32 and in bfloat16.

    Args:
        text_rows: of the text head only as many rows, where it is known how many a language model of the same tokenizer has
            (`text_rows_of`): the checksum is then the same before and after it is grown into a speech model.
    """
    if text_rows is not None and name == TEXT_HEAD:
        weight = weight[:text_rows]
    return crc_of(weight.to(torch.bfloat16), zlib.crc32(first_name(name).encode()))


def checksum(names: Iterable[str], read: Callable[[str], Tensor | int], text_rows: int | None = None) -> int:
    """One number for the weights of linears.

    Args:
        names: of the linears; their order does not matter.
        read: the weight of a linear, or its `checksum_of` where that is known.
        text_rows: see `checksum_of`.
    """
    value = 0
    for name in sorted(names, key=first_name):
        one = read(name)
        value = zlib.crc32(
            f"{first_name(name)} {one if isinstance(one, int) else checksum_of(name, one, text_rows)};".encode(), value
        )
    return value


def text_rows_of(model: nn.Module) -> int | None:
    """Rows of a speech model's text head without those of our own special ids; None where it does not say."""
    layout = getattr(getattr(model, "config", None), "layout", None)
    return None if layout is None else int(layout.text.size)


def crc_of(tensor: Tensor, value: int = 0) -> int:
    """CRC-32 of a tensor's bytes, going on from `value`."""
    data = tensor.detach().cpu().contiguous()
    return zlib.crc32(data.flatten().view(torch.uint8).numpy().data, value)
