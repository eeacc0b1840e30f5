"""Settings of Hugging Face configurations: windows as transformers reads them, and values of another type are named."""

from __future__ import annotations

import pytest
import transformers

from omni.convert.huggingface import text_config
from omni.errors import UserError
from tests.convert.test_huggingface import LLAMA3, PUBLISHED

SLIDING = [
    dict(use_sliding_window=True, sliding_window=64),
    dict(use_sliding_window=True, max_window_layers=0),
    dict(use_sliding_window=True, max_window_layers=36),
    dict(use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 36),
    dict(use_sliding_window=True, sliding_window=64, layer_types=["full_attention"] * 36, max_window_layers=0),
    dict(use_sliding_window=True, sliding_window=64, num_hidden_layers=28),
    dict(),
]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("changes", SLIDING, ids=str)
def test_windows_are_those_of_transformers_where_settings_are_left_out(kind, changes):
    base = PUBLISHED["qwen3-0.6b"] | {"model_type": kind, "num_hidden_layers": 36}
    settings = {
        k: v for k, v in base.items() if k not in ("max_window_layers", "sliding_window", "use_sliding_window")
    } | changes
    theirs = transformers.AutoConfig.for_model(**settings)
    slide = theirs.layer_types.count("sliding_attention")
    if 0 < slide < theirs.num_hidden_layers:
        with pytest.raises(UserError, match=rf"some layers have a sliding window and some none \({slide} of"):
            text_config(settings)
    else:
        assert text_config(settings).decoder.window == (theirs.sliding_window if slide else None)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None}, {"sliding_window": 7}, {"max_window_layers": 28}], ids=str)
def test_the_window_of_a_mistral_is_that_of_transformers(changes):
    settings = {key: value for key, value in PUBLISHED["mistral-7b"].items() if key != "sliding_window"} | changes
    assert text_config(settings).decoder.window == transformers.AutoConfig.for_model(**settings).sliding_window


def test_a_llama_has_no_window():
    """transformers' Llama overlooks these settings."""
    asked = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert text_config(PUBLISHED["llama-3.2-1b"] | asked).decoder.window is None


WINDOWED = dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        pytest.param({"rope_theta": 10**400}, "rope_theta is 1000", id="beyond all floats"),
        *[({"rope_parameters": LLAMA3 | {key: "a"}}, f"{key} is 'a'") for key in LLAMA3 if key != "rope_type"],
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary scaling llama3 lacks 'factor'"),
        (WINDOWED | {"use_sliding_window": "false"}, "use_sliding_window is 'false'; it must be true or false"),
        (
            WINDOWED | {"layer_types": []},
            "layer_types is []; it must list full_attention or sliding_attention for each of the 24",
        ),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_named(changes, words):
    with pytest.raises(UserError) as error:
        text_config(PUBLISHED["qwen2-0.5b-omni"] | changes, "there/config.json")
    assert str(error.value).startswith(f"there/config.json: {words}")
