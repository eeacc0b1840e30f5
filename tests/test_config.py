"""Configurations: strict reading, round trips, and the presets' sizes."""

from __future__ import annotations

import json

import pytest
import torch

from omni.config import PRESETS, DecoderConfig, ModelConfig, from_dict, preset, to_dict
from omni.errors import UserError
from omni.model.speech_model import SpeechModel


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    config = preset(name)
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(config)))) == config


# Parameters of the language model alone, from the published configurations (text embedding and head counted once if tied).
TEXT_PARAMETERS = {"qwen3-0.6b": 596_049_920, "llama-3.2-1b": 1_235_814_400, "mistral-7b": 7_241_732_096}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name):
    config = preset(name)
    with torch.device("meta"):
        model = SpeechModel(config)
    text = sum(p.numel() for n, p in model.decoder.named_parameters() if "audio" not in n)
    if name in TEXT_PARAMETERS:
        extra = config.layout.text.vocabulary - config.layout.text.size  # our own special ids
        rows = 1 if config.decoder.tie_text else 2
        assert text - rows * extra * config.decoder.width == TEXT_PARAMETERS[name]
    if name == "qwen2-0.5b-omni":
        joint = config.layout.text.vocabulary + sum(s.vocabulary for s in config.layout.audio)
        assert joint == 181120  # mini-omni's padded joint table
        assert sum(p.numel() for p in model.projector.parameters()) == 2 * 768 * 4864 + 4864 * 896
    if name == "nano":
        assert sum(p.numel() for p in model.parameters()) < 8e6


@pytest.mark.parametrize(
    "data, says",
    [
        ({"decoder": {"layrs": 3}}, "config: unknown key decoder.layrs; did you mean decoder.layers"),
        ({"decoder": {"layers": "few"}}, "config: decoder.layers is 'few'; it must be a whole number"),
        ({"layout": {}}, "config: layout.streams is missing"),
        ({"decoder": {"heads": 3, "kv_heads": 2}}, "decoder.heads 3 is not a multiple"),
        ({"decoder": {"width": 0}}, "decoder.width is 0"),
        ({"codec": "snak"}, r"config.codec: codec 'snak' is unknown; did you mean 'snac'\?"),
        ({"decoder": {"norm_eps": float("nan")}}, "decoder.norm_eps is nan; it must be a finite number"),
        ({"decoder": {"rope_base": -1}}, "decoder.rope_base is -1; it must be greater than or equal to 1"),
        ({"decoder": {"rope_scaling": {"factor": 0}}}, "decoder.rope_scaling.factor is 0; it must be greater than 0"),
        ({"decoder": {"rope_scaling": {"low_freq_factor": 4.0}}}, "high_freq_factor is 4.0; .* above low_freq_factor, 4.0"),
        ({"decoder": {"context": 1 << 40}}, "decoder.context is 1099511627776; it must be less than or equal to 2147483648"),
        ({"encoder": {"window_seconds": float("nan")}}, "encoder: window_seconds is nan"),
    ],
)
def test_reading_is_strict(data, says):
    with pytest.raises(UserError, match=says):
        from_dict(ModelConfig, data)


def test_an_unknown_preset_names_the_closest():
    with pytest.raises(UserError, match="did you mean 'qwen2-0.5b-omni'"):
        preset("qwen2-0.5b-omi")


def test_optional_and_nested_values_are_read():
    config = from_dict(DecoderConfig, {"window": None, "rope_scaling": {"factor": 8}, "norm_eps": 1})
    assert config.window is None and config.rope_scaling is not None and config.rope_scaling.factor == 8.0
