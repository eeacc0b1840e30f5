"""mini-omni: models that it cannot be, weights and settings that misfit, broken files, and writes that fail are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.config import DecoderConfig, ModelConfig, ProjectorConfig, RopeScaling
from omni.convert import mini_omni
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.layout import Layout
from tests.convert.mini_omni_toys import EAR, TEXT, State, save, settings_of, state_of

SMALL = ModelConfig(
    Layout.preset("mini-omni"),
    WhisperConfig(width=EAR, heads=1, layers=1, mode="padded"),
    ProjectorConfig("gated", hidden=12, bias=False),
    DecoderConfig(width=8, layers=1, mlp_width=12),
    "snac",
)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("", {"codec": "mimi"}, "codec is 'mimi'"),
        ("", {"layout": dataclasses.replace(Layout.preset("mini-omni"), fill="pad")}, "layout.fill is 'pad'"),
        ("decoder", {"qk_norm": True}, "decoder.qk_norm is True"),
        ("decoder", {"combine": "sum"}, "decoder.combine is 'sum'"),
        ("decoder", {"rope_scaling": RopeScaling()}, "decoder.rope_scaling"),
        ("projector", {"bias": True}, "projector.bias is True"),
        ("encoder", {"mode": "variable"}, "encoder.mode is 'variable'"),
    ],
)
def test_models_that_mini_omni_cannot_be(part: str, change: dict[str, Any], message: str) -> None:
    mini_omni.check_fits(SMALL, "here")
    config: Any = dataclasses.replace(getattr(SMALL, part) if part else SMALL, **change)
    if part:
        config = dataclasses.replace(SMALL, **{part: config})
    with pytest.raises(UserError, match=f"here: the .*{message}.*mini-omni has .* only"):
        mini_omni.check_fits(config, "here")


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[State], object]:
    return lambda state: state.update({name: tensor})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("transformer.h.1.norm_2.weight"), "tensor transformer.h.1.norm_2.weight is missing"),
        (with_tensor("transformer.h.2.norm_1.weight", torch.ones(8)), r"transformer.h.2.norm_1.weight \[8\] has no place"),
        (with_tensor("transformer.wte.weight", torch.zeros(TEXT, 8)), r"wte.weight has shape \[152000, 8\].*\[181120, 8\]"),
        (
            with_tensor("transformer.h.0.attn.attn.weight", torch.zeros(24, 8)),
            r"attn.attn.weight has shape \[24, 8\].*\[16, 8\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Callable[[State], object], message: str, tmp_path: Path) -> None:
    settings = settings_of("released")
    state = state_of(settings)
    change(state)
    with pytest.raises(UserError, match=message):
        mini_omni.read(save(tmp_path / "a", settings, state))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_percentage": 0.25}, "rotary_percentage is 0.25; only 1.0"),
        ({"text_vocab_size": 128256}, "text_vocab_size is 128256; only 152000"),
        ({"padded_vocab_size": 152000}, "the joint table has 152000 rows"),
        ({"asr_adapter": "lamamlp"}, "asr_adapter 'lamamlp' is unknown; did you mean 'llamamlp'"),
        ({"name": "Gemma-2b"}, "the norms of Gemma"),
        ({"whisper_adapter_dim": 768}, r"width 768 \(whisper_adapter_dim\), and the one given is 6 wide"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from transformer.wte.weight"),
    ],
)
def test_settings_that_do_not_fit_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = settings_of("released")
    with pytest.raises(UserError, match=message):
        mini_omni.read(save(tmp_path / "a", settings | change, state_of(settings)))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings, state_of(settings))
    whole = (folder / "lit_model.pth").read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            mini_omni.read(folder)

    torch.save({"model": state_of(settings)}, folder / "lit_model.pth")
    refused("lit_model.pth holds a dict, not a mapping of names to tensors")
    (folder / "lit_model.pth").write_bytes(whole[:-1000])
    refused("lit_model.pth is truncated")
    (folder / "lit_model.pth").unlink()
    refused("lit_model.pth is missing")
    (folder / "lit_model.pth").write_bytes(whole)
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    refused("add_bos_token is true")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    refused("tokenizer.json is missing.*--tokenizer")
    for text in ("a: [", "", "- 1"):
        (folder / "model_config.yaml").write_text(text)
        refused("model_config.yaml (cannot be read|holds no settings|holds list; it must be a mapping)")
    (folder / "model_config.yaml").unlink()
    refused("model_config.yaml cannot be read .*No such file")


@pytest.mark.long
def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path) -> None:
    settings = settings_of("released")
    source = mini_omni.read(save(tmp_path / "a", settings, state_of(settings)))
    tensors = dict(source.tensors)
    name = "decoder.blocks.1.mlp.up.weight"
    cut = dataclasses.replace(source, tensors={n: t for n, t in tensors.items() if n != name})
    with pytest.raises(UserError, match=f"tensor {name} is missing"):
        mini_omni.write(cut, tmp_path / "out")
    mixed = dataclasses.replace(source, tensors=tensors | {name: tensors[name].to(torch.bfloat16)})
    with pytest.raises(UserError, match=r"tensor transformer.h.1.mlp.fc_2.weight is bfloat16 and most others are float32"):
        mini_omni.write(mixed, tmp_path / "out")

    def fail(start: int, stop: int) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    full = mini_omni.Lazy((12, 8), torch.float32, fail)
    with pytest.raises(UserError, match="cannot be written"):
        mini_omni.write(dataclasses.replace(source, tensors=tensors | {name: full}), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
