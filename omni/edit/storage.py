"""Saves tensors and metadata as a folder: `<kind>.json` and `<kind>.safetensors`, nothing in which can run code.

The folder is written beside its name and renamed when it is whole; the JSON holds size and CRC-32 of the tensors' file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from omni.checkpoint.tensors import read_json, write_file
from omni.edit.deltas import Delta, Edits
from omni.edit.linears import whole
from omni.errors import UserError
from omni.files import replacing_folder
from omni.utils.remote import refuse_remote

FORMAT_VERSION = 1

Place = str | os.PathLike[str]


def write_tensors(folder: Place, kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a folder, or replace one.

    Raises:
        UserError: the disk is full, or the place cannot be written; nothing half-written is left.
    """
    data = save({name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()})
    with replacing_folder(Path(folder), len(data)) as place:
        written = write_file(place / f"{kind}.safetensors", data)
        head = {"format": FORMAT_VERSION, "kind": kind, "tensors": {"bytes": written.bytes, "crc32": written.crc32}}
        write_file(place / f"{kind}.json", (json.dumps({**head, **facts}, indent=2) + "\n").encode())


def read_tensors(folder: Place, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a folder written by `write_tensors`.

    Raises:
        UserError: no such folder, another kind or version, or a file that was cut or altered.
    """
    place = Path(folder)
    if not (place / f"{kind}.json").is_file():
        refuse_remote(place, f"folder of {kind}")
        if not place.exists():
            raise UserError(f"{place} does not exist; give the folder of {kind}")
        there = ", ".join(sorted(path.name for path in place.glob("*.json"))) if place.is_dir() else ""
        raise UserError(f"{place} has no {kind}.json{f' (it has {there})' if there else ''}; give the folder of {kind}")
    facts = read_json(place / f"{kind}.json")
    if facts.get("format") != FORMAT_VERSION or facts.get("kind") != kind:
        raise UserError(f"{place}: format {facts.get('format')!r} is unknown; this version reads format {FORMAT_VERSION}")
    file = place / f"{kind}.safetensors"
    try:
        data = file.read_bytes()
        if {"bytes": len(data), "crc32": zlib.crc32(data)} != facts.get("tensors"):
            raise UserError(f"{file} does not match its size and checksum in {kind}.json; fetch or make the folder again")
        return load(data), facts
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch or make the folder again") from error


def save_edits(folder: Place, edits: Edits, extra: Mapping[str, Any] | None = None) -> None:
    """Write edits with the checksums and shapes of their base.

    Args:
        extra: plain data to store with them.

    Raises:
        UserError: the edits are not signed or not finite, or the place cannot be written.
    """
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


def load_edits(folder: Place, model: nn.Module | None = None) -> Edits:
    """Read edits.

    Args:
        model: refuse edits that were made for other weights than its own.

    Raises:
        UserError: the folder is broken, or holds edits of another model.
    """
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
