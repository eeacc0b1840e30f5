"""Checkpoints with random weights, made by the classes of a mini-omni checkout and saved as its own are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import whisper
import yaml
from whisper.model import ModelDimensions, Whisper

from omni.layout import Layout
from omni.text import Tokenizer
from tests.parity.checkout import Checkout, quiet

ROWS = sum(stream.vocabulary for stream in Layout.preset("mini-omni").streams)

COMMON = {
    "name": "parity", "padded_vocab_size": ROWS, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
    "norm_class_name": "RMSNorm", "norm_eps": 1e-6, "mlp_class_name": "LLaMAMLP", "rope_base": 1000000,
}  # fmt: skip
SMALL = {"block_size": 512, "n_layer": 3, "n_head": 4, "n_embd": 32, "intermediate_size": 48}
SIZES: dict[str, dict[str, Any]] = {
    "released": {**SMALL, "n_query_groups": 2, "add_qkv_bias": True},
    "post": {**SMALL, "n_query_groups": 4, "add_qkv_bias": False, "post_adapter": True, "post_adapter_layers": 2},
    "linear": {**SMALL, "n_query_groups": 1, "add_qkv_bias": True, "head_size": 16, "asr_adapter": "mlp"},
}
FULL = {
    "block_size": 2048, "n_layer": 24, "n_head": 14, "n_query_groups": 2, "n_embd": 896, "intermediate_size": 4864,
    "add_qkv_bias": True,
}  # fmt: skip
WHISPERS = {
    "small": ModelDimensions(80, 1500, 32, 4, 2, 10, 10, 8, 1, 1),
    "full": ModelDimensions(80, 1500, 768, 12, 12, 10, 10, 8, 1, 1),
}


def make_checkpoint(checkout: Checkout, folder: Path, settings: dict[str, Any], ear: Path | None, full: bool) -> dict[str, Any]:
    """Save random weights of the checkout's own classes as `lit_model.pth`, a Whisper and a tokenizer beside them."""
    folder.mkdir()
    torch.manual_seed(0)
    if ear is None:
        dims = WHISPERS["full" if full else "small"]
        model = Whisper(dims)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1) if p.ndim == 1 else None
        torch.nn.init.normal_(model.encoder.positional_embedding, std=0.3)
        torch.save({"dims": dataclasses.asdict(dims), "model_state_dict": model.state_dict()}, folder / "small.pt")
    else:
        (folder / "small.pt").write_bytes(ear.read_bytes())
    width = whisper.load_model(str(folder / "small.pt"), "cpu").dims.n_audio_state
    settings = {**COMMON, **settings, "whisper_adapter_dim": width}
    (folder / "model_config.yaml").write_text(yaml.safe_dump(settings))
    Tokenizer.bytes().save(folder / "tokenizer.json")
    with quiet():
        gpt = checkout.model.GPT(checkout.config.Config.from_file(folder / "model_config.yaml"))
    with torch.no_grad():
        for name, p in gpt.named_parameters():
            if p.ndim == 1:  # norms and biases: away from one and zero
                p.add_(torch.randn_like(p) * 0.2)
            elif "lm_head" not in name and ".proj." not in name:
                p.mul_(3.0)  # sharp attention: as PyTorch draws them, answers soon repeat one column
    torch.save(gpt.state_dict(), folder / "lit_model.pth")
    return settings
