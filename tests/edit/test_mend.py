"""Laws of MEND: its factors are the gradient's, its outer gradients those of weights, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import json
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from omni.diagnostics import Guard
from omni.edit.config import MendConfig, Sides, TransformConfig
from omni.edit.deltas import edited, find_linears, is_transposed, mlp_linears
from omni.edit.mend import Mend, fit_step, gradient_factors, kl_divergence, load_mend, save_mend
from omni.errors import UserError
from tests.close import assert_near
from tests.edit.toys import batch_of, logits_of, loss_of, set_checkpointing, some_edits, some_mend


def step(model: nn.Module, name: str, mend: Mend, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    batches = [batch_of(name, seed + i) for i in range(3)]
    return fit_step(model, mend, *batches, loss_of, logits_of)


def alive() -> tuple[int, int]:
    """How many tensors hold a graph, and the bytes that all tensors keep."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if t.layout == torch.strided)}
    return sum(t.grad_fn is not None for t in tensors), sum(storages.values())


@pytest.mark.parametrize("case", ["plain", "recomputed", "frozen", "frozen and recomputed"])
def test_factors_are_those_of_the_gradient(model, name, case):
    linears, ids = mlp_linears(model), batch_of(name, 1)
    loss_of(model, ids).backward()
    wanted = {n: part.weight.grad for n, part in find_linears(model, linears).items()}
    transposed = {n: is_transposed(part) for n, part in find_linears(model, linears).items()}
    model.zero_grad()
    if "recomputed" in case:
        set_checkpointing(model)
    if "frozen" in case:
        model.requires_grad_(False)
    with torch.no_grad():  # the caller's mode does not matter
        factors = gradient_factors(model, linears, ids, loss_of)
    for linear, (x, delta) in factors.items():
        grad = x.T @ delta if transposed[linear] else delta.T @ x
        assert_near(grad, wanted[linear], 1e-5, linear)
        assert not x.requires_grad and not delta.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert sum(len(part._forward_hooks) for part in find_linears(model, linears).values()) == 0


def test_factors_of_an_edited_model_are_those_of_the_edited_weights(model, name):
    edits, ids = some_edits(model), batch_of(name, 1)
    with edited(model, edits):
        factors = gradient_factors(model, edits.deltas, ids, loss_of)
    from tests.edit.test_deltas import written

    wanted = gradient_factors(written(model, edits), edits.deltas, ids, loss_of)
    for linear, pair in factors.items():
        for got, want in zip(pair, wanted[linear], strict=True):
            assert_near(got, want, 1e-5, linear)


def test_a_linear_that_is_called_twice_gives_all_its_tokens():
    linear = nn.Linear(3, 3)
    model = nn.ModuleDict({"one": linear})
    x = torch.randn(4, 3)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model["one"](model["one"](x).tanh()).square().sum()

    loss(model, x).backward()
    found = gradient_factors(model, ["one"], x, loss)["one"]
    assert len(found.x) == 8
    assert_near(found.delta.T @ found.x, linear.weight.grad, 1e-5)


def test_a_linear_that_is_used_by_its_weight_is_named():
    model = nn.ModuleDict({"head": nn.Linear(3, 3)})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.linear(x, model["head"].weight).square().sum()

    with pytest.raises(UserError, match=r"head\b.*by its weight"):
        gradient_factors(model, ["head"], torch.randn(2, 3), loss)


def test_kl_is_torchs():
    torch.manual_seed(0)
    before, after = torch.randn(5, 7) * 3, (torch.randn(5, 7) * 3).requires_grad_()
    wanted = nn.functional.kl_div(after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean")
    got = kl_divergence(before, after)
    assert_near(got, wanted, 1e-5)
    assert_near(torch.autograd.grad(got, after)[0], torch.autograd.grad(wanted, after)[0], 1e-5)
    assert float(kl_divergence(before, before)) == 0 and float(kl_divergence(before[:0], before[:0])) == 0
    assert kl_divergence(before.bfloat16(), before.bfloat16() + 1).dtype == torch.float32


@pytest.mark.sampled(3)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("sides", get_args(Sides))
@pytest.mark.parametrize("name", ["llama"])
def test_every_parameter_learns_and_nothing_else_does(model, name, sides, shared, split):
    mend = some_mend(model, MendConfig(TransformConfig(sides, rank=6), shared=shared, split=split, edit_lr=1e-2))
    losses = [step(model, name, mend, seed) for seed in (2, 5)]
    assert all(not part.requires_grad for one in losses for part in one)
    for key, p in mend.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), key
    assert all(p.grad is None for p in model.parameters())
    assert all(b.grad_fn is None and not b.requires_grad for b in mend.buffers())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_outer_gradients_are_those_of_edited_weights(model, name, split):
    """Against `torch.func.functional_call` with the edit added to the weights, and plain backward."""
    mend = some_mend(model, MendConfig(TransformConfig(rank=6), split=split, edit_lr=1e-2, c_edit=0.3, c_loc=2.0))
    twin = copy.deepcopy(mend)
    losses = step(model, name, mend)
    edits = twin(gradient_factors(model, twin.shapes, batch_of(name, 2), loss_of))
    weights = dict(model.named_parameters())
    for linear, part in find_linears(model, edits.deltas).items():
        delta = edits.deltas[linear]
        assert delta.a is not None
        change = delta.lr * torch.einsum("ni,no->oi", delta.a, delta.b)
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] + (change.T if is_transposed(part) else change)

    class Written(nn.Module):
        """The model with those weights, as a module."""

        def __init__(self) -> None:
            super().__init__()
            self.__dict__.update(model=model, layout=getattr(model, "layout", None), decoder=getattr(model, "decoder", None))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (ids,))

    before = logits_of(model, batch_of(name, 4)).detach()
    edit_loss = loss_of(Written(), batch_of(name, 3))
    after = logits_of(Written(), batch_of(name, 4))
    locality = nn.functional.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean"
    )  # torch's: mean over rows
    total = 0.3 * edit_loss + 2.0 * locality
    total.backward()
    for got, wanted in zip(losses, (total, edit_loss, locality), strict=True):
        assert_near(got, wanted, 2e-4)
    for (key, p), other in zip(mend.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and other.grad is not None
        assert_near(p.grad, other.grad, 1e-3, key)


@pytest.mark.long
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", ["llama"])
def test_ten_guarded_steps_leave_no_graph_behind(model, name, split):
    """The guard finds nothing, in the last step under its trace; and after each as much memory is kept as after the first."""
    mend = some_mend(model, MendConfig(TransformConfig(rank=6), split=split))
    optimizer = torch.optim.Adam(mend.parameters(), lr=1e-3)
    guard = Guard(nn.ModuleList([model, mend]), optimizer, idle=model.parameters())
    gc.collect()
    gc.freeze()  # what other tests have left is not looked through again
    graphs, after = alive()[0], []
    for seed in range(10):
        with guard.step([batch_of(name, seed + i) for i in range(3)], trace=seed == 9):
            step(model, name, mend, seed)
            optimizer.step()
            optimizer.zero_grad()
        after.append(alive())
    gc.unfreeze()
    assert guard.report() == ""
    assert set(after) == {(graphs, after[0][1])}
    assert sum(len(part._forward_hooks) for part in model.modules()) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2", "speech"])
def test_a_hypernetwork_learns_to_edit(model, name):
    """A few corrections over and over: the loss after an edit falls well below the one before it."""
    mend = Mend.of(model, config=MendConfig(TransformConfig(rank=16), edit_lr=1e-3, c_edit=1.0, c_loc=0.1))
    optimizer = torch.optim.Adam([{"params": mend.transforms.parameters()}, {"params": [mend.edit_lr], "lr": 3e-3}], lr=1e-2)
    for turn in range(60):
        edit = batch_of(name, turn % 3)
        fit_step(model, mend, edit, None, batch_of(name, 10 + turn), loss_of, logits_of)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for seed in range(3):
            edit = batch_of(name, seed)
            before = loss_of(model, edit)
            with edited(model, mend.edit(model, edit, loss_of)):
                after = loss_of(model, edit)
            assert float(after) < 0.9 * float(before)


@pytest.mark.sampled(1)
def test_corrections_that_act_together_are_judged_together(model, name):
    mend = some_mend(model)
    step(model, name, mend, 9)  # its statistics
    mend.eval().zero_grad()
    first, second, again, others = (batch_of(name, seed) for seed in range(4))
    losses = fit_step(model, mend, first, again, others, loss_of, logits_of, [second])
    got = {n: p.grad.clone() for n, p in mend.named_parameters() if p.grad is not None}
    mend.zero_grad()
    deltas = [mend(gradient_factors(model, mend.shapes, one, loss_of)) for one in (first, second)]
    with torch.no_grad():
        before = logits_of(model, others)
    with edited(model, deltas[0]), edited(model, deltas[1]):
        edit_loss, local = loss_of(model, again), kl_divergence(before, logits_of(model, others))
        (mend.config.c_edit * edit_loss + mend.config.c_loc * local).backward(inputs=list(mend.parameters()))
    assert_near(losses.edit, edit_loss.detach(), 1e-6)
    assert_near(losses.locality, local.detach(), 1e-5)
    assert got
    for n, p in mend.named_parameters():
        if p.grad is not None:
            assert_near(got[n], p.grad, 2e-5, n)


@pytest.mark.sampled(2)
def test_a_step_under_autocast(model, name):
    """bf16 products in the base; the hypernetwork and its statistics stay fp32."""
    mend = some_mend(model)
    twin = copy.deepcopy(mend)
    plain = step(model, name, mend)
    with torch.autocast("cpu", torch.bfloat16):
        half = step(model, name, twin)
    assert_near(half[1].float(), plain[1], 0.1)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in twin.parameters())
    assert all(b.dtype in (torch.float32, torch.long) for b in twin.buffers())


def test_an_edit_is_what_the_hypernetwork_says_and_changes_nothing(model, name):
    mend = some_mend(model)
    step(model, name, mend)
    before = {key: tensor.clone() for key, tensor in mend.state_dict().items()}
    made = mend.edit(model, batch_of(name, 8), loss_of)
    assert mend.training and all(torch.equal(tensor, before[key]) for key, tensor in mend.state_dict().items())
    made.check_base(model)
    wanted = mend.eval()(gradient_factors(model, mend.shapes, batch_of(name, 8), loss_of))
    for linear, delta in made.deltas.items():
        assert not delta.b.requires_grad
        assert_near(delta.weight(), wanted.deltas[linear].weight(), 1e-6)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["speech"])
def test_a_hypernetwork_is_read_as_it_was(model, name, split, tmp_path):
    mend = some_mend(model, MendConfig(TransformConfig("separate", rank=6), shared=not split, split=split))
    step(model, name, mend)
    save_mend(tmp_path / "mend", mend)
    read = load_mend(tmp_path / "mend")
    assert read.config == mend.config and read.shapes == mend.shapes
    assert read.state_dict().keys() == mend.state_dict().keys()
    assert all(torch.equal(tensor, mend.state_dict()[key]) for key, tensor in read.state_dict().items())
    ids = batch_of(name, 3)
    assert read.base is None and read.edit(model, ids, loss_of).deltas
    mend.tie(model)
    save_mend(tmp_path / "tied", mend)
    tied = load_mend(tmp_path / "tied")
    assert tied.edit(model, ids, loss_of).deltas
    last = list(mend.shapes)[-1]
    with torch.no_grad():
        model.get_submodule(last).weight[0, 0] += 1
    with pytest.raises(UserError, match=rf"other weights of {last}\b"):
        tied.edit(model, ids, loss_of)
    file = tmp_path / "mend" / "mend.json"
    facts = json.loads(file.read_text())
    facts["linears"].popitem()
    file.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"does not fit its tensors"):
        load_mend(tmp_path / "mend")
