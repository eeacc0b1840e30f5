"""Checks of a conversion's TARGET: it replaces nothing but a model's folder, and nothing that the result does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omni.checkpoint.places import ADAPTER_CONFIG, ADAPTERS
from omni.convert.kinds import FLOATS, KINDS
from omni.encoder.whisper_config import ENCODER_PRESETS
from omni.errors import UserError, closest
from omni.files import real_place
from omni.utils.remote import check_there
from train.convert.options import ConvertOptions

if TYPE_CHECKING:
    from train.convert.options import ConvertOptions


def check_target(source: Path, target: Path, options: ConvertOptions) -> None:
    """Refuse a TARGET that holds other inputs, the working folder, or no model (UserError).

    SOURCE and `into` may be replaced by the model that is made of them.
    """
    place = real_place(target)
    for name, path in _inputs(source, options).items():
        found = path.resolve() if path.exists() else None
        if found is None or (found == place and name in ("SOURCE", "into")):
            continue
        if found.is_relative_to(place):
            raise UserError(f"{target} holds {path}, which would be lost; give another target")
    if place.exists() and Path.cwd().is_relative_to(place):
        raise UserError(
            f"{target} is or holds the folder that you are in, which would be replaced; leave it first, or give another name"
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not options.overwrite:
        raise UserError(f"{target} exists; give another name, or --overwrite to replace it")
    if (target / ADAPTERS).is_dir():
        raise UserError(f"{target} holds {ADAPTERS}/, which would be lost; move it away, or give another name")
    if not any((target / name).is_file() for name in ("config.json", "model_config.yaml", ADAPTER_CONFIG)):
        raise UserError(f"{target} is no folder of a model; only such a one is overwritten")


def _inputs(source: Path, options: ConvertOptions) -> dict[str, Path]:
    """Files and folders that the conversion reads, by the option that names them."""
    encoder = None if options.encoder is None or options.encoder in ENCODER_PRESETS else Path(options.encoder)
    named = {
        "into": options.into,
        "lora": options.lora,
        "encoder": encoder,
        "codec_folder": options.codec_folder,
        "tokenizer": options.tokenizer,
    }
    return {"SOURCE": source, **{name: path for name, path in named.items() if path is not None}}


def check_in_place(source: Path, target: Path, kind: str, becomes: str = "omni") -> None:
    """Refuse a SOURCE of format `kind` that is TARGET too and `becomes` a format that does not hold all of it (UserError)."""
    if source.resolve() != real_place(target) or kind == becomes == "omni":
        return
    from omni.convert.formats import FORMATS

    if becomes != "omni":
        known = FORMATS[becomes]
        raise UserError(f"{target} is SOURCE too: as {known.what} it would lose {known.loses}; give another TARGET")
    raise UserError(f"{target} is SOURCE too: {FORMATS[kind].what}, whose own files would be lost; give another TARGET")


def check(source: Path, target: Path, options: ConvertOptions) -> None:
    """Check everything that can be checked without reading weights: target, source, kind and dtype (UserError)."""
    check_target(source, target, options)
    check_there(source, "model", f"{source} does not exist; give a model's file or folder")
    if options.kind is not None and options.kind not in KINDS:
        raise UserError(f"--kind {options.kind!r} is unknown; {closest(options.kind, KINDS)}")
    if options.dtype is not None and options.dtype not in FLOATS:
        raise UserError(f"--dtype {options.dtype!r} is unknown; {closest(options.dtype, FLOATS)}")
