"""Laws of linears in int8: exact sums, in any company of rows, and what is near to the model in full precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from omni.cpu import int8, normed, together, use_fast
from omni.cpu.int8 import Int8Embedding, Int8Linear, Normed, largest_of, to_int8, whole_numbers
from omni.errors import UserError
from omni.model.blocks import RMSNorm
from omni.model.speech_model import SpeechModel
from tests.train.data.toys import MODELS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["onednn", "compiled"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        monkeypatch.setattr(int8, "exact", lambda: False)
    elif not int8.exact():
        pytest.skip("this processor or PyTorch has no exact product of int8")
    return str(request.param)


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """The product with both rounded to steps of the row's largest, 127 and 127 * 256, in float64."""
    s, w = (t.abs().amax(1, keepdim=True) for t in (x, weight))
    whole = [(t.double() * (127 * step / most) + 0.5).floor() / step for t, most, step in ((x, s, 256), (weight, w, 1))]
    return (whole[0] @ whole[1].T) * (s.double() / 127) * (w.double() / 127).T


@pytest.mark.parametrize("inputs", [7, 96, 3000])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_whole_numbers(product: str, inputs: int, bias: bool) -> None:
    weight, x, more = random(40, inputs), random(5, inputs, seed=1), random(40, seed=2) if bias else None
    linear, wanted = Int8Linear.of(weight, more), by_hand(x, weight) + (more if more is not None else 0)
    torch.testing.assert_close(linear(x).double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(linear.dequantize(), weight, rtol=0, atol=float(weight.abs().max()) / 127)


def test_a_row_is_the_same_in_any_company(product: str) -> None:
    """Also beside one that is not finite, which stays so."""
    linear, x = Int8Linear.of(random(200, 300)), random(70, 300, seed=1)
    x[3], x[4, 5], x[6] = float("nan"), float("inf"), 0
    alone = torch.cat([linear(row[None]) for row in x])
    for count in (2, 3, 8, 17, 64, 70):
        torch.testing.assert_close(linear(x[:count]), alone[:count], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(linear(x[None, 7:9])[0], alone[7:9])
    assert not alone[3:5].isfinite().any() and alone[6].eq(0).all() and alone[7:].isfinite().all()


def test_linears_of_one_input_are_multiplied_together(product: str) -> None:
    """Unless something acts beside one of them."""
    parts = [Int8Linear.of(random(n, 96, seed=n), random(n) if n == 8 else None) for n in (40, 8, 16)]
    x, calls = random(2, 3, 96, seed=1), []
    apart = [part(x) for part in parts]
    for part in parts:
        part._packed.clear()
    assert torch.equal(together(x, *parts), torch.cat(apart, -1)) and [len(part._packed) for part in parts] == [1, 0, 0]
    assert together(x, parts[0], nn.Linear(96, 4)) is None
    parts[1].register_forward_hook(lambda module, given, out: calls.append(given[0]) or out + 1)
    found = together(x, *parts).split([40, 8, 16], -1)
    assert len(calls) == 1 and torch.equal(calls[0], x)
    assert torch.equal(found[0], apart[0]) and torch.equal(found[1], apart[1] + 1)


def test_a_norm_is_left_to_the_scale_of_its_rows(product: str) -> None:
    """The same whole numbers, in any company, whatever the rows' lengths and whether something acts beside a linear."""
    norm, linear = RMSNorm(96, eps=1e-6), Int8Linear.of(random(40, 96), random(40, seed=2))
    nn.init.normal_(norm.weight, 1, 0.3)
    x = random(9, 96, seed=1) * torch.logspace(-6, 6, 9)[:, None]
    x[3], x[4] = 0, float("nan")
    rows, exact = normed(x, norm, linear), x.double()
    assert isinstance(rows, Normed)
    wanted = exact / (exact.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    found, by_rows = together(rows, linear).detach(), (by_hand(wanted, linear.dequantize()) + linear.bias).detach()
    for i in (0, 1, 2, 5, 6, 7, 8):
        torch.testing.assert_close(found[i].double(), by_rows[i], rtol=1e-4, atol=1e-4 * float(by_rows[i].abs().max()))
    assert torch.equal(found[3], linear.bias) and not found[4].isfinite().any()
    for i, row in enumerate(x):
        torch.testing.assert_close(together(Normed(row[None], norm), linear)[0], found[i], rtol=0, atol=0, equal_nan=True)
    linear.register_forward_hook(lambda module, given, out: out + 2 * given[0][..., :1])
    torch.testing.assert_close(together(rows, linear), found + 2 * norm(x)[:, :1], rtol=0, atol=0, equal_nan=True)
    norm.register_forward_hook(lambda module, given, out: out)
    assert isinstance(normed(x, norm, linear), Tensor) and isinstance(normed(x, RMSNorm(96), nn.Linear(96, 4)), Tensor)


def test_another_precision_keeps_the_scales(product: str) -> None:
    linear, x = Int8Linear.of(random(40, 96)), random(3, 96, seed=1)
    before = linear(x.bfloat16())
    linear.to(torch.bfloat16)
    assert linear.scale.dtype == torch.float32 and linear.weight.dtype == torch.int8
    assert before.dtype == torch.bfloat16 and torch.equal(linear(x.bfloat16()), before)
    torch.testing.assert_close(before.float(), linear(x), rtol=0.05, atol=0.3)


def test_weights_in_pieces_are_rounded_as_whole_ones() -> None:
    """A row of zeros, or below what can be divided by, is zeros; one that is not finite has a scale that says so."""
    weight = random(70, 37) * torch.logspace(-44, 30, 70)[:, None]
    weight[3], weight[4, 5] = 0, float("nan")
    largest = largest_of(weight)
    whole = whole_numbers(weight, largest)
    for step in (1, 7, 16):
        pieces = [whole_numbers(a, b) for a, b in zip(weight.split(step), largest.split(step), strict=True)]
        assert torch.equal(torch.cat(pieces)[5:], whole[5:])
    assert whole[3].eq(0).all() and whole[0].eq(0).all() and largest[4].isnan()
    assert (whole[10:].abs().amax(1) == 127).all() and whole.min() >= -127


def test_a_table_gives_its_rows_in_the_precision_of_the_model() -> None:
    weight, ids = random(30, 16), torch.tensor([[3, 29], [0, 3]])
    table = Int8Embedding.of(weight)
    assert torch.equal(table(ids), table.dense()[ids]) and table.head() is table.head()
    assert ((table.dense() - weight).abs() <= table.scale[:, None] * 0.5001).all()
    torch.testing.assert_close(
        table.head()(random(4, 16, seed=1)), Int8Linear.of(weight)(random(4, 16, seed=1)), rtol=0, atol=0
    )
    before = table(ids)
    table.to(torch.bfloat16)
    assert table.scale.dtype == torch.float32 and torch.equal(table(ids), before.bfloat16())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_nearly_as_in_full_precision(name: str) -> None:
    torch.manual_seed(0)
    model = SpeechModel(MODELS[name]).eval()
    tokens = torch.stack([torch.randint(0, s.size, (2, 9)) for s in model.layout.streams], 1)
    with torch.no_grad():
        full = model.decoder.logits(model.decoder(tokens))
        linears = [n for n, part in model.named_modules() if isinstance(part, nn.Linear)]
        assert to_int8(model) is model
        found = model.decoder.logits(model.decoder(tokens))
        alone = model.decoder.logits(model.decoder(tokens[1:]))
    held = [n for n, part in model.named_modules() if isinstance(part, nn.Linear)]
    assert held == linears
    assert all(isinstance(model.get_submodule(n), Int8Linear) for n in held)
    for ours, wanted, one in zip(found, full, alone, strict=True):
        assert 0 < float((ours - wanted).norm() / wanted.norm()) < 0.05
        torch.testing.assert_close(one, ours[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_large_columns_leave_the_others_their_numbers(product: str, compiled: bool) -> None:
    """Of norms and of what is gated, hundreds of times the rest, as real models have them; here nothing reads them."""
    torch.manual_seed(0)
    model = SpeechModel(MODELS["codec2"]).eval().requires_grad_(False)
    for block in model.decoder.blocks:
        attention, mlp = block.attention, block.mlp
        for large, readers in (
            (block.attention_norm, (attention.q, attention.k, attention.v)),
            (block.mlp_norm, (mlp.gate, mlp.up)),
            (mlp.up, (mlp.down,)),
        ):
            large.weight[3] *= 300
            for reader in readers:
                reader.weight[:, 3] = 0
    tokens = torch.stack([torch.randint(0, s.size, (2, 1)) for s in model.layout.streams], 1)

    def states() -> Tensor:
        with torch.inference_mode():
            return model(tokens, input_pos=torch.zeros(2, 1, dtype=torch.long), cache=model.make_cache(2, 4)).text

    wanted = states()
    use_fast(to_int8(model), compiled)
    assert float((states() - wanted).norm() / wanted.norm()) < 0.01


def test_what_cannot_be_turned_is_refused() -> None:
    turned, elsewhere = to_int8(SpeechModel(MODELS["codec2"])), SpeechModel(MODELS["codec2"]).to("meta")
    reasons = "quantised already", r"\bmeta\b", "self_attn.out_proj belongs to PyTorch's MultiheadAttention"
    for model, reason in zip((turned, elsewhere, nn.TransformerEncoderLayer(8, 2, 16)), reasons, strict=True):
        with pytest.raises(UserError, match=reason):
            to_int8(model)


def test_a_product_that_is_not_exact_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = int8._exact_product
    for wrong in (lambda *given: real(*given) + 1, lambda *given: torch.ops.onednn.no_such_product(*given)):
        monkeypatch.setattr(int8, "_exact_product", wrong)
        assert not int8.exact.__wrapped__()
