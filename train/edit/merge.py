"""Merges edits into weights, and reverts that (`omni-train edit merge MODEL EDITS OUT`, `revert MERGED EDITS OUT`).

A merged folder keeps what it replaced in `replaced/<edits>`, so that every one of several edits can be taken out again bit for
bit, the last one first.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from omni.checkpoint.folder import check_full_precision, load_folder, save_folder
from omni.checkpoint.places import CODEC
from omni.edit.storage import load_edits, load_merged, merge, read_tensors, revert, save_merged
from omni.errors import UserError
from omni.files import replacing_folder
from train.edit.apply import check_out

REPLACED = "replaced"


def merge_folder(model: Path, edits: Path, out: Path, overwrite: bool = False) -> list[str]:
    """Write a model folder with edits in its weights.

    Returns:
        names of the linears that changed.

    Raises:
        UserError: edits of another model, or that are in its weights already.
    """
    _check(model, out, overwrite)
    name = name_of(edits)
    if (model / REPLACED / name).is_dir():
        raise UserError(f"{edits} is merged into {model} already; to take it out: omni-train edit revert {model} {edits} OUT")
    loaded = load_folder(model)
    found = load_edits(edits, loaded.model)
    merged = merge(loaded.model, found)
    with replacing_folder(out) as place:
        _write(place, model, loaded)
        save_merged(place / REPLACED / name, merged)
    return list(found.deltas)


def revert_folder(model: Path, edits: Path, out: Path, overwrite: bool = False) -> list[str]:
    """Writes a model folder without edits that were merged, bit for bit as before; returns the names of the linears.

    Raises:
        UserError: the edits were never merged into this model, or its weights have changed since.
    """
    _check(model, out, overwrite)
    name = name_of(edits)
    loaded = load_folder(model)
    if not (model / REPLACED / name).is_dir():
        raise UserError(
            f"{edits} was never merged into {model}, so there is nothing to revert; give the folder that was merged"
        )
    merged = load_merged(model / REPLACED / name)
    revert(loaded.model, merged)
    with replacing_folder(out) as place:
        _write(place, model, loaded)
        shutil.rmtree(place / REPLACED / name)
        if not any((place / REPLACED).iterdir()):
            (place / REPLACED).rmdir()
    return list(merged.after)


def name_of(edits: Path) -> str:
    """The name of edits: the checksum of their tensors. UserError where the folder holds none."""
    _, facts = read_tensors(edits, "edits")
    return f"{facts['tensors']['crc32']:08x}"


def _check(model: Path, out: Path, overwrite: bool) -> None:
    if out.resolve() == model.resolve():
        raise UserError(f"OUT is {out}, the model itself; name another folder: the one that is read stays as it is")
    if model.resolve() in out.resolve().parents:
        raise UserError(f"OUT is {out}, inside the model {model}; name a folder beside it: the one that is read stays as it is")
    check_out(out, overwrite, "config.json")
    check_full_precision(model, "merging")


def _write(place: Path, model: Path, loaded: Any) -> None:
    """Writes a model folder like another one, with the loaded weights; what earlier edits replaced is kept."""
    codec = model / CODEC
    save_folder(
        place,
        loaded.config,
        loaded.model.state_dict(),
        loaded.tokenizer,
        codec_folder=codec if codec.is_dir() else None,
        extra=loaded.extra,
    )
    if (model / REPLACED).is_dir():
        shutil.copytree(model / REPLACED, place / REPLACED)
