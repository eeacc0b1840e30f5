"""The decoder against transformers' Qwen2, Qwen3, Llama 3 and Mistral: same weights, same logits and gradients."""

from __future__ import annotations

import pytest
import torch
import transformers

from omni.config import DecoderConfig, RopeScaling
from omni.layout import Layout
from omni.model.decoder import Decoder
from tests.close import assert_near

TEXT = 40
LAYOUT = Layout.build([6, 6], TEXT - 5, specials=5)


def rope(theta: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": theta} | more


def families():
    common = dict(
        vocab_size=TEXT, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    ours = dict(width=32, layers=3, heads=4, kv_heads=2, mlp_width=48, norm_eps=1e-6, combine="sum")
    qwen2 = transformers.Qwen2Config(**common, rope_parameters=rope(1e6))
    yield "qwen2", qwen2, DecoderConfig(**ours, qkv_bias=True, rope_base=1e6)
    qwen3 = transformers.Qwen3Config(**common, head_dim=16, rope_parameters=rope(1e6))
    yield "qwen3", qwen3, DecoderConfig(**ours, head_dim=16, qk_norm=True, rope_base=1e6)
    stretched = rope(
        5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    )
    llama3 = transformers.LlamaConfig(**common, rope_parameters=stretched)
    yield "llama3", llama3, DecoderConfig(**ours, rope_base=5e5, rope_scaling=RopeScaling(factor=8.0, original_context=16))
    mistral = transformers.MistralConfig(**common, sliding_window=5, rope_parameters=rope(1e4))
    yield "mistral", mistral, DecoderConfig(**ours, window=5)


FAMILIES = {name: (theirs, ours) for name, theirs, ours in families()}


def names(ours: str) -> str:
    """Our parameter's name in a transformers model."""
    for a, b in [
        ("text_embedding.", "model.embed_tokens."), ("text_head.", "lm_head."), ("blocks.", "model.layers."),
        ("attention_norm.", "input_layernorm."), ("mlp_norm.", "post_attention_layernorm."),
        ("attention.out.", "self_attn.o_proj."), ("attention.q_norm", "self_attn.q_norm"),
        ("attention.k_norm", "self_attn.k_norm"), ("mlp.gate.", "mlp.gate_proj."), ("mlp.up.", "mlp.up_proj."),
        ("mlp.down.", "mlp.down_proj."),
    ]:  # fmt: skip
        ours = ours.replace(a, b)
    for x in "qkv":
        ours = ours.replace(f"attention.{x}.", f"self_attn.{x}_proj.")
    return ours.replace("norm.weight", "model.norm.weight") if ours == "norm.weight" else ours


@pytest.mark.parametrize("family", FAMILIES)
def test_text_logits_and_gradients_equal_transformers(family):
    torch.manual_seed(0)
    theirs_config, ours_config = FAMILIES[family]
    theirs = transformers.AutoModelForCausalLM.from_config(theirs_config).float()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    ours = Decoder(ours_config, LAYOUT)
    with torch.no_grad():
        ours.audio_embedding.weight.zero_()  # then the sum over streams is the text's embedding alone
    table = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if "audio" not in name:
            p.data.copy_(table[names(name)].data)
    text = torch.randint(TEXT, (2, 24))
    tokens = torch.cat([torch.zeros(2, 2, 24, dtype=torch.long), text[:, None]], 1)
    logits = ours.text_logits(ours(tokens))
    wanted = theirs(text).logits
    assert_near(logits, wanted, 1e-5)
    g = torch.randn_like(logits)
    logits.backward(g)
    wanted.backward(g)
    for name, p in ours.named_parameters():
        if "audio" not in name:
            assert_near(p.grad, table[names(name)].grad, 1e-5, name)
