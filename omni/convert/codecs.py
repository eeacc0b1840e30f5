"""Converts codecs from the hub's folders, hubertsiuzdak/snac_24khz and kyutai/mimi, to safetensors with the original names.

Weights are not renamed, because the codecs of `omni.codec` read the originals' names. A written folder is opened once by the
codec itself before it is renamed, so that one which does not fit is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from omni.checkpoint.places import CONFIG, WEIGHTS
from omni.checkpoint.tensors import FileStamp, read_json, read_weights, write_file, write_safetensors
from omni.codec.base import AudioCodec
from omni.codec.registry import CODECS, load_codec
from omni.convert.contract import CodecConfig, Foreign, check_float
from omni.convert.lazy import WriteCallback
from omni.errors import UserError
from omni.files import replacing_folder


def recognise_snac(path: Path) -> bool:
    """Whether this is a SNAC folder: its `config.json` names no model, so its keys are compared."""
    return (path / CONFIG).is_file() and {"vq_strides", "codebook_size"} <= set(read_json(path / CONFIG))


def recognise_mimi(path: Path) -> bool:
    return (path / CONFIG).is_file() and read_json(path / CONFIG).get("model_type") == "mimi"


def read_snac(path: Path) -> Foreign:
    """Opens a SNAC folder: `config.json` and `pytorch_model.bin` or `model.safetensors`."""
    return _read("snac", path)


def read_mimi(path: Path) -> Foreign:
    """Opens a Mimi folder: `config.json` and `model.safetensors`."""
    return _read("mimi", path)


def _read(name: str, path: Path) -> Foreign:
    settings = read_json(path / CONFIG)
    tensors = read_weights(path)
    for tensor, lazy in tensors.items():
        if lazy.dtype.is_floating_point:
            check_float(tensor, lazy, path)
    return Foreign(name, path, CodecConfig(name, settings), tensors)


def write(source: Foreign, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write a codec's folder, opened by the codec before it is renamed; UserError where anything does not fit."""
    if not isinstance(source.config, CodecConfig):
        raise UserError(f"{source.place} is no codec")
    with replacing_folder(target, source.nbytes) as folder:
        files = fill(folder, source, on_progress)
        check(source, folder)
    return files


def fill(folder: Path, source: Foreign, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write a codec's `config.json` and `model.safetensors` into an existing folder."""
    assert isinstance(source.config, CodecConfig)
    settings = json.dumps(dict(source.config.settings), indent=2) + "\n"
    return {
        WEIGHTS: write_safetensors(folder / WEIGHTS, source.tensors, on_progress),
        CONFIG: write_file(folder / CONFIG, settings.encode()),
    }


def check(source: Foreign, folder: Path, name: str = "") -> AudioCodec:
    """Make the codec called `name` from a folder of its weights; UserError (naming the source) where they do not fit it."""
    assert isinstance(source.config, CodecConfig)
    name = name or source.config.name
    if name not in sorted(CODECS):
        raise UserError(f"{source.place} holds the codec {name}, which is not known here; known: {', '.join(sorted(CODECS))}")
    try:
        return load_codec(name, folder)
    except UserError as error:
        raise UserError(str(error).replace(str(folder), str(source.place))) from error
