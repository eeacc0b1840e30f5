"""Finds the linears that edits apply to, by name: plain or quantised, whole or sharded.

A linear is any module whose forward is x @ weight.T (+ bias): `nn.Linear`, GPT-2's `Conv1D` of transformers (its weight is
transposed), bitsandbytes' linears, and any module with `dequantize()`.

Dimensions: I inputs, O outputs.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from omni.errors import UserError
from omni.model.linears import checksum_of, crc_of
from omni.model.quantize import dense_weight, is_quantized

MLP = re.compile(r"(?P<stack>.*(?:blocks|layers|h))\.(?P<number>\d+)\.mlp\.(?:up|down|up_proj|down_proj|c_fc|c_proj)")
"""Names of a block's MLP linears in our decoder, in transformers' models of Llama's kind, and in GPT-2."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module can be edited."""
    weight = getattr(module, "weight", None)
    plain = isinstance(module, nn.Linear) or is_transposed(module)
    return is_quantized(module) or (plain and isinstance(weight, Tensor) and weight.ndim == 2)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [I, O] (`transformers.pytorch_utils.Conv1D`)."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def find_linears(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules by name. UserError: a name is no linear of the model (with the closest names), or two names are one module."""
    known = {name: part for name, part in model.named_modules(remove_duplicate=False) if is_linear(part)}
    found: dict[str, nn.Module] = {}
    for name in names:
        if name not in known:
            close = ", ".join(get_close_matches(name, known, n=3, cutoff=0.3)) or "none"
            raise UserError(f"{name} is no linear of this model; the closest names are {close}")
        for other, part in found.items():
            if part is known[name]:
                raise UserError(f"edit of {name}: it is the same linear as {other}; name it once")
        found[name] = known[name]
    return found


def mlp_linears(model: nn.Module, blocks: int = 3) -> list[str]:
    """Names of the MLPs' `up` and `down` in the last blocks of the decoder, which MEND edits by default.

    Source: `inner_params` in eric-mitchell/mend @ e04fdb9, `config/model/*.yaml`. UserError: the model has no blocks with an
    MLP of known names, or fewer than asked for."""
    stacks: dict[str, dict[int, list[str]]] = {}
    for name, part in model.named_modules():
        at = MLP.fullmatch(name)
        if at and is_linear(part):
            stacks.setdefault(at["stack"], {}).setdefault(int(at["number"]), []).append(name)
    own = [stack for stack in stacks if stack.split(".")[-2:] == ["decoder", "blocks"]]
    if not stacks:
        raise UserError("the model has no blocks with mlp.up and mlp.down; name the linears to edit")
    chosen = stacks[own[0] if own else next(iter(stacks))]
    if not 1 <= blocks <= len(chosen):
        raise UserError(f"edits of {blocks} blocks: the model has {len(chosen)}; choose from 1 to {len(chosen)}")
    return [name for number in sorted(chosen)[-blocks:] for name in chosen[number]]


def shape_of(module: Any) -> tuple[int, int]:
    """(I, O) of a linear."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    rows, columns = weight_of(module).shape
    return columns, rows


def weight_of(module: nn.Module) -> Tensor:
    """The weight [O, I], detached: dequantised where it is held in fewer bits, a view of it where it is plain."""
    weight = dense_weight(module)
    if weight.is_meta:  # offloaded (accelerate's hook holds the weights of modules that are not running)
        kept = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if kept is None:
            raise UserError("a linear's weights are on no device; load or make the edits before the model is offloaded")
        weight = kept["weight"].detach()
    return weight.T if is_transposed(module) else weight


@torch.no_grad()
def signature(name: str, module: nn.Module) -> int:
    """`omni.model.linears.checksum_of` a linear's weight: the same in fp32 and in bfloat16. In a sharded model all processes
    must call it."""
    return checksum_of(name, whole(weight_of(module)))


@torch.no_grad()
def checksum(module: nn.Module) -> int:
    """CRC-32 of every bit of a linear's own weight and bias, in their shapes and types; in a sharded model all processes must
    call it."""
    value = 0
    own: list[tuple[str, Any]] = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in sorted(own):
        data = whole(tensor.detach())
        value = crc_of(data, zlib.crc32(f"{name} {tuple(data.shape)} {data.dtype}".encode(), value))
    return value


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor; returns any other unchanged."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # half a second to import
    return tensor.full_tensor() if kind is not None and isinstance(tensor, kind) else tensor
