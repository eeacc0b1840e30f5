"""Saves edits, and merges them into the weights.

A folder is `<stem>.json` and `<stem>.safetensors`, nothing in which can run code; it is written beside its name and renamed
when it is whole, and the JSON holds size and CRC-32 of the tensors' file.

Merged edits are reverted bit for bit, because the originals are kept. A quantised linear is replaced by a plain one with its
dequantised weight plus the edit; reverting restores the old module. Every change is computed in fp64 and rounded once to the
weight's own type.

Dimensions: I inputs, O outputs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from omni.checkpoint.tensors import write_file
from omni.edit.deltas import Delta, Edits, checksum, find_linears, is_transposed, shape_of, weight_of, whole
from omni.errors import UserError
from omni.files import read_json, replacing_folder
from omni.model.linears import is_quantized
from omni.utils.remote import refuse_remote

FORMAT_VERSION = 1

FolderPath = str | os.PathLike[str]


def write_tensors(folder: FolderPath, stem: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write or replace a folder. UserError: the disk is full, or the place cannot be written; nothing half-written is left."""
    data = save({name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()})
    with replacing_folder(Path(folder), len(data)) as staging:
        written = write_file(staging / f"{stem}.safetensors", data)
        head = {"format": FORMAT_VERSION, "kind": stem, "tensors": {"bytes": written.bytes, "crc32": written.crc32}}
        write_file(staging / f"{stem}.json", (json.dumps({**head, **facts}, indent=2) + "\n").encode())


def read_tensors(folder: FolderPath, stem: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a folder written by `write_tensors`. UserError: no such folder, another kind or version, or a file that was cut
    or altered."""
    root = Path(folder)
    if not (root / f"{stem}.json").is_file():
        refuse_remote(root, f"folder of {stem}")
        if not root.exists():
            raise UserError(f"{root} does not exist; give the folder of {stem}")
        others = ", ".join(sorted(path.name for path in root.glob("*.json"))) if root.is_dir() else ""
        raise UserError(f"{root} has no {stem}.json{f' (it has {others})' if others else ''}; give the folder of {stem}")
    facts = read_json(root / f"{stem}.json")
    if facts.get("format") != FORMAT_VERSION or facts.get("kind") != stem:
        raise UserError(f"{root}: format {facts.get('format')!r} is unknown; this version reads format {FORMAT_VERSION}")
    file = root / f"{stem}.safetensors"
    try:
        data = file.read_bytes()
        if {"bytes": len(data), "crc32": zlib.crc32(data)} != facts.get("tensors"):
            raise UserError(f"{file} does not match its size and checksum in {stem}.json; fetch or make the folder again")
        return load(data), facts
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch or make the folder again") from error


def save_edits(folder: FolderPath, edits: Edits, extra: Mapping[str, Any] | None = None) -> None:
    """Write edits with the checksums and shapes of their base. UserError: the edits are not signed or not finite, or the
    place cannot be written. `extra`: plain data to store with them."""
    if edits.base is None:
        raise UserError("the edits do not say for which weights they were made; sign them first (`Edits.signed`)")
    edits.check_finite()
    tensors: dict[str, Tensor] = {}
    linears: dict[str, Any] = {}
    for name, delta in edits.deltas.items():
        tensors[f"{name}.b"] = delta.b
        if delta.a is not None:
            tensors[f"{name}.a"] = delta.a
        rank = None if delta.a is None else len(delta.a)
        linears[name] = {
            "in": delta.shape[0], "out": delta.shape[1], "rank": rank, "lr": float(delta.lr), "crc32": edits.base[name],
        }  # fmt: skip
    write_tensors(folder, "edits", tensors, {"linears": linears, "extra": dict(extra or {})})


def load_edits(folder: FolderPath, model: nn.Module | None = None) -> Edits:
    """Read edits. UserError: the folder is broken, or holds edits of another model. `model`: refuse edits that were made for
    other weights than its own."""
    tensors, facts = read_tensors(folder, "edits")
    deltas, base = {}, {}
    try:
        for name, entry in facts["linears"].items():
            a = None if entry["rank"] is None else tensors[f"{name}.a"]
            deltas[name] = Delta(tensors[f"{name}.b"], a, float(entry["lr"]))
            base[name] = int(entry["crc32"])
            if deltas[name].shape != (entry["in"], entry["out"]):
                raise ValueError(f"{name} has another shape than it says")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}/edits.json does not fit its tensors ({error}); fetch or make the folder again") from error
    edits = Edits(deltas, base)
    edits.check_finite()
    if model is not None:
        edits.check_base(model)
    return edits


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
    UserError: the model holds other weights than the edits were made for (merged already, or another model), or a quantised
    linear has adapters, which the plain one could not take over."""
    edits.check_finite()
    edits.check_base(model)
    linears = find_linears(model, edits.deltas)
    for name, part in linears.items():
        if is_quantized(part) and next(part.children(), None) is not None:
            raise UserError(f"{name} is quantised and has adapters; remove them, merge the edits, and add them again")
    originals: dict[str, Tensor | nn.Module] = {}
    for name, part in linears.items():
        change = edits.deltas[name].weight()
        if is_quantized(part):
            originals[name] = part
            model.set_submodule(name, _plain(part, change))
        else:
            weight: Any = part.weight
            originals[name] = weight.detach().clone()
            change = change.T if is_transposed(part) else change
            weight.copy_((weight.detach().double() + _placed(change, weight)).to(weight.dtype))
    return Merged(originals, {name: checksum(part) for name, part in find_linears(model, edits.deltas).items()})


@torch.no_grad()
def revert(model: nn.Module, merged: Merged) -> None:
    """Restore the weights from before `merge`, bit for bit. UserError: the model's weights are not those after the merge;
    nothing is changed then."""
    linears = find_linears(model, merged.originals)
    for name, part in linears.items():
        if checksum(part) != merged.after[name]:
            raise UserError(
                f"{name}: the model does not hold the weights that the merge left there; the edits were never merged into it, "
                "or were taken out, or it has been trained since"
            )
    for name, original in merged.originals.items():
        if isinstance(original, nn.Module):
            model.set_submodule(name, original)
        else:
            weight: Any = linears[name].weight
            weight.copy_(_placed(original, weight))


def save_merged(folder: FolderPath, merged: Merged) -> None:
    """Write the data that `revert` needs. UserError: a linear was quantised: its own checkpoint is the original; or the
    place cannot be written."""
    for name, original in merged.originals.items():
        if isinstance(original, nn.Module):
            raise UserError(f"{name} was quantised; what reverts its edit is the checkpoint it came from")
    tensors = {name: original for name, original in merged.originals.items() if isinstance(original, Tensor)}
    write_tensors(folder, "originals", tensors, {"after": dict(merged.after)})


def load_merged(folder: FolderPath) -> Merged:
    """Read a folder written by `save_merged`; UserError where it is broken."""
    tensors, facts = read_tensors(folder, "originals")
    after = facts.get("after")
    if not isinstance(after, dict) or after.keys() != tensors.keys():
        raise UserError(f"{folder}/originals.json does not fit its tensors; merge again from the unedited model")
    return Merged(dict(tensors), {name: int(crc) for name, crc in after.items()})


def _placed(tensor: Tensor, weight: Tensor) -> Tensor:
    """Moves a tensor to the device of the weight, sharded in the same way."""
    tensor, mesh = tensor.to(weight.device), getattr(weight, "device_mesh", None)
    if mesh is None or hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, weight.placements)  # type: ignore[attr-defined]


def _plain(part: nn.Module, change: Tensor) -> nn.Linear:
    """Makes a plain linear of the dequantised weight plus the change; frozen like the quantised one."""
    dense = weight_of(part)
    bias = getattr(part, "bias", None)
    inputs, outputs = shape_of(part)
    new = nn.Linear(inputs, outputs, bias is not None, device="meta")
    new.weight = nn.Parameter((dense.double() + _placed(change, dense)).to(dense.dtype), requires_grad=False)
    if isinstance(bias, Tensor):
        new.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return new.train(part.training)
