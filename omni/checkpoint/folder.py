"""A model as a folder: `config.json`, `model.safetensors`, `tokenizer.json`, and `codec/` where the codec has weights.

Nothing in it can run code. A folder is written beside its name and renamed when it is whole; `config.json` holds the size and
the CRC-32 of every other file, so a truncated or mixed-up folder is refused.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni.audio.codec import AudioCodec, load_codec
from omni.config import FORMAT_VERSION, ModelConfig, from_dict, to_dict
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer

WEIGHTS, CONFIG, TOKENIZER, CODEC = "model.safetensors", "config.json", "tokenizer.json", "codec"


@dataclass(frozen=True)
class LoadedFolder:
    model: SpeechModel
    tokenizer: Tokenizer
    config: ModelConfig
    codec: AudioCodec | None


def save_folder(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    state: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    *,
    codec_folder: str | os.PathLike[str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder beside its name, then rename; an older folder of that name is replaced only then.

    Args:
        state: the `state_dict` of a `SpeechModel` (tied tensors once).
        codec_folder: weights of the codec to copy along.
        extra: plain data kept under `extra` in `config.json`.

    Raises:
        UserError: the disk is full, or the place cannot be written; nothing half-written is left.
    """
    target = Path(folder)
    beside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        tensors = {name: t.detach().to("cpu").contiguous() for name, t in state.items()}
        save_file(tensors, beside / WEIGHTS)
        tokenizer.save(beside / TOKENIZER)
        if codec_folder is not None:
            shutil.copytree(codec_folder, beside / CODEC)
        files = {
            str(p.relative_to(beside)): {"bytes": p.stat().st_size, "crc32": _crc32(p)}
            for p in sorted(beside.rglob("*"))
            if p.is_file()
        }
        data = {"format": FORMAT_VERSION, "model": to_dict(config), "files": files, "extra": dict(extra or {})}
        (beside / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        replace_folder(beside, target)
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        way_out = "free some space and save again" if full else "choose a place that can be written"
        raise UserError(f"model folder {target} cannot be written ({error}); {way_out}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def replace_folder(source: Path, target: Path) -> None:
    """Rename a folder onto another name; what stood there is removed only after the new one is in place."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        os.rename(target, old)
    os.rename(source, target)
    shutil.rmtree(old, ignore_errors=True)


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The model's configuration; UserError where the folder is not a model folder of a known version."""
    return from_dict(ModelConfig, _read(Path(folder))["model"], f"{folder}/{CONFIG}: model")


def load_folder(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    codec_folder: str | os.PathLike[str] | None = None,
) -> LoadedFolder:
    """Read a model folder.

    Args:
        dtype: convert the weights on the way.
        codec_folder: the codec's weights, where they are not in the folder.

    Raises:
        UserError: a file is missing, truncated or altered, a tensor does not fit the configuration, or it is a pickle.
    """
    path = Path(folder)
    data = _read(path)
    config = from_dict(ModelConfig, data["model"], f"{path / CONFIG}: model")
    for name, wanted in data.get("files", {}).items():
        _check(path / name, wanted)
    try:
        state = load_file(path / WEIGHTS)
    except (OSError, SafetensorError, struct.error) as error:
        raise UserError(f"weights {path / WEIGHTS} cannot be read ({error}); fetch or save the folder again") from error
    model = SpeechModel.from_state(config, state, where=str(path / WEIGHTS)).to(device=device, dtype=dtype).eval()
    tokenizer = Tokenizer.from_file(path / TOKENIZER)
    if len(tokenizer) > config.layout.text.size:
        raise UserError(
            f"{path / TOKENIZER} has {len(tokenizer)} ids, but the layout's text stream only {config.layout.text.size}; "
            "is it the tokenizer of another model?"
        )
    own = path / CODEC
    place = Path(codec_folder) if codec_folder is not None else own if own.is_dir() else None
    codec = load_codec(config.codec, place, device=device) if place is not None or config.codec == "codec2" else None
    return LoadedFolder(model, tokenizer, config, codec)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"model folder {path} does not exist; give a folder with {CONFIG} and {WEIGHTS}")
    file = path / CONFIG
    if not file.is_file():
        raise UserError(f"{path} has no {CONFIG}; it is not a model folder (see `python -m train fit`)")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch or save the folder again") from error
    if not isinstance(data, dict) or "model" not in data or data.get("format") != FORMAT_VERSION:
        found = data.get("format") if isinstance(data, dict) else None
        raise UserError(f"{file}: format {found!r} is unknown; this version reads format {FORMAT_VERSION}")
    return data


def _check(file: Path, wanted: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise UserError(f"{file} is missing; fetch or save the folder again")
    size = file.stat().st_size
    if size != wanted["bytes"]:
        kind = "truncated" if size < wanted["bytes"] else "longer than it was"
        raise UserError(f"{file} is {kind}: {size} bytes of {wanted['bytes']}; fetch or save the folder again")
    with file.open("rb") as handle:
        if file.name == WEIGHTS and handle.read(2) in (b"PK", b"\x80\x02"):
            raise UserError(f"{file} is a pickle, which could run code; convert it to safetensors first")
    if _crc32(file) != wanted["crc32"]:
        raise UserError(f"{file} does not match its checksum in {CONFIG}; fetch or save the folder again")


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
