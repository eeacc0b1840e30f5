"""Fused linears give what they give alone, as they are now, and what is stored does not change."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from omni.checkpoint.folder import load_folder, save_folder
from omni.cpu.int8 import to_int8
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.model import linears as fused
from omni.model.linears import fuse
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, make_model


@pytest.fixture(params=[{}, {"qkv_bias": True, "qk_norm": False}], ids=["norms", "biases"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[SpeechModel, SpeechModel, list[int]]:
    """A fused model, another of the same weights, and the number of rows of each fused product that was taken."""
    model = make_model(LAYOUTS["pad"], **request.param)
    other, taken = copy.deepcopy(model), list[int]()
    real = fused.F.linear

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        taken.append(len(weight))
        return real(x, weight, bias)

    monkeypatch.setattr(fused, "F", type("F", (), {"linear": staticmethod(linear)}))
    assert fuse(model.decoder) == 2 * len(model.decoder.blocks)
    return model, other, taken


def said(model: SpeechModel) -> torch.Tensor:
    """The hidden states of a prefill and a step."""
    tokens = torch.arange(2 * len(model.layout) * 6).view(2, len(model.layout), 6) % 9
    cache = model.make_cache(2, 8)
    with torch.no_grad():
        first = model(tokens[:, :, :5], input_pos=torch.arange(5).expand(2, 5), cache=cache)
        last = model(tokens[:, :, 5:], input_pos=torch.full((2, 1), 5), cache=cache)
    return torch.cat([first.audio, last.audio], dim=1)


def near(one: SpeechModel, other: SpeechModel) -> None:
    torch.testing.assert_close(said(one), said(other), rtol=1e-5, atol=1e-6)


def test_one_product_for_each_group(both: tuple[SpeechModel, SpeechModel, list[int]]) -> None:
    model, other, taken = both
    near(model, other)
    c = model.config.decoder
    assert taken == [(c.heads + 2 * c.kv_heads) * c.head_size, 2 * c.mlp_width] * 2 * c.layers
    taken.clear()
    hidden = model(torch.zeros(1, len(model.layout), 3, dtype=torch.long))  # autograd records
    hidden.audio.sum().backward()
    assert not taken and all(p.grad is not None for p in model.decoder.blocks.parameters())


def test_changes_in_place_and_replaced_weights_are_seen(both: tuple[SpeechModel, SpeechModel, list[int]]) -> None:
    model, other, taken = both
    for each in (model, other):
        with torch.no_grad():
            each.decoder.blocks[0].attention.k.weight.mul_(-2)  # type: ignore[union-attr, operator]
    near(model, other)
    count = len(taken)
    for each in (model, other):
        part: Any = each.decoder.blocks[0]
        part.mlp.up.weight.data = part.mlp.up.weight.data.roll(1, 0)
        part.attention.v = copy.deepcopy(part.attention.v)
    near(model, other)
    assert len(taken) - count == count - 4  # both groups of one block are multiplied alone, in two forwards
    fuse(model.decoder)
    near(model, other)
    assert len(taken) - count == 2 * count - 4
    state = {name: torch.randn_like(p) for name, p in other.state_dict().items()}
    for each in (model, other):
        each.load_state_dict(state)
    near(model, other)
    near(model.to(torch.float64), other.to(torch.float64))
    near(copy.deepcopy(model), other)


def test_what_acts_beside_a_linear_is_heard(both: tuple[SpeechModel, SpeechModel, list[int]]) -> None:
    model, other, _ = both
    for each in (model, other):
        each.decoder.blocks[1].mlp.gate.register_forward_hook(lambda module, given, out: out * 3)  # type: ignore[union-attr, operator]
        add_adapter(each, LoRAConfig(("decoder.blocks.0.*",), rank=2), "x")
        with torch.no_grad():
            for name, p in each.named_parameters():
                if ".lora." in name:
                    p.copy_(torch.arange(p.numel()).view_as(p).sin() * 0.1)
    near(model, other)


def test_what_is_stored_and_quantised_is_as_before(both: tuple[SpeechModel, SpeechModel, list[int]], tmp_path: Path) -> None:
    model, other, _ = both
    config = replace(model.config, codec="codec2", layout=model.layout)
    for name, each in (("fused", model), ("plain", other)):
        save_folder(tmp_path / name, config, each.state_dict(), Tokenizer.bytes())
    assert (tmp_path / "fused/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    near(load_folder(tmp_path / "fused").model, other)
    near(to_int8(model), to_int8(other))


def test_linears_of_other_kinds_stay_as_they_are() -> None:
    class Own(nn.Linear):
        pass

    model = make_model(LAYOUTS["pad"])
    part: Any = model.decoder.blocks[0]
    part.mlp.up = Own(part.mlp.up.in_features, part.mlp.up.out_features, bias=False)
    part.attention.q = nn.Linear(part.attention.q.in_features, part.attention.q.out_features, bias=True)
    assert fuse(model.decoder) == 2 * len(model.decoder.blocks) - 2


@pytest.mark.cuda
def test_a_folder_that_serves_on_a_gpu_is_fused(tmp_path: Path) -> None:
    from omni.generate.speech_lm import SpeechLM

    model = make_model(LAYOUTS["pad"])
    save_folder(tmp_path / "m", replace(model.config, codec="snac"), model.state_dict(), Tokenizer.bytes())
    lm, plain = (SpeechLM.from_pretrained(tmp_path / "m", device="cuda", kernels=way) for way in ("fast", "reference"))
    parts = [sum("fused" in part.__dict__ for part in each.model.modules()) for each in (lm, plain)]
    assert parts == [2 * len(model.decoder.blocks), 0]
    assert lm.generate("a", "T1T2", max_tokens=20).tokens == plain.generate("a", "T1T2", max_tokens=20).tokens
