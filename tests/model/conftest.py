from __future__ import annotations

import pytest
import torch

from omni.config import DecoderConfig, RopeScaling
from omni.layout import Layout
from omni.model.decoder import Decoder

SHAPES = {
    "plain": DecoderConfig(width=32, layers=2, heads=4, kv_heads=4, mlp_width=48, context=64),
    "qwen2": DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, qkv_bias=True, rope_base=1e6, post_layers=1),
    "qwen3": DecoderConfig(width=32, layers=2, heads=4, kv_heads=1, head_dim=16, mlp_width=48, qk_norm=True, tie_text=True),
    "llama3": DecoderConfig(
        width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, rope_base=5e5, combine="sum",
        rope_scaling=RopeScaling(factor=8.0, original_context=16),
    ),
    "mistral": DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, window=5),
}  # fmt: skip
LAYOUTS = {
    "codec2": Layout.build([12, 12, 6, 8], 20, specials=8),
    "mini-omni": Layout.build([16] * 7, 24, specials=5, fill="sampled", features="add"),
}


@pytest.fixture(params=SHAPES)
def shape(request) -> DecoderConfig:
    return SHAPES[request.param]


@pytest.fixture(params=LAYOUTS)
def layout(request) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture
def decoder(shape, layout) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(shape, layout)
    with torch.no_grad():  # larger than the usual start, so that a wrong mask or position shows in the output
        for p in decoder.parameters():
            p.normal_(std=0.3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.1)
    return decoder


def random_tokens(layout: Layout, batch: int, time: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(s.vocabulary, (batch, time), generator=g) for s in layout.streams], dim=1)
