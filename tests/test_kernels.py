"""Laws of measured kernels: forms are equal, the rule of choice, what is kept, and where `F.linear` stays."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from omni import kernels as kernels_module
from omni.checkpoint.folder import save_folder
from omni.checkpoint.places import WEIGHTS
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.kernels import (
    ATTENDS,
    FORMS,
    REFERENCE,
    ROWS,
    AttentionShape,
    Kernels,
    Product,
    Timing,
    bf16_pays,
    choose,
    keep_kernels,
    kernels_file,
    load_kernels,
    measure_kernels,
    multiply,
    serve_measured,
    step_weights,
    use_kernels,
)
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.train.data.toys import MODELS


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model() -> Iterator[SpeechModel]:
    torch.manual_seed(0)
    yield SpeechModel(MODELS["codec2"]).eval()


def forced(model: SpeechModel, form: str, dtype: str = "float32", seconds: float = 1.0) -> Kernels:
    """Measurements by which every product of a model takes one form."""
    shapes = {tuple(w.shape) for w in step_weights(model)}
    one = Timing(form, seconds, 2.0)
    return Kernels({Product(1, dtype, rows, k, n): one for n, k in shapes for rows in ROWS})


def answers(model: SpeechModel, rows: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randint(0, s.size, (rows, 1), generator=generator) for s in model.layout.streams], 1)
    return model.decoder.logits(model.decoder(tokens))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_are_equal(form: str, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 300, generator=generator).to(dtype) for n in (rows, 70))
    found, wanted = FORMS[form](x, weight), x.double() @ weight.double().T
    assert found.dtype == dtype and found.is_contiguous()
    near = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((found.double() - wanted).norm() / wanted.norm()) < near


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_alike_in_every_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of its products, and in any number of rows; a copy of the model does too."""
    torch.manual_seed(0)
    model = SpeechModel(MODELS[name]).eval()
    calls: list[int] = []
    monkeypatch.setitem(FORMS, "weight first", lambda x, w, real=FORMS["weight first"]: calls.append(len(w)) or real(x, w))
    with torch.no_grad():
        wanted = answers(model, 3)
        use_kernels(model, forced(model, "weight first"))
        for one in (model, copy.deepcopy(model)):
            calls.clear()
            for ours, plain in zip(answers(one, 3), wanted, strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
            assert sorted(calls) == sorted(len(w) for w in step_weights(model))
        calls.clear()
        answers(model, 9)
        assert not calls
        use_kernels(model, None)
        answers(model)
        assert not calls


def test_training_and_hooks_keep_the_linear(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setitem(FORMS, "weight first", lambda x, w, real=FORMS["weight first"]: calls.append(1) or real(x, w))
    use_kernels(model, forced(model, "weight first"))
    sum(out.sum() for out in answers(model)).backward()
    assert not calls and all(p.grad is not None for p in model.decoder.blocks.parameters())
    with torch.no_grad():
        answers(model)
        count = len(calls)
        calls.clear()
        heard: list[int] = []
        model.decoder.audio_head.register_forward_hook(lambda module, given, out: heard.append(1))
        answers(model)
        assert len(calls) == count - 1 and heard == [1]
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            answers(model)
        assert not calls


STEPS: dict[str, dict[str, Any]] = {"plain": {}, "biases, norms": {"qkv_bias": True, "qk_norm": True}, "window": {"window": 4}}


@pytest.mark.parametrize("shape", STEPS)
def test_a_small_block_that_serves_fuses_its_products(shape: str, tmp_path: Path) -> None:
    """Its weights stay its own: they are saved, copied, trained and changed as before."""
    torch.manual_seed(0)
    decoder = replace(MODELS["codec2"].decoder, width=32, heads=4, kv_heads=2, **STEPS[shape])
    config = replace(MODELS["codec2"], decoder=decoder)
    model = SpeechModel(config).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    before, products = copy.deepcopy(model.state_dict()), []
    tokens = torch.stack([torch.randint(0, s.size, (5, 7)) for s in model.layout.streams], 1)
    attention = model.decoder.blocks[0].attention

    def steps(one: SpeechModel) -> list[Tensor]:
        cache, linear = one.make_cache(5, 9, chunk=6), F.linear
        products.clear()
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            one(tokens[:, :, :6], input_pos=torch.arange(6).expand(5, 6), cache=cache)
            patch.setattr(F, "linear", lambda x, w, b=None: products.append(len(w)) or linear(x, w, b))
            hidden = one(tokens[:, :, 6:], input_pos=torch.full((5, 1), 6), cache=cache)
        return [hidden.text, hidden.audio]

    def same(one: SpeechModel, wanted: list[Tensor], fused: bool) -> None:
        torch.testing.assert_close(steps(one), wanted, rtol=1e-4, atol=1e-5)
        assert (max(products) == 2 * decoder.mlp_width) is fused and len(products) == (4 if fused else 7) * decoder.layers

    wanted = steps(model)
    assert len(products) == 7 * decoder.layers
    use_kernels(model, Kernels({}))
    for one in (model, copy.deepcopy(model)):
        same(one, wanted, True)
        assert attention.q.weight.is_leaf and attention.q.weight.requires_grad and not attention.q.weight.is_inference()
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, before[name])
    use_kernels(model, None)
    same(model, wanted, False)
    use_kernels(model, Kernels({}))

    save_folder(tmp_path / "saved", config, model.state_dict(), Tokenizer.bytes())
    saved = load_file(tmp_path / "saved" / WEIGHTS)
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    sum(out.sum() for out in answers(model)).backward()
    with torch.no_grad():
        attention.k.weight -= attention.k.weight.grad  # in place, as an optimizer does
        model.decoder.blocks[1].mlp.gate.weight.data.mul_(2)  # past autograd
        model.decoder.blocks[1].attention.v.weight.data = torch.randn_like(attention.v.weight)
    other = SpeechModel(config).eval()
    other.load_state_dict(model.state_dict())
    same(model, steps(other), True)
    handle = attention.v.register_forward_hook(lambda module, given, out: out)
    steps(model)
    assert len(products) == 4 * decoder.layers + 3
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert steps(model)[0].isfinite().all() and len(products) == 7 * decoder.layers


def test_a_form_must_be_faster_in_every_repeat() -> None:
    linear = [1.0, 1.0, 1.0]
    assert choose({REFERENCE: linear, "weight first": [0.5, 0.86, 0.5]}) == Timing(REFERENCE, 1.0, 1.0)
    assert choose({REFERENCE: linear, "weight first": [0.5, 0.84, 0.6]}) == Timing("weight first", 0.6, 1.0)
    quick = {REFERENCE: linear, "weight first": [0.5, 0.5, 0.5], "linear, 4 rows": [0.4, 0.6, 0.4]}
    assert choose(quick).form == "linear, 4 rows"


def test_measurements_are_kept_and_used(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "multiplies_bf16", lambda kind: True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure_kernels(model, rows=(1, 2))
    shapes = {tuple(w.shape) for w in step_weights(model)}
    kinds = ("float32", "bfloat16")
    assert set(found.measured) == {Product(1, t, rows, k, n) for t in kinds for rows in (1, 2) for n, k in shapes}
    assert all(one.seconds > 0 and one.form in FORMS for one in found.measured.values())
    assert load_kernels().measured == found.measured and model.decoder.kernels is found
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    again = measure_kernels(model, rows=(4,))
    assert set(again.measured) > set(found.measured)


def test_of_another_number_of_threads_nothing_is_used(model: SpeechModel) -> None:
    shapes = {tuple(w.shape) for w in step_weights(model)}
    other = Kernels({Product(2, "float32", 1, k, n): Timing("weight first", 1.0, 2.0) for n, k in shapes})
    assert all(other.form(1, torch.float32, *shape) is None for shape in shapes)
    assert all(forced(model, "weight first").form(1, torch.float32, *shape) is FORMS["weight first"] for shape in shapes)


BROKEN: dict[str, Any] = {
    "no JSON": lambda data: "{",
    "a list": lambda data: "[1]",
    "no products": lambda data: json.dumps({"machine": data["machine"]}),
    "a form of another version": lambda data: json.dumps(data).replace("weight first", "by magic"),
    "no number": lambda data: json.dumps(data).replace("0.25", "NaN"),
    "negative": lambda data: json.dumps(data).replace("0.25", "-1.0"),
    "a string for a number": lambda data: json.dumps(data).replace("0.25", '"fast"'),
    "another number format": lambda data: json.dumps(data).replace("float32", "os.system"),
}


@pytest.mark.parametrize("rows", [2, 9])
def test_a_model_that_serves_still_refuses_to_write_its_cache_while_autograd_records(model: SpeechModel, rows: int) -> None:
    measure_kernels(model)
    tokens = torch.stack([torch.randint(0, s.size, (rows, 1)) for s in model.layout.streams], 1)
    cache = model.make_cache(rows, 9, chunk=4)
    with torch.no_grad():
        model(tokens, input_pos=torch.zeros(rows, 1, dtype=torch.long), cache=cache)  # its weights are fused by now
    before = cache.keys[0].clone()
    with pytest.raises(RuntimeError, match="in place while autograd records"):
        model(tokens, input_pos=torch.ones(rows, 1, dtype=torch.long), cache=cache)
    assert cache.keys[0].equal(before)


def test_blocks_of_other_linears_are_measured_without_attention(model: SpeechModel) -> None:
    """Such as linears in 4 bits, beside heads that are plain."""

    class Other(torch.nn.Linear):
        pass

    for block in model.decoder.blocks:
        for part in block.modules():
            if type(part) is torch.nn.Linear:
                part.__class__ = Other
    kernels = measure_kernels(model)
    assert kernels.measured and not kernels.attention


@pytest.mark.parametrize("form", ATTENDS)
def test_a_step_of_many_rows_attends_in_the_measured_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = SpeechModel(replace(MODELS["codec2"], decoder=replace(MODELS["codec2"].decoder, qk_norm=True))).eval()
    kernels, c = measure_kernels(model), model.config.decoder
    (shape,) = kernels.attention
    assert shape == AttentionShape(1, "float32", c.heads, c.kv_heads, c.head_size) and load_kernels().attention.keys() == {
        shape
    }
    calls: list[int] = []
    monkeypatch.setitem(ATTENDS, form, lambda *given, real=ATTENDS[form]: calls.append(len(given[0])) or real(*given))
    tokens = torch.stack([torch.randint(0, s.size, (9, 5)) for s in model.layout.streams], 1)

    def steps(rows: int) -> Tensor:
        calls.clear()
        cache = model.make_cache(rows, 9, chunk=4)
        with torch.inference_mode():
            model(tokens[:rows, :, :4], input_pos=torch.arange(4).expand(rows, 4), cache=cache)
            return model(tokens[:rows, :, 4:], input_pos=torch.full((rows, 1), 4), cache=cache).audio

    use_kernels(model, Kernels({}))
    wanted = steps(9)
    assert not calls
    use_kernels(model, Kernels({}, {shape: Timing(form, 1.0, 2.0)}))
    torch.testing.assert_close(steps(9), wanted, rtol=1e-4, atol=1e-5)
    assert calls == [9] * c.layers
    torch.testing.assert_close(steps(7), wanted[:7], rtol=1e-4, atol=1e-5)
    assert not calls  # few rows


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_told_and_left_out(case: str, model: SpeechModel, caplog: pytest.LogCaptureFixture) -> None:
    keep_kernels(forced(model, "weight first", seconds=0.25))
    assert load_kernels().measured
    path = kernels_file()
    path.write_text(BROKEN[case](json.loads(path.read_text())))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("omni.kernels").addHandler(handler)
    try:
        assert not load_kernels().measured
    finally:
        logging.getLogger("omni.kernels").removeHandler(handler)
    assert len(told) == 1 and str(path) in told[0] and "damaged" in told[0]


def test_another_machine_has_its_own_file(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_kernels(forced(model, "weight first"))
    first = kernels_file()
    monkeypatch.setattr(kernels_module, "machine", lambda: {"processor": "another", "torch": "1.0"})
    assert kernels_file() != first and not load_kernels().measured
    kernels_file().write_text(first.read_text())  # two names of one checksum
    assert not load_kernels().measured


def test_a_folder_that_cannot_be_written_is_no_error(place: Path, model: SpeechModel) -> None:
    place.write_text("a file")
    assert measure_kernels(model, rows=(1,)).measured and not load_kernels().measured


def test_bfloat16_must_pay(model: SpeechModel) -> None:
    """By 1.2 times, over all products of a step, and only where no number format was asked for."""
    for seconds, pays in ((0.84, False), (0.83, True)):
        both = {**forced(model, REFERENCE).measured, **forced(model, REFERENCE, "bfloat16", seconds).measured}
        assert bf16_pays(model, Kernels(both)) is pays
        keep_kernels(Kernels(both))
        asked = copy.deepcopy(model)
        serve_measured(asked, False)
        assert asked.decoder.norm.weight.dtype == torch.float32
        serve_measured(asked, True)
        assert asked.decoder.norm.weight.dtype == (torch.bfloat16 if pays else torch.float32)
    assert not bf16_pays(model, forced(model, REFERENCE))


def test_other_weights_are_left_alone(model: SpeechModel) -> None:
    from omni.model.int8_model import to_int8

    assert not measure_kernels(to_int8(copy.deepcopy(model))).measured
    assert not measure_kernels(copy.deepcopy(model).to("meta")).measured
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    assert torch.equal(multiply(None, x, weight), F.linear(x, weight))


def test_a_bad_name_is_refused() -> None:
    with pytest.raises(UserError, match="kernels 'fast' is unknown; use measured or reference"):
        SpeechLM.from_pretrained("nowhere", kernels="fast")
