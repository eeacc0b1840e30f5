"""Registry of audio codecs by name. Names can be listed without importing what a codec computes with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from omni.errors import UserError, closest
from omni.remote import refuse_remote

if TYPE_CHECKING:
    import torch

    from omni.codec.base import AudioCodec

CodecLoader = Callable[["Path | None", "torch.device"], "AudioCodec"]
"""Makes a codec from a folder of weights (None where none was given) and the device to compute on."""
_loaders: dict[str, CodecLoader] = {}


def register(name: str, loader: CodecLoader) -> None:
    """Makes `load_codec(name)` call `loader(folder, device)`; a later registration replaces an earlier."""
    _loaders[name] = loader


def codec_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_loaders)


def check_codec_name(name: str, where: str = "") -> None:
    """UserError, naming the closest, where no codec of that name is registered; the message starts with `where`."""
    if name not in _loaders:
        place = f"{where}: " if where else ""
        raise UserError(f"{place}unknown codec {name!r}: {closest(name, codec_names())}")


def load_codec(name: str, folder: str | Path | None = None, device: str | torch.device = "cpu") -> AudioCodec:
    """The codec called `name`, with weights from `folder` where it has any.

    Codec2 computes on the CPU whatever `device` says. Raises UserError for an unknown name (naming the
    closest), a missing optional package, or a folder that does not fit.
    """
    import torch

    check_codec_name(name)
    if folder is not None:
        refuse_remote(folder, "codec folder")
    return _loaders[name](None if folder is None else Path(folder), torch.device(device))


def _load_codec2(folder: Path | None, device: torch.device) -> AudioCodec:
    from omni.codec.codec2 import Codec2Codec

    if folder is not None:
        raise UserError(f"codec2 has no weights to read from {folder}: leave the folder out")
    return Codec2Codec()


def _load_snac(folder: Path | None, device: torch.device) -> AudioCodec:
    from omni.codec.snac import SnacCodec

    if folder is None:
        raise UserError("codec snac needs a folder with the config.json and pytorch_model.bin of hubertsiuzdak/snac_24khz")
    return SnacCodec.from_folder(folder, device)


def _load_mimi(folder: Path | None, device: torch.device, codebooks: int) -> AudioCodec:
    from omni.codec.mimi import MimiCodec

    if folder is None:
        raise UserError("codec mimi needs a folder with the config.json and model.safetensors of kyutai/mimi")
    return MimiCodec.from_folder(folder, device, codebooks)


register("codec2", _load_codec2)
register("snac", _load_snac)
register("mimi", functools.partial(_load_mimi, codebooks=8))
register("mimi-16", functools.partial(_load_mimi, codebooks=16))
register("mimi-32", functools.partial(_load_mimi, codebooks=32))
