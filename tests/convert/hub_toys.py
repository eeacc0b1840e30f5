"""Small random models in the originals' own format, written by the originals' own code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from torch import Tensor

from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer

VOCABULARY = 270
"""Rows of the text table: some more than the tokenizer's 256, as published models have."""


def rope(theta: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": theta} | more


def text_configs() -> dict[str, transformers.PretrainedConfig]:
    common = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
        attn_implementation="eager",
    )  # fmt: skip
    stretched = rope(
        5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    )
    q2, q3, llama, mistral = (
        transformers.Qwen2Config, transformers.Qwen3Config, transformers.LlamaConfig, transformers.MistralConfig
    )  # fmt: skip
    return {
        "qwen2": q2(**common, rope_parameters=rope(1e6)),
        "qwen2-tied-windowed": q2(
            **common, rope_parameters=rope(1e6), tie_word_embeddings=True, use_sliding_window=True, sliding_window=6,
            max_window_layers=0,
        ),
        "qwen3-tied": q3(**common, head_dim=16, rope_parameters=rope(1e6), tie_word_embeddings=True),
        "llama": llama(**common, rope_parameters=rope(1e4)),
        "llama3-tied": llama(**common, rope_parameters=stretched, tie_word_embeddings=True),
        "mistral-windowed": mistral(**common, sliding_window=5, rope_parameters=rope(1e4)),
        "mistral": mistral(**common, sliding_window=None, head_dim=12, rope_parameters=rope(1e6)),
    }  # fmt: skip


TEXT = text_configs()


def text_model(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A language model whose every parameter matters."""
    torch.manual_seed(seed)
    return stirred(transformers.AutoModelForCausalLM.from_config(TEXT[family]).float())


def stirred(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


def save_text(model: transformers.PreTrainedModel, folder: Path, shard: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    Tokenizer.bytes().save(folder / "tokenizer.json")
    return folder


def edit_config(folder: Path, **changes) -> None:
    """Change `config.json`; None takes a key out."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def columns(layout: Layout, text: Tensor) -> Tensor:
    """Text ids [B, T] as columns without sound, [B, K, T]."""
    tokens = layout.ids("pad")[None, :, None].repeat(text.shape[0], 1, text.shape[1])
    tokens[:, -1] = text
    return tokens


def text_logits(model: SpeechModel, text: Tensor, **more) -> Tensor:
    """Logits [B, T, VOCABULARY] of the tokens that the language model knew."""
    hidden = model(columns(model.layout, text), **more)
    return model.decoder.text_logits(hidden)[..., :VOCABULARY]
