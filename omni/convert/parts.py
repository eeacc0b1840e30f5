"""Reads the parts of a speech model that others publish: Whisper's encoder, from OpenAI's `.pt` files and Hugging Face's
folders, and codecs (hubertsiuzdak/snac_24khz, kyutai/mimi), which are written as safetensors, too.

Sources: `whisper/__init__.py` (`load_model`: a `torch.save` of `dims` and `model_state_dict`) and `whisper/model.py` of
openai-whisper; transformers' `modeling_whisper.py`. Convolutions and linear layers are laid out alike in both; Hugging Face
stores the sinusoidal positions as a table of an embedding.

Codecs' weights are not renamed, because `omni.codec` reads the originals' names. A written folder is opened once by the codec
itself before it is renamed, so that one which does not fit is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omni.audio.io import SAMPLE_RATE
from omni.audio.mel import HOP
from omni.checkpoint.places import CONFIG, WEIGHTS
from omni.checkpoint.tensors import PT, FileStamp, read_torch, read_weights, save_tensors, state_of, write_file
from omni.codec.base import AudioCodec
from omni.codec.registry import CODECS, load_codec
from omni.config import ModelConfig
from omni.convert.contract import CodecConfig, Foreign, check_float, match, renamed, shapes_of, whole_number
from omni.convert.lazy import WriteCallback
from omni.encoder.base import Encoder, build_encoder
from omni.encoder.config import EncoderConfig
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.files import read_json, replacing_folder


def recognise(name: str, path: Path) -> bool:
    """Whether this is a folder of a `whisper`, `snac` or `mimi`, or a file that may be OpenAI's Whisper (`read_whisper` looks
    into it). SNAC's `config.json` names no model, so its keys are compared."""
    if path.is_file():
        return name == "whisper" and path.suffix == ".pt"
    settings = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    return {"vq_strides", "codebook_size"} <= settings.keys() if name == "snac" else settings.get("model_type") == name


def read_whisper(path: Path) -> Foreign:
    """Reads the encoder of a Whisper, in `mode: padded`, as released checkpoints were trained. UserError: no Whisper, a
    pickle that asks for more than tensors, or a tensor that does not fit."""
    return _read_openai(path) if path.is_file() else _read_huggingface(path)


def shorten_window(encoder: Foreign, seconds: float) -> Foreign:
    """A Whisper's encoder with a window of so many seconds, the first of its positions, by which longer sounds are split.
    UserError: it has fewer."""
    config, name = encoder.config, "encoder.whisper.positional_embedding"
    assert isinstance(config, WhisperConfig)
    if seconds > config.window_seconds:
        raise UserError(f"encoder.window_seconds is {seconds:g}: {encoder.path} has positions for {config.window_seconds:g} s")
    short = replace(config, window_seconds=seconds, long_audio="split")
    return replace(encoder, config=short, tensors={**encoder.tensors, name: encoder.tensors[name].rows(0, short.positions)})


def load_encoder(weights: Foreign) -> Encoder:
    """The encoder of a Whisper or of a whole model, in fp32; nothing else of the checkpoint is read."""
    config = weights.config.encoder if isinstance(weights.config, ModelConfig) else weights.config
    assert isinstance(config, EncoderConfig)
    encoder, prefix = build_encoder(config).eval(), "encoder."
    state = {name.removeprefix(prefix): t().float() for name, t in weights.tensors.items() if name.startswith(prefix)}
    encoder.load_state_dict(state)
    return encoder


def _read_openai(path: Path) -> Foreign:
    data = read_torch(path)
    if not isinstance(data, Mapping) or not {"dims", "model_state_dict"} <= set(data):
        raise UserError(f"{path} is no Whisper of OpenAI's: it must hold dims and model_state_dict")
    dims = data["dims"]
    if not isinstance(dims, Mapping):
        raise UserError(f"{path}: dims is a {type(dims).__name__}; it must be a mapping, as Whisper's own files have it")
    keys = ("n_mels", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer")
    config, shapes = _whisper_config(path, dims, *keys)
    state = state_of(data["model_state_dict"], path)
    names = {ours: ours.replace("encoder.whisper.", "encoder.") for ours in shapes}
    tensors = match(state, names, shapes, path, ignore=lambda name: name.startswith("decoder."))
    return Foreign("whisper", path, config, tensors, names=names)


def _read_huggingface(path: Path) -> Foreign:
    settings = read_json(path / CONFIG)
    for key, usual in (("activation_function", "gelu"), ("scale_embedding", False)):
        if settings.get(key, usual) != usual:
            raise UserError(f"{path / CONFIG}: {key} is {settings[key]!r}; Whisper has {usual!r}")
    keys = ("num_mel_bins", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers")
    config, shapes = _whisper_config(path / CONFIG, settings, *keys)
    inner = settings.get("encoder_ffn_dim", 4 * config.width)
    if inner != 4 * config.width:
        raise UserError(f"{path / CONFIG}: encoder_ffn_dim is {inner}; Whisper has 4 * d_model, {4 * config.width}")
    weights = read_weights(path)
    prefix = "model." if any(name.startswith("model.") for name in weights) else ""
    names = {ours: prefix + renamed(ours, _RENAMED) for ours in shapes}
    others = (f"{prefix}decoder.", "proj_out.")
    tensors = match(weights, names, shapes, path, ignore=lambda name: name.startswith(others))
    return Foreign("whisper", path, config, tensors, names=names)


def _whisper_config(where: Path, settings: Mapping[str, Any], *keys: str) -> tuple[WhisperConfig, dict[str, tuple[int, ...]]]:
    """The encoder of these settings, whose keys name bands, positions, width, heads and layers; and the names and shapes of its
    tensors in our model."""
    bands, positions, width, heads, layers = (whole_number(settings, key, where) for key in keys)
    config = WhisperConfig(bands, width, heads, layers, positions * 2 * HOP / SAMPLE_RATE, "padded")
    return config, shapes_of(lambda: WhisperEncoder(config), "encoder.")


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


def read_codec(name: str, path: Path) -> Foreign:
    """Opens a codec's folder: `config.json` and `model.safetensors`, or `pytorch_model.bin` of SNAC."""
    settings = read_json(path / CONFIG)
    tensors = read_weights(path)
    for tensor, lazy in tensors.items():
        if lazy.dtype.is_floating_point:
            check_float(tensor, lazy, path)
    return Foreign(name, path, CodecConfig(name, settings), tensors)


def write_codec(source: Foreign, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write a codec's folder, opened by the codec before it is renamed; UserError where anything does not fit."""
    if not isinstance(source.config, CodecConfig):
        raise UserError(f"{source.path} is no codec")
    with replacing_folder(target, source.nbytes) as folder:
        files = fill_codec(folder, source, on_progress)
        check_codec(source, folder)
    return files


def fill_codec(folder: Path, source: Foreign, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write a codec's `config.json` and `model.safetensors` into an existing folder."""
    assert isinstance(source.config, CodecConfig)
    settings = json.dumps(dict(source.config.settings), indent=2) + "\n"
    return {
        WEIGHTS: save_tensors(source.tensors, folder / WEIGHTS, PT, on_progress=on_progress),
        CONFIG: write_file(folder / CONFIG, settings.encode()),
    }


def check_codec(source: Foreign, folder: Path, name: str = "") -> AudioCodec:
    """Make the codec called `name` from a folder of its weights; UserError (naming the source) where they do not fit it."""
    assert isinstance(source.config, CodecConfig)
    name = name or source.config.name
    if name not in sorted(CODECS):
        raise UserError(f"{source.path} holds the codec {name}, which is not known here; known: {', '.join(sorted(CODECS))}")
    try:
        return load_codec(name, folder)
    except UserError as error:
        raise UserError(str(error).replace(str(folder), str(source.path))) from error
