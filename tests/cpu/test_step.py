"""Laws of measured kernels: forms are equal, the rule of choice, what is kept, and where `F.linear` stays."""

from __future__ import annotations

import copy
import importlib.util
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

from omni.checkpoint.folder import save_folder
from omni.checkpoint.places import WEIGHTS
from omni.cpu import compiled as compiled_module
from omni.cpu import kernels as kernels_module
from omni.cpu.int8 import to_int8
from omni.cpu.kernels import (
    COMPILED,
    FORMS,
    MODULES,
    REFERENCE,
    ROWS,
    Kernels,
    Product,
    StepKey,
    StepShape,
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


@pytest.mark.sampled(8)
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


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, norms": {"qkv_bias": True, "qk_norm": True, "kv_heads": 4},
    "heads of 32": {"width": 64, "heads": 2, "kv_heads": 1},
    "window": {"window": 4},
    "short window": {"window": 4, "context": 6},
}


def compiled(numbers: str, model: SpeechModel, form: str = COMPILED) -> Kernels:
    """Kernels with a measurement of the step of a model's block."""
    shape = model.decoder.step_shape()
    assert shape is not None and shape.dtype == numbers
    return Kernels({}, {StepKey(1, part, shape): Timing(form, 1.0, 2.0) for part in ("step", "prefill")})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of what is compiled."""
    made: list[str] = []
    for name in ("blocks", "turn_and_keep"):
        real = getattr(compiled_module, name)
        monkeypatch.setattr(compiled_module, name, lambda *given, n=name, real=real: made.append(n) or real(*given))
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
    use_kernels(model, compiled(numbers, model))
    ours = answers()
    assert calls == (["blocks"] * 10 if numbers == "float32" else ["turn_and_keep"] * 10 * decoder.layers)  # prompts and steps
    for found, wanted in zip(ours, modules, strict=True):
        if numbers == "float32":
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        else:  # rounding differs where a number lies between two
            assert float((found - wanted).norm() / wanted.norm()) < 0.02
    near = (lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)) if numbers == "float32" else _equal
    near(ours[0][2], ours[1][0])
    near(ours[0][:3], ours[2])
    near(ours[0][[0, 3, 7]], ours[3])
    near(ours[0][[1, 2, 4, 5]], ours[4])


def _equal(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one, other)


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
        use_kernels(model, compiled("int8" if quantize else "float32", model))
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

    def same(one: SpeechModel, wanted: list[Tensor], number: int = 2) -> None:
        torch.testing.assert_close(steps(one), wanted, rtol=1e-4, atol=1e-5)
        assert len(calls) == number

    wanted = steps(model)
    assert not calls
    for form, number in ((MODULES, 0), (COMPILED, 2)):
        use_kernels(model, compiled("float32", model, form))
        for one in (model, copy.deepcopy(model)):
            same(one, wanted, number)
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


def test_a_form_must_be_faster_in_every_repeat() -> None:
    linear = [1.0, 1.0, 1.0]
    assert choose({REFERENCE: linear, "weight first": [0.5, 0.86, 0.5]}) == Timing(REFERENCE, 1.0, 1.0)
    assert choose({REFERENCE: linear, "weight first": [0.5, 0.84, 0.6]}) == Timing("weight first", 0.6, 1.0)
    quick = {REFERENCE: linear, "weight first": [0.5, 0.5, 0.5], "linear, 4 rows": [0.4, 0.6, 0.4]}
    assert choose(quick).form == "linear, 4 rows"


@pytest.mark.long
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


def test_compiled_products_are_forgotten_with_their_code(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question would wait for the compiler."""
    others = forced(model, "weight first").measured
    fast, slow = Timing(COMPILED, 1.0, 2.0), Timing(MODULES, 1.0, 1.0)
    shape = StepShape("float32", 8, 1, 1, 8, 8)
    steps = {StepKey(1, "step", shape): fast, StepKey(1, "prefill", shape): slow, StepKey(1, "encoder", shape): fast}
    keep_kernels(Kernels({**others, Product(1, "float32", 1, 7, 7): fast}, steps))
    kept = {"product", "blocks", "encoder"}
    monkeypatch.setattr(compiled_module, "is_kept", lambda function: getattr(function, "py_func", function).__name__ in kept)
    assert len(load_kernels().measured) == len(others) + 1 and load_kernels().steps == steps
    kept.remove("blocks")  # of another copy of the package, say
    assert load_kernels().steps.keys() == {StepKey(1, "prefill", shape), StepKey(1, "encoder", shape)}
    kept.clear()
    assert load_kernels().measured == others and load_kernels().steps.keys() == {StepKey(1, "prefill", shape)}
    kept.update(("product", "blocks", "encoder"))
    monkeypatch.setattr(kernels_module, "compiler", lambda: "another")
    assert load_kernels().measured == others and not load_kernels().steps


def test_what_is_kept_compiled_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "other_code.py"
    place.write_text("def double(x):\n    return x + x\n")
    monkeypatch.syspath_prepend(tmp_path)

    def made() -> Any:
        spec = importlib.util.spec_from_file_location("other_code", place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return compiled_module.compiled_function(module.double)

    function = made()
    assert not compiled_module.is_kept(function) and function(2) == 4
    assert compiled_module.is_kept(function) and compiled_module.is_kept(made())
    place.write_text("def double(x):\n    return 2 * x\n\n")
    assert not compiled_module.is_kept(made())
    index = next(tmp_path.rglob("*.nbi"))
    index.write_bytes(b"")
    assert not compiled_module.is_kept(made())


def test_of_another_number_of_threads_nothing_is_used(model: SpeechModel) -> None:
    shapes = {tuple(w.shape) for w in step_weights(model)}
    other = Kernels({Product(2, "float32", 1, k, n): Timing("weight first", 1.0, 2.0) for n, k in shapes})
    assert all(other.form(1, torch.float32, *shape) is None for shape in shapes)
    assert all(forced(model, "weight first").form(1, torch.float32, *shape) is FORMS["weight first"] for shape in shapes)


BROKEN: dict[str, Any] = {
    "no JSON": lambda data: "{",
    "a form of another version": lambda data: json.dumps(data).replace("weight first", "by magic"),
    "no number": lambda data: json.dumps(data).replace("0.25", "NaN"),
    "no block": lambda data: json.dumps({**data, "blocks": [[[1, "step", ["float32", 192]], ["compiled", 0.1, 0.2]]]}),
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


def test_blocks_of_other_linears_are_measured_without_a_step(model: SpeechModel) -> None:
    """Such as linears in 4 bits, beside heads that are plain."""

    class Other(torch.nn.Linear):
        pass

    for block in model.decoder.blocks:
        for part in block.modules():
            if type(part) is torch.nn.Linear:
                part.__class__ = Other
    kernels = measure_kernels(model)
    assert kernels.measured and {key.part for key in kernels.steps} == {"encoder"}


@pytest.mark.parametrize("quantize", [False, True])
def test_a_step_is_measured_kept_and_used(model: Any, quantize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = to_int8(model) if quantize else model
    kernels = measure_kernels(model)
    key, found = next(iter(kernels.steps.items()))
    shape, hears = model.decoder.step_shape(), model.encoder.compiled_shape()
    parts = {"step": shape} if quantize else {"step": shape, "prefill": shape, "encoder": hears}
    assert kernels.steps.keys() == {StepKey(1, part, shape) for part, shape in parts.items()}
    assert shape.dtype == ("int8" if quantize else "float32")
    assert found.form in (MODULES, COMPILED) and load_kernels().steps == kernels.steps
    assert kernels.compiled(key.shape) == (found.form == COMPILED) and model.decoder.blocks[0].attention.kernels is kernels
    assert not Kernels({}, {StepKey(2, "step", key.shape): found}).compiled(key.shape)  # of another number of threads
    use_kernels(model, None)
    serve_measured(model, False)
    assert model.decoder.blocks[0].attention.kernels.steps == kernels.steps
    again = measure_kernels(model)
    assert again.steps.keys() == kernels.steps.keys()
    monkeypatch.setattr(kernels_module, "compiler", lambda: "another")
    kept = {key: one for key, one in again.measured.items() if one.form != COMPILED}
    assert not load_kernels().steps and load_kernels().measured == kept


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_told_and_left_out(case: str, model: SpeechModel, caplog: pytest.LogCaptureFixture) -> None:
    keep_kernels(forced(model, "weight first", seconds=0.25))
    assert load_kernels().measured
    path = kernels_file()
    path.write_text(BROKEN[case](json.loads(path.read_text())))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("omni.cpu.kernels").addHandler(handler)
    try:
        assert not load_kernels().measured
    finally:
        logging.getLogger("omni.cpu.kernels").removeHandler(handler)
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


def test_bfloat16_must_pay(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 1.2 times, over all products of a step, where no number format was asked for, and prompts are as fast in it."""
    monkeypatch.setattr(kernels_module, "multiplies_bf16", lambda kind: True)
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
    monkeypatch.setattr(kernels_module, "multiplies_bf16", lambda kind: False)
    assert not bf16_pays(model, Kernels(both))


def test_other_weights_are_left_alone(model: SpeechModel) -> None:
    from omni.cpu.int8 import to_int8

    assert not measure_kernels(to_int8(copy.deepcopy(model))).measured
    assert not measure_kernels(copy.deepcopy(model).to("meta")).measured
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    assert torch.equal(multiply(None, x, weight), F.linear(x, weight))
