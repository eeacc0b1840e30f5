"""The table of checkpoint formats: recognises, reads and writes them. A new format is one module and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omni.checkpoint.tensors import FileStamp
from omni.convert import huggingface, mini_omni, parts
from omni.convert import omni_folder as streamed
from omni.convert.contract import Foreign
from omni.convert.kinds import KINDS
from omni.convert.lazy import WriteCallback
from omni.errors import UserError
from omni.files import read_json
from omni.utils.remote import check_there


@dataclass(frozen=True)
class Format:
    """One checkpoint format; see `contract.py` for the three functions.

    Attributes:
        write: writes a whole model of ours in this format, where that is possible.
        loses: parts of a whole model that this format does not hold.
    """

    recognise: Callable[[Path], bool]
    read: Callable[[Path], Foreign]
    write: Callable[[Foreign, Path, WriteCallback | None], dict[str, FileStamp]] | None = None
    loses: str = ""


FORMATS: dict[str, Format] = {
    "omni": Format(streamed.recognise, streamed.read, streamed.write),
    "mini-omni": Format(
        mini_omni.recognise,
        mini_omni.read,
        mini_omni.write,
        "the codec's weights and what its config.json says",
    ),
    "whisper": Format(parts.recognise_whisper, parts.read_whisper),
    "snac": Format(parts.recognise_snac, partial(parts.read_codec, "snac")),
    "mimi": Format(parts.recognise_mimi, partial(parts.read_codec, "mimi")),
    "hf": Format(
        huggingface.recognise,
        huggingface.read,
        huggingface.write,
        "all but its text part: encoder, projector, audio tables and heads, the codec's weights",
    ),
}
"""Formats by the name that `--kind` takes, in the order in which they are tried on a path: specific before general."""


def kind_of(path: Path) -> str:
    """The format of a file or folder; UserError where there is none, or none is recognised."""
    check_there(path, "model", f"{path} does not exist; give a model's file or folder")
    for name, known in FORMATS.items():
        if known.recognise(path):
            return name
    refuse_file(path)
    kinds = "; ".join(f"{name}: {label}" for name, label in KINDS.items())
    config = path / "config.json"
    if config.is_file() and "model_type" not in read_json(config):
        raise UserError(f"{config} has no model_type, by which a model is known; fetch it again, or add it")
    raise UserError(f"{path} is not recognised; name what it is with --kind ({kinds})")


def refuse_file(path: Path, format_name: str | None = None) -> None:
    """Refuse a file where `format_name` is a format of folders (UserError naming the file's folder)."""
    if path.is_file() and format_name != "whisper":
        raise UserError(f"{path} is a file, and only a Whisper may be one; give the folder that it is in: {path.parent}")


def open_foreign(path: Path) -> Foreign:
    """Open a checkpoint without reading its weights. UserError: it is of no format, or its files do not fit it."""
    format_name = kind_of(path)
    refuse_file(path, format_name)
    return FORMATS[format_name].read(path)
