"""Merges edits into the weights and reverts them bit for bit, because the originals are kept.

A quantised linear is replaced by a plain one with its dequantised weight plus the edit; reverting restores the old module.
Every change is computed in fp64 and rounded once to the weight's own type.

Dimensions: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omni.edit.deltas import Edits
from omni.edit.linears import checksum, find_linears, is_transposed, shape_of, weight_of
from omni.edit.storage import Place, read_tensors, write_tensors
from omni.errors import UserError
from omni.model.quantize import is_quantized


@dataclass(frozen=True)
class Merged:
    """The originals that a merge replaced.

    Attributes:
        originals: the weight of each linear before the merge ([O, I], or transposed as stored), or the quantised module itself.
        after: checksum of each linear with its edit.
    """

    originals: Mapping[str, Tensor | nn.Module]
    after: Mapping[str, int]


@torch.no_grad()
def merge(model: nn.Module, edits: Edits) -> Merged:
    """Add edits to the weights of the linears they were made for, in place. In a sharded model all processes must call it.

    Raises:
        UserError: the model holds other weights than the edits were made for (merged already, or another model), or a
            quantised linear has adapters, which the plain one could not take over.
    """
    edits.check_finite()
    edits.check_base(model)
    found = find_linears(model, edits.deltas)
    for name, part in found.items():
        if is_quantized(part) and next(part.children(), None) is not None:
            raise UserError(f"{name} is quantised and has adapters; remove them, merge the edits, and add them again")
    originals: dict[str, Tensor | nn.Module] = {}
    for name, part in found.items():
        change = edits.deltas[name].weight()
        if is_quantized(part):
            originals[name] = part
            _replace(model, name, _plain(part, change))
        else:
            weight: Any = part.weight
            originals[name] = weight.detach().clone()
            weight.copy_(_added(weight.detach(), change.T if is_transposed(part) else change))
    return Merged(originals, {name: checksum(part) for name, part in find_linears(model, edits.deltas).items()})


@torch.no_grad()
def revert(model: nn.Module, merged: Merged) -> None:
    """Restore the weights from before `merge`, bit for bit.

    Raises:
        UserError: the model's weights are not those after the merge; nothing is changed then.
    """
    found = find_linears(model, merged.originals)
    for name, part in found.items():
        if checksum(part) != merged.after[name]:
            raise UserError(
                f"{name}: the model does not hold the weights that the merge left there; the edits were never merged into it, "
                "or were taken out, or it has been trained since"
            )
    for name, original in merged.originals.items():
        if isinstance(original, nn.Module):
            _replace(model, name, original)
        else:
            weight: Any = found[name].weight
            weight.copy_(_placed(original, weight))


def save_merged(folder: Place, merged: Merged) -> None:
    """Write the data that `revert` needs.

    Raises:
        UserError: a linear was quantised: its own checkpoint is the original; or the place cannot be written.
    """
    for name, original in merged.originals.items():
        if isinstance(original, nn.Module):
            raise UserError(f"{name} was quantised; what reverts its edit is the checkpoint it came from")
    tensors = {name: original for name, original in merged.originals.items() if isinstance(original, Tensor)}
    write_tensors(folder, "originals", tensors, {"after": dict(merged.after)})


def load_merged(folder: Place) -> Merged:
    """Read a folder written by `save_merged`; UserError where it is broken."""
    tensors, facts = read_tensors(folder, "originals")
    after = facts.get("after")
    if not isinstance(after, dict) or after.keys() != tensors.keys():
        raise UserError(f"{folder}/originals.json does not fit its tensors; merge again from the unedited model")
    return Merged(dict(tensors), {name: int(crc) for name, crc in after.items()})


def _added(weight: Tensor, change: Tensor) -> Tensor:
    return (weight.double() + _placed(change, weight)).to(weight.dtype)


def _placed(tensor: Tensor, weight: Tensor) -> Tensor:
    """Moves a tensor to the device of the weight, sharded in the same way."""
    tensor = tensor.to(weight.device)
    if isinstance(weight, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor, weight.device_mesh, weight.placements)
    return tensor


def _plain(part: nn.Module, change: Tensor) -> nn.Linear:
    """Makes a plain linear of the dequantised weight plus the change; frozen like the quantised one."""
    dense = weight_of(part)
    bias = getattr(part, "bias", None)
    inputs, outputs = shape_of(part)
    new = nn.Linear(inputs, outputs, bias is not None, device="meta")
    new.weight = nn.Parameter(_added(dense, change), requires_grad=False)
    if isinstance(bias, Tensor):
        new.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return new.train(part.training)


def _replace(model: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, part)
