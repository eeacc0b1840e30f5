"""Converts between mini-omni's `model_config.yaml` and our configuration.

Source: gpt-omni/mini-omni @ 26c31d5, `litgpt/config.py` (the keys, and what an absent one means); mini-omni2 @ 6efd5bf has one
more. Ids and their order are built into their `inference.py` and `utils/snac_utils.py`: the layout is our preset `mini-omni`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.convert.contract import whole_number
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError, closest
from omni.files import refuse_pointer
from omni.layout import Layout

_TEXT, _AUDIO = Layout.preset("mini-omni").text.vocabulary, [s.vocabulary for s in Layout.preset("mini-omni").audio]
_ROWS = _TEXT + sum(_AUDIO)

_SIZES = {"text_vocab_size": _TEXT, "audio_vocab_size": _AUDIO[0], "cat_audio_vocab_size": sum(_AUDIO)}
"""Values that are built into their inference code."""

_ONE = {
    "scale_embeddings": False, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "lm_head_bias": False,
    "shared_attention_norm": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "rope_condense_ratio": 1,
    "n_expert": 0,
}  # fmt: skip
"""Settings for which only one value is supported."""

_ABSENT: dict[str, Any] = {
    "name": "", "hf_config": {}, "scale_embeddings": False, "block_size": 4096, "vocab_size": 50254, "padding_multiple": 512,
    "padded_vocab_size": None, "n_layer": 16, "n_head": 32, "head_size": None, "n_embd": 4096, "rotary_percentage": 0.25,
    "parallel_residual": True, "bias": True, "lm_head_bias": False, "n_query_groups": None, "shared_attention_norm": False,
    "norm_class_name": "LayerNorm", "norm_eps": 1e-5, "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "none",
    "intermediate_size": None, "rope_condense_ratio": 1, "rope_base": 10000, "n_expert": 0, "n_expert_per_token": 0,
    "add_qkv_bias": None, "prompt_vocab_size": None, "attn_dropout": 0.0, "pos_type": "rope", "force_align": False,
    "use_pretrain_phoneme_emb": False, "tie_word_embeddings": False, "text_vocab_size": 152000,
    "cat_audio_vocab_size": 29120, "audio_vocab_size": 4160, "whisper_adapter_dim": 768, "vision_adapter_dim": 512,
    "post_adapter": False, "post_adapter_layers": 6, "asr_adapter": "llamamlp",
}  # fmt: skip
"""The keys of their configuration, with their defaults."""


def read_settings(path: Path) -> dict[str, Any]:
    """Reads their `model_config.yaml`, with their defaults for absent keys; UserError where it is none or a key is unknown."""
    if not path.is_file():
        raise UserError(f"{path} is missing; fetch the folder again")
    refuse_pointer(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())}); fetch it again") from error
    if not isinstance(data, dict) or not data:
        raise UserError(f"{path} holds no settings; fetch it again")
    for key in data:
        if key not in _ABSENT:
            raise UserError(f"{path}: unknown key {key!r}; {closest(str(key), _ABSENT)}")
    return _ABSENT | data


def model_config(settings: Mapping[str, Any], where: Path | str, encoder: Any, post: bool = False) -> ModelConfig:
    """Converts their settings (complete, see `read_settings`) and an encoder to our configuration. UserError: a setting that
    our decoder does not have, or an encoder of another width. `post`: the file holds a post-adapter. The released one has
    none, whatever its settings say, and is loaded without."""
    whole = partial(whole_number, settings, where=where)

    def number(key: str) -> float:
        try:
            return float(settings[key])
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: {key} is {settings[key]!r}; it must be a number") from error

    for key, usual in (_ONE | _SIZES).items():
        if settings[key] != usual:
            raise UserError(
                f"{where}: {key} is {settings[key]!r}; only {usual!r} is known here (absent keys count as litgpt's)"
            )
    padded = settings["padded_vocab_size"] or -(-whole("vocab_size") // whole("padding_multiple")) * whole("padding_multiple")
    if padded != _ROWS:
        raise UserError(f"{where}: the joint table has {padded} rows (padded_vocab_size); mini-omni's ids need {_ROWS}")
    if "Gemma" in str(settings["name"] or settings["hf_config"]):
        raise UserError(f"{where}: name is {settings['name']!r}; the norms of Gemma are not known here")
    width, heads = whole("n_embd"), whole("n_head")
    head = whole("head_size") if settings["head_size"] is not None else width // heads
    hidden = whole("intermediate_size") if settings["intermediate_size"] is not None else 4 * width
    projectors = {"llamamlp": ProjectorConfig("gated", hidden, bias=False), "mlp": ProjectorConfig("linear")}
    if settings["asr_adapter"] not in projectors:
        raise UserError(
            f"{where}: asr_adapter {settings['asr_adapter']!r} is unknown; {closest(str(settings['asr_adapter']), projectors)}"
        )
    if not isinstance(encoder, WhisperConfig) or encoder.width != whole("whisper_adapter_dim"):
        actual = f"{encoder.width} wide" if isinstance(encoder, WhisperConfig) else "none"
        raise UserError(
            f"{where}: the projector takes an encoder of width {settings['whisper_adapter_dim']} (whisper_adapter_dim), and "
            f"the one given is {actual}; give the Whisper that the model was trained with (small)"
        )
    decoder = DecoderConfig(
        width=width,
        layers=whole("n_layer"),
        heads=heads,
        kv_heads=heads if settings["n_query_groups"] is None else whole("n_query_groups"),
        head_dim=0 if head * heads == width else head,
        mlp_width=hidden,
        context=whole("block_size"),
        rope_base=number("rope_base"),
        qkv_bias=bool(settings["add_qkv_bias"]),
        norm_eps=number("norm_eps"),
        tie_text=bool(settings["tie_word_embeddings"]),
        combine="mean",
        post_layers=whole("post_adapter_layers") if settings["post_adapter"] and post else 0,
    )
    return ModelConfig(Layout.preset("mini-omni"), encoder, projectors[settings["asr_adapter"]], decoder, "snac")


def check_fits(config: ModelConfig, where: Path | str) -> None:
    """Refuse a model with a part or setting that mini-omni lacks (UserError naming it)."""
    layout, decoder, projector, encoder = config.layout, config.decoder, config.projector, config.encoder
    wanted = Layout.preset("mini-omni")
    gated = projector.kind == "gated"
    if not isinstance(encoder, WhisperConfig):
        raise UserError(f"{where}: the encoder.kind is {encoder.kind!r}, and mini-omni has a Whisper only")
    rules: tuple[tuple[str, Any, Any], ...] = (
        ("codec", config.codec, "snac"),
        ("layout's audio streams (sizes)", layout.codebook_sizes, wanted.codebook_sizes),
        ("layout's text stream (size)", layout.text.size, wanted.text.size),
        ("layout's tables (rows)", [s.vocabulary for s in layout.streams], [s.vocabulary for s in wanted.streams]),
        ("layout's delays", layout.delays, wanted.delays),
        ("layout's roles", {s.role for s in layout.streams}, {"predicted"}),
        ("layout.features", layout.features, wanted.features),
        ("layout.fill", layout.fill, wanted.fill),
        ("decoder.combine", decoder.combine, "mean"),
        ("decoder.window", decoder.window, None),
        ("decoder.rope_scaling", decoder.rope_scaling, None),
        ("decoder.qk_norm", decoder.qk_norm, False),
        ("projector.kind", projector.kind, "gated" if gated else "linear"),
        ("projector.stack", projector.stack, 1),
        ("projector.bias", projector.bias, not gated),
        ("projector.hidden", projector.hidden, decoder.mlp_width if gated else projector.hidden),
        ("encoder.mode", encoder.mode, "padded"),
        ("encoder.mel_floor", encoder.mel_floor, "clip"),
        ("encoder.normalize", encoder.normalize, "none"),
        ("encoder.n_mels", encoder.n_mels, 80),
        ("encoder.window_seconds", encoder.window_seconds, 30.0),
    )
    for name, value, only in rules:
        if value != only:
            raise UserError(
                f"{where}: the {name} is {value!r}, and mini-omni has {only!r} only: this model cannot be written as one; its "
                "text part can, as a Hugging Face folder (--kind hf)"
            )


def their_settings(config: ModelConfig, tied: bool, before: Mapping[str, Any]) -> dict[str, Any]:
    """Converts our configuration (checked by `check_fits`) to their `model_config.yaml`.

    Args:
        tied: the head is the embedding, for text and audio.
        before: the settings that the model was imported with; those that do not concern its shape are kept.
    """
    decoder = config.decoder
    base = decoder.rope_base
    return {
        **{key: value for key, value in _ABSENT.items() if key != "vision_adapter_dim"},
        **{key: before[key] for key in ("name", "hf_config", "gelu_approximate", "attn_dropout") if key in before},
        **_ONE,
        **_SIZES,
        "block_size": decoder.context,
        "vocab_size": _ROWS,
        "padded_vocab_size": _ROWS,
        "n_layer": decoder.layers,
        "n_head": decoder.heads,
        "n_query_groups": decoder.kv_heads,
        "head_size": decoder.head_size,
        "n_embd": decoder.width,
        "intermediate_size": decoder.mlp_width,
        "norm_eps": decoder.norm_eps,
        "rope_base": int(base) if base.is_integer() else base,
        "add_qkv_bias": decoder.qkv_bias,
        "tie_word_embeddings": tied,
        "whisper_adapter_dim": config.encoder.width,
        "asr_adapter": "llamamlp" if config.projector.kind == "gated" else "mlp",
        "post_adapter": decoder.post_layers > 0,
        "post_adapter_layers": decoder.post_layers or _ABSENT["post_adapter_layers"],
    }
