"""Reads and writes checkpoints of mini-omni, and reads mini-omni2's: `lit_model.pth`, `model_config.yaml`, `tokenizer.json`.

Their code has its ids and their order built in (`inference.py`, `utils/snac_utils.py`), so the layout is the preset
`mini-omni` and nothing else. The encoder is a separate Whisper: `small.pt` beside the weights (as in mini-omni2), or a
file that is named.

Theirs (a copy of litgpt) join tensors that are separate here: queries, keys and values of a block in one matrix, grouped by
key/value head; text and audio ids in one table and in one head. One table, `pieces`, lists the rows of ours that make each
tensor of theirs; reading and writing both follow it, so that they are inverse to each other.

Sources: gpt-omni/mini-omni @ 26c31d5, `inference.py` (`load_model`), `litgpt/model.py` (`GPT`, `CausalSelfAttention.forward`,
`whisperMLP`), `litgpt/config.py` (the keys of the settings, and what an absent one means); gpt-omni/mini-omni2 @ 6efd5bf,
`litgpt/model.py` (its vision adapter), one setting more.

`.pth` files are written by `torch.save`; their tensors are whole in memory meanwhile, mapped where they are stored as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import yaml

from omni.checkpoint.places import TOKENIZER
from omni.checkpoint.tensors import FileStamp, crc32_of, finite, read_torch, state_of, write_file
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.convert.contract import (
    COMPANIONS,
    WORDS,
    Foreign,
    check_tokenizer,
    kept_files,
    match,
    model_shapes,
    one_dtype,
    read_tokenizer,
    renamed,
    shapes_of,
    whole_model,
    whole_number,
    write_texts,
)
from omni.convert.grow import AUDIO_EMBEDDING, AUDIO_HEAD, fresh
from omni.convert.huggingface import EMBEDDING, HEAD
from omni.convert.lazy import Lazy, Progress, WriteCallback, cast, joined, same
from omni.convert.parts import read_whisper
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError, closest
from omni.files import read_json, replacing_folder
from omni.layout import Layout
from omni.utils.configuration import read_yaml, validate

WEIGHTS, SETTINGS, WHISPER = "lit_model.pth", "model_config.yaml", "small.pt"

VISION = "vision_adapter."
POST = "transformer.post_adapter."


# --- in ---------------------------------------------------------------------------------------------------------------


def recognise(path: Path) -> bool:
    """Whether this is a litgpt folder (`read` says why one is not mini-omni's)."""
    return (path / WEIGHTS).is_file() or (path / SETTINGS).is_file()


def read(
    path: Path, *, encoder: Foreign | WhisperConfig | None = None, tokenizer: Path | None = None, drop_vision: bool = False
) -> Foreign:
    """Reads the whole model of a checkpoint of mini-omni or mini-omni2.

    Where parts have different types, all become the smallest that holds each exactly (a Whisper is float16 on the disk).
    UserError: a setting that our decoder does not have, a tensor that is missing, extra, or does not fit, a pickle that asks
    for more than tensors, another model's tokenizer, or no Whisper.

    Args:
        encoder: a Whisper's weights, or a size whose weights are drawn, instead of the folder's `small.pt`.
        tokenizer: another tokenizer.json than the folder's.
        drop_vision: drop the vision adapter of a mini-omni2; the rest hears and speaks as before.
    """
    settings = read_settings(path / SETTINGS)
    state = state_of(read_torch(path / WEIGHTS), path / WEIGHTS)
    seen = sorted(name for name in state if name.startswith(VISION))
    if seen and not drop_vision:
        raise UserError(
            f"{path / WEIGHTS}: tensor {seen[0]} belongs to a mini-omni2, which sees; there is no place for it here: keep the "
            "speech model alone with --drop_vision"
        )
    if encoder is None and not (path / WHISPER).is_file():
        raise UserError(
            f"{path} has no {WHISPER}, and mini-omni's encoder is Whisper small: give OpenAI's {WHISPER} (or a Hugging Face "
            "folder of it) with --encoder"
        )
    heard = encoder or read_whisper(path / WHISPER)
    size, post = heard.config if isinstance(heard, Foreign) else heard, any(name.startswith(POST) for name in state)
    config = model_config(settings, path / SETTINGS, size, post)
    shapes = their_shapes(config)
    theirs = match(state, {name: name for name in shapes}, shapes, path / WEIGHTS, lambda name: name.startswith(VISION))
    if config.decoder.tie_text and not same(theirs[THEIR_EMBEDDING], theirs[THEIR_HEAD]):
        raise UserError(
            f"{path / WEIGHTS}: tensor {THEIR_HEAD} differs from {THEIR_EMBEDDING}, but {SETTINGS} ties them; set "
            "tie_word_embeddings to false there if the head was trained apart"
        )
    tensors, names = split(theirs, config)
    if isinstance(heard, Foreign):
        tensors |= heard.tensors
        names |= heard.names
    else:
        tensors |= fresh(WhisperEncoder, (heard,), "encoder.", 0, next(iter(tensors.values())).dtype)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    kept = {name: read_json(path / name) for name in COMPANIONS if (path / name).is_file()}
    if kept.get(WORDS, {}).get("add_bos_token"):
        raise UserError(
            f"{path / WORDS}: add_bos_token is true: texts then start with a token that mini-omni's have not; is it another "
            "model's?"
        )
    rows = config.layout.text.size
    words = read_tokenizer(tokenizer or path / TOKENIZER, rows, path, kept, named=tokenizer is not None)
    extra = {"mini-omni": {SETTINGS: settings, **kept}}
    return Foreign("mini-omni", path, config, cast(tensors, dtype), words, names, extra)


# --- out --------------------------------------------------------------------------------------------------------------


def write(source: Foreign, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write a whole model as a folder of mini-omni's, with the encoder as `small.pt`.

    That file is one that openai-whisper loads, with a text decoder of no layers (theirs never runs it); the first mini-omni
    fetches Whisper small itself, so an encoder that was trained further must be handed to it. An alignment head, which only
    training uses, is left out. Returns size and CRC-32 of each file. UserError: the model has a part that mini-omni lacks,
    its types are mixed, or the place cannot be written."""
    config, tokenizer = whole_model(source, "a mini-omni")
    check_fits(config, source.path)
    check_tokenizer(tokenizer, config.layout.text.size, source.path)
    one_dtype(source)
    shapes = our_shapes(config)
    tensors = match(source.tensors, {n: n for n in shapes}, shapes, source.path, lambda name: name not in shapes)
    weights = join(tensors, config)
    kept = kept_files(source, "mini-omni")
    tied = config.decoder.tie_text and not config.decoder.post_layers and same(tensors[AUDIO_EMBEDDING], tensors[AUDIO_HEAD])
    settings = their_settings(config, tied, kept.get(SETTINGS, {}))
    assert isinstance(config.encoder, WhisperConfig)  # `check_fits` refuses others
    dims, whisper = _openai(source, config.encoder)
    total = sum(t.nbytes for t in (*weights.values(), *whisper.values()))
    progress = Progress(total, on_progress)
    with replacing_folder(target, total) as folder:
        files = {WEIGHTS: save_archive(folder / WEIGHTS, weights, progress)}
        files[WHISPER] = save_archive(folder / WHISPER, whisper, progress, lambda s: {"dims": dims, "model_state_dict": s})
        files[SETTINGS] = write_file(folder / SETTINGS, yaml.safe_dump(settings).encode())
        files |= write_texts(folder, tokenizer, {name: kept[name] for name in COMPANIONS if name in kept})
    return files


def _openai(source: Foreign, encoder: WhisperConfig) -> tuple[dict[str, int], dict[str, Lazy]]:
    """`ModelDimensions` of openai-whisper (`whisper/model.py`), and the encoder under its names, with a text decoder of width 1
    and no layers."""
    heard = {"n_mels": encoder.n_mels, "n_audio_ctx": encoder.positions, "n_audio_state": encoder.width}
    heard |= {"n_audio_head": encoder.heads, "n_audio_layer": encoder.layers}
    spoken = {"n_vocab": 1, "n_text_ctx": 1, "n_text_state": 1, "n_text_head": 1, "n_text_layer": 0}
    shapes = shapes_of(lambda: WhisperEncoder(encoder), "encoder.")
    tensors = match(source.tensors, {n: n for n in shapes}, shapes, source.path, lambda name: name not in shapes)
    out = {name.replace("encoder.whisper.", "encoder."): tensor for name, tensor in tensors.items()}
    dtype = next(iter(tensors.values())).dtype
    empty = {"token_embedding.weight": (1, 1), "positional_embedding": (1, 1), "ln.weight": (1,), "ln.bias": (1,)}
    return heard | spoken, out | {f"decoder.{name}": Lazy.filled(shape, dtype) for name, shape in empty.items()}


def save_archive(
    path: Path, tensors: Mapping[str, Lazy], progress: Progress, wrap: Callable[[dict[str, Any]], Any] = lambda state: state
) -> FileStamp:
    """Write `wrap(tensors)` by `torch.save`; `progress` counts as its checksum is computed. OSError: from the file system."""
    whole = {name: tensor().contiguous() for name, tensor in tensors.items()}
    whole = {name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for name, t in whole.items()}
    with path.open("wb") as file:  # of whose errors PyTorch makes no others
        torch.save(wrap(whole), file)
    nonfinite = tuple(name for name, tensor in whole.items() if not finite(tensor))
    return FileStamp(path.stat().st_size, crc32_of(path, progress.add), nonfinite)


THEIR_EMBEDDING, THEIR_HEAD = "transformer.wte.weight", "lm_head.weight"
THEIR_AUDIO_HEAD = "transformer.post_adapter_audio_lm_head.weight"

TABLES = (EMBEDDING, AUDIO_EMBEDDING, HEAD, AUDIO_HEAD)

Piece = tuple[str | None, int]
"""Name of one of our tensors and the number of its next rows; None for rows that theirs has and never reads."""


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """The pieces of ours that make each tensor of theirs, from the first row to the last. A joined tensor has the name that the
    table gives its first part."""
    shapes = our_shapes(config)
    decoder = config.decoder
    size, group = decoder.head_size, decoder.heads // decoder.kv_heads
    out: dict[str, list[Piece]] = {}
    for name, shape in shapes.items():
        if name in TABLES or ".attention.k." in name or ".attention.v." in name:
            continue
        if ".attention.q." in name:
            key, value = name.replace(".q.", ".k."), name.replace(".q.", ".v.")
            out[renamed(name, _RENAMED)] = [(name, group * size), (key, size), (value, size)] * decoder.kv_heads
        else:
            out[renamed(name, _RENAMED)] = [(name, shape[0])]
    text, audio = shapes[EMBEDDING][0], shapes[AUDIO_EMBEDDING][0]
    out[THEIR_EMBEDDING] = [(EMBEDDING, text), (AUDIO_EMBEDDING, audio)]
    head = EMBEDDING if decoder.tie_text else HEAD
    if decoder.post_layers:
        out[THEIR_HEAD] = [(head, text), (None, audio)]
        out[THEIR_AUDIO_HEAD] = [(AUDIO_HEAD, audio)]
    else:
        out[THEIR_HEAD] = [(head, text), (AUDIO_HEAD, audio)]
    return out


def their_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of their tensors."""
    shapes = our_shapes(config)
    return {theirs: (sum(rows for _, rows in made), *shapes[str(made[0][0])][1:]) for theirs, made in pieces(config).items()}


def split(tensors: Mapping[str, Lazy], config: ModelConfig) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Split their tensors into decoder and projector under our names; also returns the names of the tensors they come from.
    `tensors`: of the shapes that `their_shapes` asks for."""
    parts: dict[str, list[Lazy]] = {}
    names: dict[str, str] = {}
    for theirs, made in pieces(config).items():
        start = 0
        for name, rows in made:
            if name is not None and names.setdefault(name, theirs) == theirs:  # a tied head comes from the embedding
                parts.setdefault(name, []).append(tensors[theirs].rows(start, start + rows))
            start += rows
    return {name: joined(part) for name, part in parts.items()}, names


def join(tensors: Mapping[str, Lazy], config: ModelConfig) -> dict[str, Lazy]:
    """Join our tensors to theirs; rows that theirs never reads are zero."""
    out = {}
    for theirs, made in pieces(config).items():
        width, dtype = tensors[str(made[0][0])].shape[1:], tensors[str(made[0][0])].dtype
        done: dict[str, int] = {}
        parts = []
        for name, rows in made:
            if name is None:
                parts.append(Lazy.filled((rows, *width), dtype))
                continue
            start = done.get(name, 0)
            parts.append(tensors[name].rows(start, start + rows))
            done[name] = start + rows
        out[theirs] = joined(parts)
    return out


def our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the part of our model that their file holds: decoder and projector."""
    return {name: shape for name, shape in model_shapes(config).items() if name.startswith(("decoder.", "projector."))}


_RENAMED = (
    ("decoder.norm.", "transformer.ln_f."),
    ("decoder.post_norm.", "transformer.post_adapter_audio_ln."),
    ("decoder.blocks.", "transformer.h."),
    ("decoder.post_blocks.", "transformer.post_adapter."),
    (".attention_norm.", ".norm_1."),
    (".mlp_norm.", ".norm_2."),
    (".attention.q.", ".attn.attn."),
    (".attention.out.", ".attn.proj."),
    ("projector.project.", "whisper_adapter."),
    (".gate.", ".fc_1."),
    (".up.", ".fc_2."),
    (".down.", ".proj."),
)


# --- settings ---------------------------------------------------------------------------------------------------------

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

_KEYS = {
    "width": "n_embd", "layers": "n_layer", "heads": "n_head", "kv_heads": "n_query_groups", "mlp_width": "intermediate_size",
    "context": "block_size", "rope_base": "rope_base", "norm_eps": "norm_eps", "qkv_bias": "add_qkv_bias",
    "tie_text": "tie_word_embeddings",
}  # fmt: skip
"""Their settings of what our decoder's configuration says."""


def read_settings(path: Path) -> dict[str, Any]:
    """Reads their `model_config.yaml`, with their defaults for absent keys; UserError where it is none or a key is unknown."""
    data = read_yaml(path, "settings")
    if not data:
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
    usual = {"n_query_groups": heads, "intermediate_size": hidden, "add_qkv_bias": False}
    known = {**settings, **{key: value for key, value in usual.items() if settings[key] is None}}
    data = {ours: known[theirs] for ours, theirs in _KEYS.items()}
    data["head_dim"] = 0 if head * heads == width else head
    data["post_layers"] = settings["post_adapter_layers"] if settings["post_adapter"] and post else 0
    decoder = validate(DecoderConfig, data, lambda key: f"{where}: {_KEYS.get(key, key)}: ")
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
        **{theirs: asdict(decoder)[ours] for ours, theirs in _KEYS.items()},
        "vocab_size": _ROWS,
        "padded_vocab_size": _ROWS,
        "head_size": decoder.head_size,
        "rope_base": int(base) if base.is_integer() else base,
        "tie_word_embeddings": tied,
        "whisper_adapter_dim": config.encoder.width,
        "asr_adapter": "llamamlp" if config.projector.kind == "gated" else "mlp",
        "post_adapter": decoder.post_layers > 0,
        "post_adapter_layers": decoder.post_layers or _ABSENT["post_adapter_layers"],
    }
