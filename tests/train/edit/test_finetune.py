"""Laws of fine-tuning on a correction: within its bound, and nothing of the model is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from omni.edit.deltas import Delta, edited, mlp_linears
from omni.errors import UserError
from tests.edit.toys import MODELS, batch_of, build, loss_of
from train.edit.apply import finetune, project
from train.edit.config import FinetuneConfig


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name) -> nn.Module:
    return build(name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_fine_tuning_moves_the_loss_and_stays_within_its_bound(model, name, norm):
    ids, bound = batch_of(name, 1), {"linf": 0.01, "l2": 0.3}[norm]
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    edits = finetune(model, lambda: loss_of(model, ids), mlp_linears(model), FinetuneConfig(norm, bound, 0.01, 15, rank=None))
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    edits.check_base(model)
    assert list(edits.deltas) == mlp_linears(model)
    changes = torch.cat([delta.b.flatten() for delta in edits.deltas.values()])
    size = changes.abs().max() if norm == "linf" else changes.norm()
    assert float(size) == pytest.approx(bound, rel=1e-3)
    with torch.no_grad(), edited(model, edits):
        after = loss_of(model, ids)
    assert float(after) < float(loss_of(model, ids).detach()) - 0.02


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bound", [0.3, 100.0])
def test_fine_tuning_of_low_rank_stays_within_its_bound(model, name, bound):
    ids = batch_of(name, 1)
    edits = finetune(model, lambda: loss_of(model, ids), mlp_linears(model), FinetuneConfig("l2", bound, 0.05, 15, rank=2))
    assert all(delta.a is not None and delta.a.shape[0] == 2 for delta in edits.deltas.values())
    size = torch.cat([delta.weight().flatten() for delta in edits.deltas.values()]).norm()
    if bound < 1:
        assert float(size) == pytest.approx(bound, rel=1e-3)
    else:
        assert 0.3 < float(size) < bound
    with torch.no_grad(), edited(model, edits):
        after = loss_of(model, ids)
    assert float(after) < float(loss_of(model, ids).detach()) - 0.02
    again = finetune(model, lambda: loss_of(model, ids), mlp_linears(model), FinetuneConfig("l2", bound, 0.05, 15, rank=2))
    assert all(torch.equal(again.deltas[n].b, delta.b) for n, delta in edits.deltas.items())


@pytest.mark.parametrize("name", ["llama"])
def test_fine_tuning_stops_when_it_is_enough(model, name):
    calls = []

    def counted() -> Tensor:
        calls.append(1)
        return loss_of(model, batch_of(name, 1))

    edits = finetune(model, counted, mlp_linears(model), FinetuneConfig(enough=100.0))
    assert len(calls) == 1 and not any(delta.b.any() for delta in edits.deltas.values())
    with pytest.raises(UserError, match=r"low rank.*\bl2\b"):
        FinetuneConfig("linf", rank=2)


@pytest.mark.parametrize("name", ["llama"])
def test_steps_that_pass_no_linear_are_left_out_and_a_loss_that_never_does_is_refused(model, name):
    ids, turn = batch_of(name, 1), [0]

    def sometimes() -> Tensor:
        turn[0] += 1
        return loss_of(model, ids) if turn[0] % 2 else torch.tensor(1.0)

    config = FinetuneConfig("l2", 0.3, 0.01, 10, rank=None)
    edits = finetune(model, sometimes, mlp_linears(model), config)
    assert all(bool(delta.b.any()) for delta in edits.deltas.values())
    with pytest.raises(UserError, match=r"loss does not depend on.*other linears"):
        finetune(model, lambda: torch.tensor(1.0), mlp_linears(model), config)


def test_a_projection_is_the_nearest_point():
    torch.manual_seed(0)
    point = [torch.randn(3, 4), torch.randn(2, 5)]
    flat = torch.cat([p.flatten() for p in point])
    for norm, order in (("linf", float("inf")), ("l2", 2)):
        moved = [p.clone() for p in point]
        project([Delta(p) for p in moved], norm, 0.7)
        got = torch.cat([p.flatten() for p in moved])
        assert float(torch.linalg.vector_norm(got, order)) == pytest.approx(0.7, rel=1e-5)
        for _ in range(200):
            other = torch.randn_like(flat)
            other = other * 0.7 / torch.linalg.vector_norm(other, order)
            assert float((other - flat).norm()) >= float((got - flat).norm())
        inside = [0.01 * p for p in point]
        kept = [p.clone() for p in inside]
        project([Delta(p) for p in kept], norm, 0.7)
        assert all(torch.equal(a, b) for a, b in zip(inside, kept, strict=True))
