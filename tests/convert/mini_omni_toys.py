"""Small random checkpoints as mini-omni has them: settings, weights under its names, and the Whisper that it hears with."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import yaml
from whisper.model import ModelDimensions, Whisper

from omni.text import Tokenizer
from tests.convert.hub_toys import stirred

TEXT, AUDIO, STREAMS = 152000, 4160, 7
ROWS = TEXT + AUDIO * STREAMS
EAR = 6
"""Width of the Whisper."""

State = dict[str, torch.Tensor]

BASE: dict[str, Any] = {
    "name": "toy", "block_size": 64, "padded_vocab_size": ROWS, "n_layer": 2, "n_head": 4, "n_embd": 8, "n_query_groups": 2,
    "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm", "norm_eps": 1e-6,
    "mlp_class_name": "LLaMAMLP", "intermediate_size": 12, "rope_base": 1000, "add_qkv_bias": True, "whisper_adapter_dim": EAR,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "released": {},
    "post": {"post_adapter": True, "post_adapter_layers": 1, "add_qkv_bias": False, "n_query_groups": 4, "head_size": 4},
    "linear-tied": {"asr_adapter": "mlp", "tie_word_embeddings": True, "n_query_groups": 1, "n_layer": 1},
}


def settings_of(shape: str) -> dict[str, Any]:
    return BASE | SHAPES[shape]


def state_of(settings: dict[str, Any], seed: int = 0) -> State:
    """Random weights under mini-omni's names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.5

    s = settings
    width, hidden, size = s["n_embd"], s["intermediate_size"], s.get("head_size") or s["n_embd"] // s["n_head"]
    out = {"lm_head.weight": draw(ROWS, width), "transformer.wte.weight": draw(ROWS, width)}
    if s.get("tie_word_embeddings"):
        out["lm_head.weight"] = out["transformer.wte.weight"]
    if s.get("asr_adapter") == "mlp":
        out |= {"whisper_adapter.weight": draw(width, EAR), "whisper_adapter.bias": draw(width)}
    else:
        out |= {f"whisper_adapter.fc_{i}.weight": draw(hidden, EAR) for i in (1, 2)}
        out["whisper_adapter.proj.weight"] = draw(width, hidden)
    blocks = [f"transformer.h.{i}" for i in range(s["n_layer"])]
    if s.get("post_adapter"):
        blocks += [f"transformer.post_adapter.{i}" for i in range(s["post_adapter_layers"])]
        out["transformer.post_adapter_audio_ln.weight"] = draw(width)
        out["transformer.post_adapter_audio_lm_head.weight"] = draw(AUDIO * STREAMS, width)
    fused = (s["n_head"] + 2 * s["n_query_groups"]) * size
    for block in blocks:
        out |= {f"{block}.norm_{i}.weight": draw(width) for i in (1, 2)}
        out[f"{block}.attn.attn.weight"] = draw(fused, width)
        if s["add_qkv_bias"]:
            out[f"{block}.attn.attn.bias"] = draw(fused)
        out[f"{block}.attn.proj.weight"] = draw(width, s["n_head"] * size)
        out |= {f"{block}.mlp.fc_{i}.weight": draw(hidden, width) for i in (1, 2)}
        out[f"{block}.mlp.proj.weight"] = draw(width, hidden)
    out["transformer.ln_f.weight"] = draw(width)
    return out


def save(folder: Path, settings: dict[str, Any], state: State, dtype: torch.dtype = torch.float32) -> Path:
    """A folder as the original has it: weights, settings, tokenizer, and a Whisper of OpenAI's."""
    folder.mkdir(parents=True)
    torch.save(state, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "tokenizer.json").write_text(words())
    torch.manual_seed(3)
    dims = ModelDimensions(80, 1500, EAR, 1, 1, 10, 10, 4, 1, 1)
    model = stirred(Whisper(dims).to(dtype))
    torch.save({"dims": dataclasses.asdict(dims), "model_state_dict": model.state_dict()}, folder / "small.pt")
    return folder


@lru_cache(1)
def words() -> str:
    """A tokenizer.json of bytes, and as many tokens that no text has as Qwen2's has others."""
    data = json.loads(Tokenizer.bytes().inner.to_str())
    data["model"]["vocab"] |= {f"unused {i}": i for i in range(256, 151646)}
    return json.dumps(data)
