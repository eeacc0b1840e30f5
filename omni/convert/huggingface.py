"""Reads and writes Hugging Face folders of language models: Qwen2, Qwen2.5, Qwen3, Llama 3.x and Mistral.

Sources: `config.json` as transformers writes it (4.x: `rope_theta`, `rope_scaling`; 5.x: `rope_parameters`) and the parameter
names of its `modeling_qwen2.py`, `modeling_qwen3.py`, `modeling_llama.py` and `modeling_mistral.py`. Our decoder has their
layout of weights, so tensors are renamed and never permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from omni.checkpoint.places import CONFIG, TOKENIZER, WEIGHTS
from omni.checkpoint.tensors import PT, FileStamp, read_weights, save_tensors
from omni.config import DecoderConfig, ModelConfig
from omni.convert.chat import read_chat
from omni.convert.contract import (
    COMPANIONS,
    WORDS,
    Foreign,
    TextConfig,
    kept_files,
    match,
    read_tokenizer,
    renamed,
    text_shapes,
    whole_model,
    whole_number,
    write_texts,
)
from omni.convert.lazy import Lazy, WriteCallback, same
from omni.errors import UserError, closest
from omni.files import read_json, replacing_folder
from omni.layout import Layout
from omni.utils.configuration import validate


@dataclass(frozen=True)
class Family:
    """Properties of a model family that its `config.json` leaves out. `windows`: sliding windows exist `always`, `never`, or
    where `use_sliding_window` is true (`asked`)."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    windows: Literal["never", "asked", "always"] = "asked"


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    "llama": Family("LlamaForCausalLM", windows="never"),
    "mistral": Family("MistralForCausalLM", windows="always"),
}
"""Families by `model_type`; Qwen2.5's is qwen2, Llama 3.x's llama."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
WINDOW, FULL_LAYERS = 4096, 28  # transformers' defaults of `sliding_window` and `max_window_layers`

TEMPLATE = "chat_template.jinja"
EMBEDDING, HEAD = "decoder.text_embedding.weight", "decoder.text_head.weight"


# --- in ---------------------------------------------------------------------------------------------------------------


def recognise(path: Path) -> bool:
    """Whether this is a folder of a Hugging Face model (of any family: `read` names those it knows)."""
    return (path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)


def read(path: Path, tokenizer: Path | None = None) -> Foreign:
    """Reads the folder of a language model. UserError: an unknown family, a setting our decoder does not have, a tensor that
    is missing, extra, or does not fit, or another model's tokenizer. `tokenizer`: another tokenizer.json than the folder's."""
    settings = read_json(path / CONFIG)
    weights = read_weights(path)
    text = text_config(settings, path / CONFIG, tied="lm_head.weight" not in weights)
    shapes = text_shapes(text)
    names = {ours: their_name(ours) for ours in shapes}
    tied_head = weights.get("lm_head.weight") if text.decoder.tie_text else None
    if tied_head is not None and not same(tied_head, weights.get(names[EMBEDDING])):
        raise UserError(
            f"{path}: tensor lm_head.weight differs from model.embed_tokens.weight, but {CONFIG} ties them; set "
            "tie_word_embeddings to false there if the head was trained apart"
        )
    # Buffers that older versions stored, and the second copy of a tied table.
    second = None if tied_head is None else "lm_head.weight"
    tensors = match(weights, names, shapes, path, lambda name: name.endswith("rotary_emb.inv_freq") or name == second)
    kept = {CONFIG: settings, **{name: read_json(path / name) for name in COMPANIONS if (path / name).is_file()}}
    words = read_tokenizer(tokenizer or path / TOKENIZER, text.size, path, kept, named=tokenizer is not None)
    template, said = path / TEMPLATE, kept.get(WORDS, {})
    if template.is_file():
        said = kept[WORDS] = {**said, "chat_template": template.read_text(encoding="utf-8")}
    if (chat := read_chat(said, words)) is not None:
        text = replace(text, chat=chat[0], end=chat[1])
    return Foreign("hf", path, text, tensors, words, names, {"hf": kept})


def text_config(settings: Mapping[str, Any], where: Path | str = CONFIG, tied: bool = False) -> TextConfig:
    """Converts their `config.json` to ours. UserError: an unknown family, or a setting that our decoder does not have.
    `tied`: whether the head is the embedding where the settings do not say."""
    if "model_type" not in settings:
        raise UserError(f"{where} has no model_type; add the one that it is of: {', '.join(FAMILIES)}")
    model_type = str(settings["model_type"])
    if model_type not in FAMILIES:
        raise UserError(f"{where}: model_type {model_type!r} is no family that is known here; {closest(model_type, FAMILIES)}")
    family = FAMILIES[model_type]
    for key, only in _ONLY.items():
        if settings.get(key) not in (None, only):
            raise UserError(f"{where}: {key} is {settings[key]!r}; only {only!r} is known here")
    if settings.get("quantization_config"):
        raise UserError(f"{where}: the weights are quantised (quantization_config); fetch the original model")
    heads = {"num_key_value_heads": settings.get("num_attention_heads"), "head_dim": family.head_dim or 0}
    usual = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": tied, **heads}
    known = {**settings, **{key: value for key, value in usual.items() if settings.get(key) is None}}
    known |= _rope(known, where) | {"sliding_window": _window(settings, family, where)}
    decoder = {ours: known.get(theirs) for ours, theirs in KEYS.items()}
    decoder |= {"qkv_bias": family.qkv_bias, "qk_norm": family.qk_norm, "combine": "sum"}
    names = {f"decoder.{ours}": f"{theirs}: " for ours, theirs in KEYS.items()}
    data = {"decoder": decoder, "size": settings.get("vocab_size")}
    text = validate(TextConfig, data, lambda key: f"{where}: {names.get(key, '')}")
    by_default = text.decoder.head_dim * text.decoder.heads == text.decoder.width
    return replace(text, decoder=replace(text.decoder, head_dim=0)) if by_default else text


KEYS = {
    "width": "hidden_size", "mlp_width": "intermediate_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps", "rope_base": "rope_theta", "rope_scaling": "rope_scaling", "window": "sliding_window",
    "tie_text": "tie_word_embeddings",
}  # fmt: skip
"""Their settings of what our decoder's configuration says."""
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
"""Settings for which only one value is supported."""
_ROPE = ("rope_parameters", "rope_scaling")
"""Names that the rotary settings have had."""
CONTEXT = "original_max_position_embeddings"
"""Their setting of our `RopeScaling.original_context`."""


def _rope(settings: Mapping[str, Any], where: Path | str) -> dict[str, Any]:
    """The settings `rope_theta`, and `rope_scaling` as ours has it."""
    rope = {"rope_theta": settings["rope_theta"]}
    for key in ("rope_scaling", "rope_parameters"):
        value = settings.get(key)
        if not isinstance(value, dict | None):
            raise UserError(f"{where}: {key} is {value!r}; it must be an object of settings, or null; fetch the file again")
        rope |= value or {}
    rope_type, scaling = rope.get("rope_type", rope.get("type", "default")), None
    if rope_type not in ("default", "llama3"):
        raise UserError(f"{where}: rotary scaling {rope_type!r} is not known here; known: default, llama3")
    if rope_type == "llama3":
        scaling = {key: rope.get(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        scaling["original_context"] = rope.get(CONTEXT)
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _window(settings: Mapping[str, Any], family: Family, where: Path | str) -> Any:
    """The sliding window that all layers share, None for none."""
    asked, window = settings.get("use_sliding_window"), settings.get("sliding_window", WINDOW)
    if not isinstance(asked, bool | None):
        raise UserError(f"{where}: use_sliding_window is {asked!r}; it must be true or false; fetch the file again")
    if window is None or family.windows == "never" or (family.windows == "asked" and not asked):
        return None
    layers, types = whole_number(settings, "num_hidden_layers", where), settings.get("layer_types")
    if types is None:
        first = {"max_window_layers": FULL_LAYERS, **settings} if family.windows == "asked" else {"max_window_layers": 0}
        full = min(whole_number(first, "max_window_layers", where, least=0), layers)
        types = [_FULL] * full + [_SLIDING] * (layers - full)
    if not isinstance(types, list) or len(types) != layers or any(layer_type not in (_FULL, _SLIDING) for layer_type in types):
        raise UserError(
            f"{where}: layer_types is {types!r}; it must list {_FULL} or {_SLIDING} for each of the {layers} layers; fetch the "
            "file again"
        )
    slide = types.count(_SLIDING)
    if 0 < slide < layers:
        raise UserError(
            f"{where}: some layers have a sliding window and some none ({slide} of {layers} have it: max_window_layers, "
            "layer_types); that is not known here"
        )
    return window if slide else None


_RENAMED = (
    ("decoder.text_embedding.", "model.embed_tokens."),
    ("decoder.text_head.", "lm_head."),
    ("decoder.norm.", "model.norm."),
    ("decoder.blocks.", "model.layers."),
    (".attention_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attention.q.", ".self_attn.q_proj."),
    (".attention.k.", ".self_attn.k_proj."),
    (".attention.v.", ".self_attn.v_proj."),
    (".attention.out.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    (".mlp.gate.", ".mlp.gate_proj."),
    (".mlp.up.", ".mlp.up_proj."),
    (".mlp.down.", ".mlp.down_proj."),
)


their_name = partial(renamed, table=_RENAMED)
"""The name of one of our tensors in their files."""

our_name = partial(renamed, table=_RENAMED, back=True)
"""Our name of one of their tensors."""


# --- out --------------------------------------------------------------------------------------------------------------


def write(source: Foreign, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write the text part of a whole model as a folder that transformers loads. The rows of our special ids are left out, so
    the vocabulary is the original language model's again. The contribution of the audio streams' pad ids to a column of text,
    and the mean over streams, are folded into the embedding (which is then untied from the head): logits of text are those of
    the whole model while it is silent. UserError: no family has this decoder, or the place cannot be written."""
    config, tokenizer = whole_model(source, "its text part")
    size = config.layout.text.size
    tensors = {name: source.tensors[name] for name in text_shapes(TextConfig(config.decoder, size))}
    head = tensors.get(HEAD, tensors[EMBEDDING]).rows(0, size)
    tensors[EMBEDDING], folded = _silent_embedding(source, config, size)
    tied = config.decoder.tie_text and not folded
    if not tied:
        tensors[HEAD] = head
    kept = kept_files(source, "hf")
    before = kept.get(CONFIG, {})
    settings = their_config(config.decoder, size, tied, f"{source.path}/{CONFIG}", str(before.get("model_type")))
    rope = (config.decoder.rope_base, config.decoder.rope_scaling)
    known = text_config(before).decoder if before else config.decoder
    stale = () if (known.rope_base, known.rope_scaling) == rope else _ROPE
    settings = {key: value for key, value in before.items() if key not in stale} | settings
    settings |= dict.fromkeys({"dtype", "torch_dtype"} & {"dtype", *before}, str(head.dtype).removeprefix("torch."))
    weights = {their_name(name): tensor for name, tensor in tensors.items()}
    with replacing_folder(target, sum(t.nbytes for t in weights.values())) as folder:
        files = {WEIGHTS: save_tensors(weights, folder / WEIGHTS, PT, on_progress=on_progress)}
        files |= write_texts(folder, tokenizer, {CONFIG: settings, **{name: kept[name] for name in COMPANIONS if name in kept}})
    return files


def their_config(
    decoder: DecoderConfig, size: int, tied: bool, where: str = "decoder", model_type: str | None = None
) -> dict[str, Any]:
    """Converts our decoder's configuration to their `config.json`, in keys that transformers 4 and 5 both read. UserError:
    no family has both biases and norms on queries and keys. `model_type`: the family that the model was imported from, which is
    kept where the decoder still fits it."""
    if decoder.qkv_bias and decoder.qk_norm:
        raise UserError(f"{where}: no known family has both decoder.qkv_bias and decoder.qk_norm; it cannot be written as one")
    form = decoder.qkv_bias, decoder.qk_norm
    alike = {name: family for name, family in FAMILIES.items() if (family.qkv_bias, family.qk_norm) == form}
    fitting = [name for name, family in alike.items() if decoder.window is None or family.windows != "never"]
    if model_type not in fitting:
        model_type = fitting[0]
    settings: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": size,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **{theirs: value for ours, theirs in KEYS.items() if (value := asdict(decoder)[ours]) is not None},
        "head_dim": decoder.head_size,
        "tie_word_embeddings": tied,
    }
    if decoder.rope_scaling is not None:
        scaling = settings["rope_scaling"]
        settings["rope_scaling"] = {"rope_type": "llama3", CONTEXT: scaling.pop("original_context"), **scaling}
    if model_type in ("qwen2", "qwen3"):
        slides = decoder.window is not None
        settings |= {"use_sliding_window": slides, "max_window_layers": 0 if slides else decoder.layers}
    if model_type == "mistral":
        settings["sliding_window"] = decoder.window
    return settings


def pad_rows(layout: Layout) -> list[int]:
    """Rows of the audio table that are the streams' pad ids."""
    starts = accumulate((stream.vocabulary for stream in layout.audio), initial=0)
    return [start + stream.special("pad") for start, stream in zip(starts, layout.audio, strict=False)]


def _silent_embedding(source: Foreign, config: ModelConfig, size: int) -> tuple[Lazy, bool]:
    """The text table with the contribution of silent audio streams folded in, and whether that changes it."""
    table, audio = source.tensors[EMBEDDING].rows(0, size), source.tensors["decoder.audio_embedding.weight"]
    silence = torch.stack([audio.read(row, row + 1)[0].float() for row in pad_rows(config.layout)]).sum(0)
    scale = 1 / len(config.layout) if config.decoder.combine == "mean" else 1.0
    if config.layout.talker or (scale == 1 and not bool(silence.any())):
        return table, False

    read = lambda start, stop: ((table.read(start, stop).float() + silence) * scale).to(table.dtype)  # noqa: E731
    return Lazy(table.shape, table.dtype, read), True
