"""Laws of what a decoder that serves takes on a CPU: the rule, and that products and compiled steps equal the modules'."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from omni import cpu
from omni.checkpoint.folder import save_folder
from omni.checkpoint.places import WEIGHTS
from omni.cpu import compiled, compiled_int8, product, takes_bf16, use_fast
from omni.cpu.int8 import to_int8
from omni.cpu.step import step_shape
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.train.data.toys import MODELS


@pytest.fixture
def model() -> Iterator[SpeechModel]:
    torch.manual_seed(0)
    yield SpeechModel(MODELS["codec2"]).eval()


def answers(model: SpeechModel, rows: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randint(0, s.size, (rows, 1), generator=generator) for s in model.layout.streams], 1)
    return model.decoder.logits(model.decoder(tokens))


@pytest.fixture(params=["AMD EPYC", "Intel Xeon"])
def weight_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of products that have the weight first."""
    calls: list[int] = []
    real = torch.mm
    features = {"architecture": "x86_64", "cpu_name": request.param}
    monkeypatch.setattr(cpu, "cpu_features", lambda: features)
    monkeypatch.setattr(torch, "mm", lambda weight, rows: calls.append(rows.shape[1]) or real(weight, rows))
    cpu.weight_first.cache_clear()
    yield calls
    cpu.weight_first.cache_clear()


def test_few_rows_have_the_weight_first_where_mkl_is_slow(weight_first: list[int], model: SpeechModel) -> None:
    """In float32, for inference, without anything beside a linear, and alike to rounding."""
    amd = cpu.weight_first()
    for count in (1, 2, 3, 8, 9):
        x, weight, bias = (torch.randn(*shape) for shape in ((count, 300), (70, 300), (70,)))
        weight_first.clear()
        with torch.no_grad():
            found = product(True, x, weight, bias)
        assert found.is_contiguous() and weight_first == ([max(count, 2)] if amd and count < 9 else [])
        torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=1e-4, atol=1e-5)
    wanted = answers(model, 3)
    use_fast(model)
    weight_first.clear()
    sum(out.sum() for out in answers(model)).backward()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        answers(model)
    assert not weight_first and all(p.grad is not None for p in model.decoder.blocks.parameters())
    with torch.no_grad():
        for one in (model, copy.deepcopy(model)):
            torch.testing.assert_close(answers(one, 3), wanted, rtol=1e-4, atol=1e-5)
        count = len(weight_first)
        assert (count > 0) is amd
        model.decoder.blocks[1].mlp.down.register_forward_hook(lambda module, given, out: out)
        weight_first.clear()
        answers(model)
        assert len(weight_first) == max(count // 2 - 1, 0)
        weight_first.clear()
        use_fast(model, False)
        answers(model)
        assert not weight_first


@pytest.mark.parametrize(("amx", "width", "takes"), [(True, 1200, True), (True, 32, False), (False, 1200, False)])
def test_amx_takes_a_large_float32_model_as_bfloat16(
    amx: bool, width: int, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: {"amx_bf16": amx})
    model = nn.Sequential(nn.Linear(width, width))
    assert takes_bf16(model) is takes and not takes_bf16(model.to(torch.bfloat16))


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, norms": {"qkv_bias": True, "qk_norm": True, "kv_heads": 4},
    "heads of 32": {"width": 64, "heads": 2, "kv_heads": 1},
    "window": {"window": 4},
    "short window": {"window": 4, "context": 6},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of what is compiled."""
    made: list[str] = []
    for module, name in ((compiled, "blocks"), (compiled_int8, "write_heads")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, n=name, real=real: made.append(n) or real(*given))
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", ["float32", "int8"])
@pytest.mark.parametrize("shape", STEPS)
def test_a_compiled_step_is_the_modules(shape: str, numbers: str, calls: list[str]) -> None:
    """Of one row, few and many, of different lengths, beside rows that rest, and gathered; the same in any company."""
    torch.manual_seed(0)
    decoder = replace(MODELS["codec2"].decoder, **{"width": 32, "heads": 4, "kv_heads": 2, **STEPS[shape]})
    model: Any = SpeechModel(replace(MODELS["codec2"], decoder=decoder)).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model = to_int8(model) if numbers == "int8" else model
    tokens = torch.stack([torch.randint(0, s.size, (9, 7)) for s in model.layout.streams], 1)
    lengths = torch.tensor([6, 3, 5, 6, 4, 2, 6, 1, 6]) if shape != "short window" else torch.full((9,), 4)

    def answers() -> list[Tensor]:
        found = []
        for rows in (range(9), [2], range(3), [0, 4, 8], [1, 2, 5, 4, 6]):
            cache = model.make_cache(9, 12, chunk=6)
            with torch.inference_mode():
                fed = torch.arange(6).expand(9, 6)
                model(tokens[:, :, :6], input_pos=torch.where(fed < lengths[:, None], fed, -1), cache=cache)
                where = lengths[list(rows), None].clone()
                where[3:4] = -1
                hidden = model(tokens[list(rows), :, 6:7], input_pos=where, cache=cache.select(rows))
                found.append(hidden.text[where[:, 0] >= 0].flatten(1))
        return found

    modules = answers()
    assert not calls
    use_fast(model)
    ours = answers()
    assert calls == (["blocks"] * 5 if numbers == "float32" else ["write_heads"] * 5 * decoder.layers)
    for found, wanted in zip(ours, modules, strict=True):
        if numbers == "float32":
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        else:  # rounding differs where a number lies between two
            assert float((found - wanted).norm() / wanted.norm()) < 0.02
    near = {"rtol": 1e-5, "atol": 1e-6} if numbers == "float32" else {"rtol": 0, "atol": 0}
    for alone, rows in zip(ours[1:], ([2], slice(3), [0, 3, 7], [1, 2, 4, 5]), strict=True):
        torch.testing.assert_close(ours[0][rows], alone, **near)


def test_a_compiled_step_tells_what_is_not_finite(calls: list[str]) -> None:
    """Of the row that has it, and of no other."""
    for quantize in (False, True):
        torch.manual_seed(0)
        model: Any = SpeechModel(MODELS["codec2"]).eval()
        model.decoder.text_embedding.weight.data[3] = float("nan")
        model.decoder.text_embedding.weight.data[4] = float("inf")
        if quantize:
            tables = model.decoder.text_embedding.weight.data.clone()
            model.decoder.text_embedding.weight.data.nan_to_num_(posinf=0.0)
            to_int8(model)
            model.decoder.text_embedding = torch.nn.Embedding.from_pretrained(tables)
        use_fast(model)
        tokens = torch.zeros(3, len(model.layout), 1, dtype=torch.long)
        tokens[:, -1, 0] = torch.tensor([1, 3, 4])
        with torch.inference_mode():
            hidden = model(tokens, input_pos=torch.zeros(3, 1, dtype=torch.long), cache=model.make_cache(3, 9))
        assert calls and hidden.text.isfinite().all(-1).flatten().tolist() == [True, False, False]


def test_a_compiled_step_leaves_weights_their_own(calls: list[str], tmp_path: Path) -> None:
    """They are saved, copied, trained and changed as before, and what acts beside a part still acts."""
    torch.manual_seed(0)
    decoder = replace(MODELS["codec2"].decoder, width=32, heads=4, kv_heads=2, qkv_bias=True)
    config = replace(MODELS["codec2"], decoder=decoder)
    model = SpeechModel(config).eval()
    before = copy.deepcopy(model.state_dict())
    tokens = torch.stack([torch.randint(0, s.size, (5, 7)) for s in model.layout.streams], 1)
    attention = model.decoder.blocks[0].attention

    def steps(one: SpeechModel) -> list[Tensor]:
        cache = one.make_cache(5, 9, chunk=6)
        calls.clear()
        with torch.inference_mode():
            one(tokens[:, :, :6], input_pos=torch.arange(6).expand(5, 6), cache=cache)
            hidden = one(tokens[:, :, 6:], input_pos=torch.full((5, 1), 6), cache=cache)
        return [hidden.text, hidden.audio]

    def same(one: SpeechModel, wanted: list[Tensor], number: int = 1) -> None:
        torch.testing.assert_close(steps(one), wanted, rtol=1e-4, atol=1e-5)
        assert len(calls) == number

    wanted = steps(model)
    assert not calls
    for fast in (False, True):
        use_fast(model, fast)
        for one in (model, copy.deepcopy(model)):
            same(one, wanted, int(fast))
            assert attention.q.weight.is_leaf and attention.q.weight.requires_grad and not attention.q.weight.is_inference()
            assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())
    save_folder(tmp_path / "saved", config, model.state_dict(), Tokenizer.bytes())
    saved = load_file(tmp_path / "saved" / WEIGHTS)
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    sum(out.sum() for out in answers(model)).backward()
    with torch.no_grad():
        attention.k.weight -= attention.k.weight.grad  # in place, as an optimizer does
        attention.k.bias += 1
        model.decoder.blocks[1].attention_norm.weight.mul_(2)
        model.decoder.blocks[1].mlp.gate.weight.data.mul_(2)  # past autograd
        model.decoder.blocks[1].attention.v.weight.data = torch.randn_like(attention.v.weight)
    other = SpeechModel(config).eval()
    other.load_state_dict(model.state_dict())
    same(model, steps(other))
    handle = attention.v.register_forward_hook(lambda module, given, out: out)
    same(model, steps(other), decoder.layers - 1)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert steps(model)[0].isfinite().all() and not calls
    cache = model.make_cache(5, 9)
    with pytest.raises(RuntimeError, match="in place while autograd records"):
        model(tokens[:, :, :1], input_pos=torch.zeros(5, 1, dtype=torch.long), cache=cache)
    assert not cache.keys[0].any()


def test_blocks_of_other_linears_are_not_compiled(model: SpeechModel) -> None:
    """Such as linears in 4 bits, and large ones in float32."""

    class Other(nn.Linear):
        pass

    block: Any = model.decoder.blocks[0]
    assert step_shape(block) is not None
    block.mlp.up.__class__ = Other
    assert step_shape(block) is None
    block.mlp.up = nn.Linear(1 << 10, 1 << 11, bias=False)
    assert step_shape(block) is None
