"""Laws of edits that act: what they do to logits is what they would do to weights, wherever the model runs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from omni.edit.deltas import Delta, Edits, edited, find_linears, is_transposed, stack
from omni.errors import UserError
from tests.close import assert_near
from tests.edit.toys import all_logits, batch_of, build, loss_of, says, set_checkpointing, some_edits
from tests.processes import two

FORMS = {"low rank": 3, "dense": None}


def written(model: nn.Module, *edits: Edits) -> nn.Module:
    """A copy with the edits in its weights, by the formula."""
    twin = copy.deepcopy(model)
    for one in edits:
        for name, part in find_linears(twin, one.deltas).items():
            delta = one.deltas[name]
            a = torch.eye(len(delta.b)) if delta.a is None else delta.a
            change = (delta.lr * a.T @ delta.b).T
            part.weight.data += change.T if is_transposed(part) else change
    return twin


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return all_logits(model, ids)


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in model.modules())


@pytest.mark.parametrize("rank", FORMS.values(), ids=FORMS)
def test_an_edit_acts_as_if_it_stood_in_the_weights(model, name, rank):
    edits, ids = some_edits(model, rank=rank), batch_of(name, 1)
    before = logits(model, ids)
    wanted = logits(written(model, edits), ids)
    with edited(model, edits):
        got = logits(model, ids)
    assert_near(got, wanted, 1e-5)
    assert float((wanted - before).norm() / before.norm()) > 0.01
    assert torch.equal(logits(model, ids), before) and hooks(model) == 0


def test_edits_add_up_nested_or_stacked(model, name):
    low, dense, ids = some_edits(model, 1), some_edits(model, 2, rank=None), batch_of(name, 1)
    half = Edits(dict(list(some_edits(model, 3).deltas.items())[:1]))
    wanted, first = logits(written(model, low, dense, half), ids), logits(written(model, low), ids)
    with edited(model, low), edited(model, dense), edited(model, half):
        assert_near(logits(model, ids), wanted, 1e-5)
    with edited(model, [low, dense, half]):
        assert_near(logits(model, ids), wanted, 1e-5)
    with edited(model, low):
        with edited(model, stack([dense, half])):
            assert_near(logits(model, ids), wanted, 1e-5)
        assert_near(logits(model, ids), first, 1e-5)
    with pytest.raises(KeyError), edited(model, low):
        raise KeyError
    assert hooks(model) == 0


def test_an_edit_that_does_not_fit_is_refused(model):
    edits = some_edits(model)
    first = next(iter(edits.deltas))
    with pytest.raises(UserError, match=r"no linear.*closest.*mlp"):
        edited(model, Edits({first + "x": edits.deltas[first]})).__enter__()
    wrong = Delta(torch.ones(1, 5), torch.ones(1, 4))
    with pytest.raises(UserError, match=r"goes from 4 to 5 features, the model's linear from"):
        edited(model, Edits({first: wrong})).__enter__()
    with pytest.raises(ValueError, match=r"a delta has a \[R, I\] and b \[R, O\]"):
        Delta(torch.ones(2, 5), torch.ones(1, 4))
    assert hooks(model) == 0


def gradients(model: nn.Module, name: str, edits: Edits) -> dict[str, torch.Tensor]:
    tensors = {f"{n}.{k}": getattr(d, k) for n, d in edits.deltas.items() for k in ("a", "b", "lr")}
    for tensor in tensors.values():
        tensor.requires_grad_().grad = None
    model.zero_grad()
    with edited(model, edits):
        loss_of(model, batch_of(name, 1)).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**found, **{n: t.grad for n, t in tensors.items()}}


def test_gradients_through_recomputed_blocks_equal_plain_ones(model, name):
    edits = some_edits(model)
    plain = gradients(model, name, edits)
    set_checkpointing(model)
    again = gradients(model, name, edits)
    assert plain.keys() == again.keys() and len(plain) > len(edits.deltas) * 3
    for key, grad in plain.items():
        assert_near(again[key], grad, 1e-5, key)


@pytest.mark.parametrize("recomputed", [False, True])
def test_backward_after_the_block_is_an_error_that_says_so(model, name, recomputed):
    if recomputed:
        set_checkpointing(model)
    with edited(model, some_edits(model)):
        loss = loss_of(model, batch_of(name, 1))
    with pytest.raises((ValueError, CheckpointError) if recomputed else ValueError, match="inside the block|number of tensors"):
        loss.backward()


def test_backward_after_the_block_is_an_error_where_torch_would_be_silent():
    """Nothing the edit computes with is saved for backward here, so the recomputed graph fits, with other values in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 4))
    edits = Edits({"0": Delta(torch.randn(2, 4), torch.randn(2, 4))})
    x = torch.randn(3, 4)

    def loss() -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=False).square().sum()

    with edited(model, edits):
        loss().backward()
    right = model[2].weight.grad.clone()
    model.zero_grad()
    loss().backward()
    assert not torch.allclose(model[2].weight.grad, right, rtol=0.1)  # what silence would give
    with edited(model, edits):
        late = loss()
    with pytest.raises(CheckpointError):
        late.backward()
    with edited(model, edits):
        late = loss()
    with pytest.raises(CheckpointError):
        torch.autograd.grad(late, model[2].weight)


def test_a_graph_left_behind_disturbs_nobody(model, name):
    """Logits of an edited model are kept; training without edits goes on, recomputed; then they are dropped."""
    plain = gradients(model, name, some_edits(model))
    set_checkpointing(model)
    own = hooks(model)  # transformers has one
    with edited(model, some_edits(model)):
        kept = all_logits(model, batch_of(name, 2))
    model.zero_grad()
    loss_of(model, batch_of(name, 1)).backward()
    with edited(model, some_edits(model)):  # a second block over what the first one left
        loss_of(model, batch_of(name, 2)).backward()
    again = gradients(model, name, some_edits(model))
    for key, grad in plain.items():
        assert_near(again[key], grad, 1e-5, key)
    assert kept.requires_grad and hooks(model) == own


@pytest.mark.parametrize("recomputed", [False, True])
def test_edits_under_autocast(model, name, recomputed):
    """bf16 products: the change is that of fp32 within its rounding, and types stay what they are without edits."""
    edits, ids = some_edits(model), batch_of(name, 1)
    if recomputed:
        set_checkpointing(model)
    plain = logits(model, ids)
    with edited(model, edits):
        wanted = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        base = logits(model, ids)
        with edited(model, edits.map(lambda t: t.requires_grad_())):
            got = all_logits(model, ids)
            loss_of(model, ids).backward()
    assert got.dtype == base.dtype
    assert_near(got.float(), wanted, 0.03)
    assert float((wanted - plain).norm() / plain.norm()) > 0.1
    assert all(d.b.grad.dtype == torch.float32 and d.b.grad.any() for d in edits.deltas.values())


def test_a_linear_called_by_keyword():
    model = nn.ModuleDict({"one": nn.Linear(3, 2)})
    x = torch.randn(4, 3)
    edits = Edits({"one": Delta(torch.ones(1, 2), torch.ones(1, 3))})
    with edited(model, edits):
        got = model["one"](input=x)
    assert_near(got, model["one"](x) + x.sum(1, keepdim=True), 1e-6)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two models say that two gloo processes share (FSDP2)."""
    folder = tmp_path_factory.mktemp("sharded")
    both = two("tests.edit.toys", str(folder), "llama", "speech")
    assert [ended.code for ended in both] == [0, 0], both
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "speech"])
def test_two_processes_that_share_a_model_say_what_one_says(sharded, name):
    """Logits, gradients of the edits, a step of MEND, the edit it makes, and the checksums of the base."""
    model, got = build(name), torch.load(sharded / f"{name}.pt", weights_only=True)
    wanted = says(model, name)
    wanted["merged"], wanted["reverted"] = wanted["logits"], wanted["base"]
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if tensor.dtype == torch.long:
            assert torch.equal(got[key], tensor), key
        else:
            assert_near(got[key], tensor, 1e-4 if key.startswith(("mend", "made")) else 1e-5, key)
