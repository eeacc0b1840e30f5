"""Splits the tensors of mini-omni's checkpoints (its copy of litgpt) into ours, and joins them again.

Theirs join tensors that are separate here: queries, keys and values of a block in one matrix, grouped by key/value head; text
and audio ids in one table and in one head. One table, `pieces`, lists the rows of ours that make each tensor of theirs; reading
and writing both follow it, so that they are inverse to each other.

Source: gpt-omni/mini-omni @ 26c31d5, `litgpt/model.py` (`GPT`, `CausalSelfAttention.forward`, `whisperMLP`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from omni.config import ModelConfig
from omni.convert.lazy import Lazy, joined
from omni.model.speech_model import SpeechModel

EMBEDDING, AUDIO_EMBEDDING = "decoder.text_embedding.weight", "decoder.audio_embedding.weight"
HEAD, AUDIO_HEAD = "decoder.text_head.weight", "decoder.audio_head.weight"

THEIR_EMBEDDING, THEIR_HEAD = "transformer.wte.weight", "lm_head.weight"
THEIR_AUDIO_HEAD = "transformer.post_adapter_audio_lm_head.weight"

TABLES = (EMBEDDING, AUDIO_EMBEDDING, HEAD, AUDIO_HEAD)

Piece = tuple[str | None, int]
"""Name of one of our tensors and the number of its next rows; None for rows that theirs has and never reads."""


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """The pieces of ours that make each tensor of theirs, from the first row to the last."""
    shapes = our_shapes(config)
    decoder = config.decoder
    size, group = decoder.head_size, decoder.heads // decoder.kv_heads
    out: dict[str, list[Piece]] = {}
    for name, shape in shapes.items():
        if name in TABLES or ".attention.k." in name or ".attention.v." in name:
            continue
        if ".attention.q." in name:
            key, value = name.replace(".q.", ".k."), name.replace(".q.", ".v.")
            out[their_name(name)] = [(name, group * size), (key, size), (value, size)] * decoder.kv_heads
        else:
            out[their_name(name)] = [(name, shape[0])]
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


def split(found: Mapping[str, Lazy], config: ModelConfig) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Split their tensors into decoder and projector under our names; also returns the names of the tensors they come from.

    Args:
        found: tensors of the shapes that `their_shapes` asks for.
    """
    parts: dict[str, list[Lazy]] = {}
    names: dict[str, str] = {}
    for theirs, made in pieces(config).items():
        start = 0
        for name, rows in made:
            if name is not None and names.setdefault(name, theirs) == theirs:  # a tied head comes from the embedding
                parts.setdefault(name, []).append(found[theirs].rows(start, start + rows))
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
    with torch.device("meta"):
        state = SpeechModel(config).state_dict()
    return {name: tuple(t.shape) for name, t in state.items() if name.startswith(("decoder.", "projector."))}


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


def their_name(ours: str) -> str:
    """The name in their file of a tensor that is not joined with others, or is the first part of the joined one."""
    for a, b in _RENAMED:
        ours = ours.replace(a, b)
    return ours


def same(a: Lazy, b: Lazy, step: int = 1024) -> bool:
    """Whether two tensors of one shape hold the same numbers, read in pieces."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(
        torch.equal(a.read(i, min(i + step, a.length)), b.read(i, min(i + step, a.length))) for i in range(0, a.length, step)
    )
