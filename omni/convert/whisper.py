"""Reads Whisper's encoder from OpenAI's `.pt` files and Hugging Face's folders; the rest of a Whisper is not read.

Sources: `whisper/__init__.py` (`load_model`: a `torch.save` of `dims` and `model_state_dict`) and `whisper/model.py` of
openai-whisper; transformers' `modeling_whisper.py`. Convolutions and linear layers are laid out alike in both; Hugging Face
stores the sinusoidal positions as a table of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omni.checkpoint.places import CONFIG
from omni.checkpoint.tensors import read_json, read_torch, read_weights, state_of
from omni.convert.contract import Foreign, match
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError


def recognise(path: Path) -> bool:
    """Whether this is a Whisper folder, or a file that may be OpenAI's (`read` looks into it)."""
    if path.is_file():
        return path.suffix == ".pt"
    return (path / CONFIG).is_file() and read_json(path / CONFIG).get("model_type") == "whisper"


def read(path: Path) -> Foreign:
    """Reads the encoder of a Whisper, in `mode: padded`, as released checkpoints were trained.

    Raises:
        UserError: no Whisper, a pickle that asks for more than tensors, or a tensor that does not fit.
    """
    return _read_openai(path) if path.is_file() else _read_huggingface(path)


def _read_openai(path: Path) -> Foreign:
    data = read_torch(path)
    if not isinstance(data, Mapping) or not {"dims", "model_state_dict"} <= set(data):
        raise UserError(f"{path} is no Whisper of OpenAI's: it must hold dims and model_state_dict")
    dims = data["dims"]
    if not isinstance(dims, Mapping):
        raise UserError(f"{path}: dims is a {type(dims).__name__}; it must be a mapping, as Whisper's own files have it")
    config = _config(
        path,
        bands=dims.get("n_mels"),
        positions=dims.get("n_audio_ctx"),
        width=dims.get("n_audio_state"),
        heads=dims.get("n_audio_head"),
        layers=dims.get("n_audio_layer"),
    )
    found = state_of(data["model_state_dict"], path)
    shapes = encoder_shapes(config)
    names = {ours: ours.replace("encoder.whisper.", "encoder.") for ours in shapes}
    tensors = match(found, names, shapes, path, ignore=lambda name: name.startswith("decoder."))
    return Foreign("whisper", path, config, tensors, names=names)


def _read_huggingface(path: Path) -> Foreign:
    settings = read_json(path / CONFIG)
    for key, usual in (("activation_function", "gelu"), ("scale_embedding", False)):
        if settings.get(key, usual) != usual:
            raise UserError(f"{path / CONFIG}: {key} is {settings[key]!r}; Whisper has {usual!r}")
    config = _config(
        path / CONFIG,
        bands=settings.get("num_mel_bins"),
        positions=settings.get("max_source_positions"),
        width=settings.get("d_model"),
        heads=settings.get("encoder_attention_heads"),
        layers=settings.get("encoder_layers"),
    )
    inner = settings.get("encoder_ffn_dim", 4 * config.width)
    if inner != 4 * config.width:
        raise UserError(f"{path / CONFIG}: encoder_ffn_dim is {inner}; Whisper has 4 * d_model, {4 * config.width}")
    found = read_weights(path)
    prefix = "model." if any(name.startswith("model.") for name in found) else ""
    shapes = encoder_shapes(config)
    names = {ours: prefix + their_name(ours) for ours in shapes}
    others = (f"{prefix}decoder.", "proj_out.")
    tensors = match(found, names, shapes, path, ignore=lambda name: name.startswith(others))
    return Foreign("whisper", path, config, tensors, names=names)


def _config(where: Path, *, bands: Any, positions: Any, width: Any, heads: Any, layers: Any) -> WhisperConfig:
    sizes = {"mel bands": bands, "positions": positions, "width": width, "heads": heads, "layers": layers}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{where}: the encoder's number of {name} is {value!r}; it must be a whole number")
    config = WhisperConfig(n_mels=bands, width=width, heads=heads, layers=layers, mode="padded")
    return WhisperConfig(
        n_mels=bands,
        width=width,
        heads=heads,
        layers=layers,
        window_seconds=positions / config.frames_per_second,
        mode="padded",
    )


_RENAMED = (
    ("encoder.whisper.positional_embedding", "encoder.embed_positions.weight"),
    ("encoder.whisper.ln_post.", "encoder.layer_norm."),
    ("encoder.whisper.blocks.", "encoder.layers."),
    ("encoder.whisper.", "encoder."),
    (".attn.query.", ".self_attn.q_proj."),
    (".attn.key.", ".self_attn.k_proj."),
    (".attn.value.", ".self_attn.v_proj."),
    (".attn.out.", ".self_attn.out_proj."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    (".mlp_ln.", ".final_layer_norm."),
)


def their_name(ours: str) -> str:
    """The name of one of our tensors in transformers' `WhisperModel`."""
    for a, b in _RENAMED:
        ours = ours.replace(a, b)
    return ours


def encoder_shapes(config: WhisperConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an encoder's tensors in our model."""
    with torch.device("meta"):
        state = WhisperEncoder(config).state_dict()
    return {f"encoder.{name}": tuple(tensor.shape) for name, tensor in state.items()}
