"""Precision: rotary frequencies are exact in a model of any format, and attention is the same by every way."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric

from omni.checkpoint.folder import load_folder, save_folder
from omni.config import DecoderConfig, ModelConfig
from omni.layout import Layout
from omni.model.blocks import Attention, rope_frequencies, rope_table
from omni.model.decoder import Decoder
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.close import assert_near
from tests.infer.conftest import TINY


def check(decoder: Decoder) -> None:
    wanted = rope_frequencies(decoder.config)
    assert decoder.rope.dtype == torch.float32 and torch.equal(decoder.rope, wanted)
    assert decoder.offsets.dtype == torch.long and decoder.offsets[:, 0].tolist() == list(decoder.audio_offsets[:-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casting_leaves_the_rotary_frequencies_exact(shape: DecoderConfig, layout: Layout, dtype: torch.dtype) -> None:
    decoder = Decoder(shape, layout)
    check(decoder.to(dtype))
    assert decoder.norm.weight.dtype == dtype
    check(copy.deepcopy(decoder))
    check(decoder.float())


def test_moving_to_where_it_is_keeps_the_buffers(shape: DecoderConfig, layout: Layout) -> None:
    """A captured graph reads them at their address."""
    decoder = Decoder(shape, layout)
    rope, offsets = decoder.rope, decoder.offsets
    decoder.to("cpu").float().eval()
    assert decoder.rope is rope and decoder.offsets is offsets


def test_a_model_built_on_the_meta_device_gets_its_buffers(shape: DecoderConfig, layout: Layout) -> None:
    with torch.device("meta"):
        decoder = Decoder(shape, layout)
    assert decoder.to(torch.bfloat16).rope.is_meta
    check(decoder.to_empty(device="cpu"))


@pytest.mark.parametrize("kind", ["codec2", "snac"])
def test_a_folder_is_read_in_another_format(kind: str, tmp_path) -> None:
    config = (
        TINY
        if kind == "codec2"
        else ModelConfig(Layout.build([64] * 7, 300), TINY.encoder, TINY.projector, TINY.decoder, "snac")
    )
    save_folder(tmp_path / "m", config, SpeechModel(config).state_dict(), Tokenizer.bytes())
    model = load_folder(tmp_path / "m", dtype=torch.bfloat16).model
    assert model.decoder.norm.weight.dtype == torch.bfloat16
    check(model.decoder)


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_fabric_s_true_precision(precision) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    with fabric.init_module():
        model = SpeechModel(TINY)
    check(model.decoder)
    check(fabric.setup(model).module.decoder)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("time", [1, 5])
def test_shared_keys_are_spread_over_the_heads_where_a_gpu_would_be_slow(heads, masked, time, monkeypatch) -> None:
    """On CUDA no call asks for both a mask and groups; what is computed is the same."""
    config = DecoderConfig(width=24, heads=heads[0], kv_heads=heads[1], head_dim=8)
    torch.manual_seed(0)
    attention = Attention(config)
    x, rope = torch.randn(2, time, 24), rope_table(rope_frequencies(config), torch.arange(time).expand(2, time))
    mask = torch.zeros(2, 1, time, time).masked_fill(torch.rand(2, 1, time, time) < 0.3, -1e9) if masked else None
    plain, real, asked = attention(x, rope, mask, None, 0), F.scaled_dot_product_attention, []

    def on_cuda(q, k, v, **kwargs):
        asked.append((q.shape[1] == k.shape[1], kwargs))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", on_cuda)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert_near(attention(x, rope, mask, None, 0), plain, 1e-6)
    ((equal, kwargs),) = asked
    assert not (masked and kwargs.get("enable_gqa", False))
    assert equal or not masked
