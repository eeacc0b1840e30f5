"""Checks of a model folder before memory is taken for it: the depth of its JSON, the tensors in the weights' header against the
configuration, paths of listed files (inside of the folder), and finite weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from omni.checkpoint.places import is_pickle
from omni.config import ModelConfig
from omni.errors import UserError
from omni.files import refuse_pointer

DEEPEST = 100
"""Most levels of nested JSON."""

LONGEST = 100_000_000
"""Most bytes of a JSON file, and of a safetensors header (the reference implementation's limit)."""

CONFIG_LONGEST = 16_000_000
"""Most bytes of a `config.json` of ours."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

AGAIN = "fetch or save the folder again"


def load_json(path: Path, longest: int = LONGEST) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: it is no JSON, longer than `longest` bytes, or nested more than `DEEPEST` deep.
        OSError: it cannot be read.
    """
    refuse_pointer(path)
    size = path.stat().st_size
    if size > longest:
        raise ValueError(f"it has {size} bytes, and at most {longest} are read")
    deep = ValueError(f"it is nested more than {DEEPEST} deep")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise deep from None
    level = [data]
    for _ in range(DEEPEST + 1):
        inner = (value.values() if isinstance(value, dict) else value for value in level if isinstance(value, (dict, list)))
        level = [value for values in inner for value in values]
        if not level:
            return data
    raise deep


def check_header(config: ModelConfig, path: Path) -> None:
    """Compare the sizes that make a model large with the shapes in its weights' header, in milliseconds, without building it.

    Raises:
        UserError: the header cannot be read, or has other layers, tables or widths than the configuration.
    """
    stacks = _stacks(config)
    file = open_safetensors(path, most=1_000_000 + 16_000 * sum(stacks.values()))
    shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for prefix, count in stacks.items():
        found = {name.removeprefix(prefix).partition(".")[0] for name in shapes if name.startswith(prefix)}
        if len(found) != count:
            raise UserError(
                f"{path}: the configuration asks for {count} layers {prefix}*, the weights have {len(found)}; they belong to "
                "another configuration"
            )
    for name, wanted in _key_shapes(config).items():
        if name in shapes and shapes[name] != wanted:  # a missing tensor is named when all tensors are compared
            raise UserError(
                f"{path}: tensor {name} has shape {shapes[name]}, the configuration asks for {wanted}; the weights belong to "
                "another configuration"
            )


def _stacks(config: ModelConfig) -> dict[str, int]:
    decoder = config.decoder
    return {
        "decoder.blocks.": decoder.layers,
        "decoder.post_blocks.": decoder.post_layers,
        **{f"encoder.{prefix}": layers for prefix, layers in config.encoder.weight_stacks().items()},
    }


def _key_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """Shapes of tensors that together depend on every size of decoder, encoder and layout."""
    d, layout = config.decoder, config.layout
    first = "decoder.blocks.0"
    return {
        "decoder.text_embedding.weight": [layout.text.vocabulary, d.width],
        "decoder.audio_embedding.weight": [sum(s.vocabulary for s in layout.audio), d.width],
        f"{first}.attention.q.weight": [d.heads * d.head_size, d.width],
        f"{first}.attention.k.weight": [d.kv_heads * d.head_size, d.width],
        f"{first}.mlp.up.weight": [d.mlp_width, d.width],
        **{f"encoder.{name}": shape for name, shape in config.encoder.weight_shapes().items()},
    }


def open_safetensors(path: Path, most: int = LONGEST) -> Any:
    """Opens a safetensors file, whose header is checked and whose tensors are mapped, not read.

    Args:
        most: most bytes that a header with the expected tensors can have.

    Raises:
        UserError: the file is missing, truncated, a pickle, or its header contradicts itself.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; {AGAIN}")
    refuse_pointer(path)
    if is_pickle(path):
        raise UserError(f"{path} is a pickle, which could run code; fetch the safetensors of this model")
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
    if most < length <= min(LONGEST, size):
        raise UserError(
            f"{path}: its header of {length} bytes lists far more tensors than the configuration asks for; the weights "
            "belong to another configuration"
        )
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{path} is truncated or no safetensors file ({size} bytes; {reason}); {AGAIN}") from error


def check_inside(folder: Path, name: str, where: Path) -> None:
    """Refuse the name of a file that is not below the folder, links followed (UserError). A snapshot in a Hugging Face cache
    links its files to the `blobs` beside the snapshots; those belong to it."""
    out = UserError(f"{where}: files: {name!r:.100} lies outside of the folder; {AGAIN}")
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise out
    try:
        home, place = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{where}: files: {name!r:.100} cannot be followed ({error}); {AGAIN}") from error
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(place.is_relative_to(one) for one in homes):
        raise out


def finite(piece: Tensor) -> bool:
    """Whether all values of a tensor are finite; makes no copy of it, and takes a quarter to a half of its checksum's time."""
    if piece.dtype not in FLOATS or not piece.numel():
        return True
    return all(bool(end.isfinite()) for end in torch.aminmax(piece))


class NotFinite(UserError):
    """A tensor that is written holds numbers that are not finite; its text names the tensor."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tensor {name} holds numbers that are not finite")


def check_finite(model: nn.Module, where: Path, dtype: torch.dtype | None) -> None:
    """Refuse a model with weights that are not finite numbers (UserError naming the first tensor).

    Args:
        dtype: type that the weights were converted to, None where they were not.
    """
    for name, tensor in model.state_dict().items():
        if not finite(tensor):
            way = f"load it in another type than {dtype}, or " if dtype is not None else ""
            raise UserError(
                f"{where}: tensor {name} holds numbers that are not finite, so the model can answer nothing; {way}take the "
                "weights of an earlier step, or fetch them again"
            )
