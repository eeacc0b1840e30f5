"""Registry of audio codecs, with the facts of each that need neither its weights nor the packages that it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omni.errors import UserError
from omni.plugins import Registry
from omni.utils.remote import refuse_remote

if TYPE_CHECKING:
    import torch

    from omni.codec.base import AudioCodec


Load = TypeVar("Load", bound="Callable[[Path | None, torch.device], AudioCodec]")


@dataclass(frozen=True)
class CodecSpec:
    """Describes a codec without its weights.

    Attributes:
        name: in configurations, model folders and prepared rows.
        load: makes the codec from a folder of weights (None where it has none) and the device to compute on.
        sample_rate: of its sound, in Hz.
        frame_rate: frames per second.
        codebook_sizes: number of codes of each stream, in the model's order.
        weights: files that a folder of its weights holds, for messages; empty for a codec without weights.
        kind: format of its weights in `omni.convert`; by default its name.
        orders: other orders in which files store the codes of a frame: for each of the model's streams its index in the file.
        layout: preset of `Layout` for models that are grown for it; by default one stream a codebook, each delayed by one more.
        random: whether `load` without a folder makes one with random weights, for measuring its speed.
    """

    name: str
    load: Callable[[Path | None, torch.device], AudioCodec]
    sample_rate: int
    frame_rate: float
    codebook_sizes: tuple[int, ...]
    weights: str = ""
    kind: str = ""
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layout: str = ""
    random: bool = False


CODECS: Registry[CodecSpec] = Registry("codec")
"""Codecs by name."""


def register_codec(
    name: str, *, sample_rate: int, frame_rate: float, codebook_sizes: Sequence[int], **more: Any
) -> Callable[[Load], Load]:
    """A decorator for the function that loads a codec (`CodecSpec.load`); `more` are further attributes of its `CodecSpec`.

    @register_codec("mine", sample_rate=16000, frame_rate=50, codebook_sizes=(1024, 1024))
    def load(folder, device):
        return MyCodec()
    """

    def add(load: Load) -> Load:
        CODECS.add(name, CodecSpec(name, load, sample_rate, frame_rate, tuple(codebook_sizes), **more))
        return load

    return add


def code_orders(name: str) -> Mapping[str, tuple[int, ...]]:
    """Orders other than the model's in which files store a codec's codes; none for a codec that is not registered."""
    return CODECS[name].orders if name in CODECS else {}


def load_codec(name: str, folder: str | Path | None = None, device: str | torch.device = "cpu") -> AudioCodec:
    """Loads the codec called `name`, with weights from `folder` where it has any.

    Codec2 computes on the CPU whatever `device` says. Raises UserError for an unknown name (naming the closest), a folder that
    is missing, not wanted or does not fit, or a missing optional package.
    """
    import torch

    spec = CODECS.find(name)
    if folder is None and spec.weights:
        raise UserError(f"codec {name} needs a folder with {spec.weights}")
    if folder is not None and not spec.weights:
        raise UserError(f"{name} has no weights to read from {folder}: leave the folder out")
    if folder is not None:
        refuse_remote(folder, "codec folder")
    try:
        codec = spec.load(None if folder is None else Path(folder), torch.device(device))
    except UserError:
        raise
    except Exception as error:
        where = "" if folder is None else f" from {folder}"
        text = " ".join(str(error).split())
        raise UserError(f"codec {name} cannot be loaded{where}: {type(error).__name__}: {text}") from error
    if not spec.weights:  # else its folder decides
        actual = (codec.name, codec.sample_rate, codec.frame_rate, tuple(codec.codebook_sizes))
        wanted = (spec.name, spec.sample_rate, spec.frame_rate, spec.codebook_sizes)
        if actual != wanted:
            raise UserError(f"codec {name} is registered with {wanted}, and its function loaded {actual}: make them one")
    return codec


def load_if_given(name: str, folder: str | Path | None, device: str | torch.device = "cpu") -> AudioCodec | None:
    """Loads a codec; None where it has weights and no folder of them is given."""
    return None if folder is None and CODECS.find(name).weights else load_codec(name, folder, device)


@register_codec("codec2", sample_rate=8000, frame_rate=25.0, codebook_sizes=(512, 512, 16, 64), layout="codec2")
def _codec2(folder: Path | None, device: torch.device, name: str = "codec2") -> AudioCodec:
    from omni.codec.codec2 import Codec2Codec

    return Codec2Codec(name)


@register_codec(
    "none",
    sample_rate=8000,
    frame_rate=25.0,
    codebook_sizes=(512, 512, 16, 64),
    weights="a codec, and its model answers in writing",
    layout="codec2",
)
def _none(folder: Path | None, device: torch.device) -> AudioCodec:
    """Of a model that was not taught to speak."""
    raise UserError("its model answers in writing: leave the folder out")


@register_codec(
    "codec2-1600",
    sample_rate=8000,
    frame_rate=25.0,
    codebook_sizes=(512, 128, 128, 512, 256, 256, 256, 256),
    layout="codec2-1600",
)
def _codec2_1600(folder: Path | None, device: torch.device) -> AudioCodec:
    return _codec2(folder, device, "codec2-1600")


@register_codec(
    "snac",
    sample_rate=24000,
    frame_rate=24000 / 2048,
    codebook_sizes=(4096,) * 7,
    weights="the config.json and pytorch_model.bin of hubertsiuzdak/snac_24khz",
    orders={"levels": (0, 1, 3, 4, 2, 5, 6)},  # c0 | c1 c1 | c2 c2 c2 c2, where the model has c0 c1 c2 c2 c1 c2 c2
    layout="snac",
    random=True,
)
def _snac(folder: Path | None, device: torch.device) -> AudioCodec:
    from omni.codec.snac import SnacCodec

    return SnacCodec.random(device=device) if folder is None else SnacCodec.from_folder(folder, device)


def _mimi(folder: Path | None, device: torch.device, codebooks: int) -> AudioCodec:
    from omni.codec.mimi import MimiCodec

    options: dict[str, Any] = {"device": device, "codebooks": codebooks}
    return MimiCodec.random(**options) if folder is None else MimiCodec.from_folder(folder, **options)


for _name, _books in (("mimi", 8), ("mimi-16", 16), ("mimi-32", 32)):
    register_codec(
        _name,
        sample_rate=24000,
        frame_rate=12.5,
        codebook_sizes=(2048,) * _books,
        weights="the config.json and model.safetensors of kyutai/mimi",
        kind="mimi",
        random=True,
    )(partial(_mimi, codebooks=_books))
