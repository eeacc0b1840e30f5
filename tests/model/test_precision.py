"""Precision: rotary frequencies are exact in a model of any format, and attention is the same by every way."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning_fabric import Fabric

from omni.checkpoint.folder import load_folder, save_folder
from omni.config import DecoderConfig
from omni.layout import Layout
from omni.model.blocks import rope_frequencies
from omni.model.decoder import Decoder
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
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


def test_a_folder_is_read_in_another_format(tmp_path) -> None:
    save_folder(tmp_path / "m", TINY, SpeechModel(TINY).state_dict(), Tokenizer.bytes())
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
