"""Bilevel methods against exact derivatives, and what they leave behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.close import assert_near
from train.balance.balancer import Bilevel, build
from train.balance.bilevel import _forum_weights
from train.balance.config import BalanceConfig
from train.balance.rows import MethodInput
from train.balance.solvers import on_simplex, solved

NAMES = ["a", "b", "c"]
INNER, OUTER = (torch.randn(3, 5, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))


def losses(w: Tensor, table: Tensor) -> Tensor:
    return 1 + (table @ w).square() + 0.3 * (table @ w).sin()


def made(method: str, **settings: Any) -> tuple[Bilevel, nn.Parameter]:
    bilevel = build(BalanceConfig(method, settings=settings), NAMES)
    assert isinstance(bilevel, Bilevel)
    return bilevel, nn.Parameter(torch.linspace(-0.5, 0.7, 5).double())


def followed(bilevel: Bilevel, w: nn.Parameter, monkeypatch: pytest.MonkeyPatch, lr: float) -> Tensor:
    """The gradient that the logits are given."""
    seen: list[Tensor] = []
    monkeypatch.setattr(MethodInput, "adam", lambda inputs, name, gradient, *rest: seen.append(gradient))
    bilevel.update_weights(lambda: losses(w, INNER), lambda: losses(w, OUTER), [w], lr)
    return seen[0]


def looked_ahead(logits: Tensor, w: Tensor, lr: float) -> Tensor:
    """Outer losses after one step on the weighted inner losses, differentiable by the logits."""
    start = w.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(logits.softmax(0) @ losses(start, INNER), start, create_graph=True)
    return losses(start - lr * gradient, OUTER)


def test_autolambda_is_the_derivative_through_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Central differences of 0.01 against double backward."""
    bilevel, w = made("autolambda")
    logits = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(looked_ahead(logits, w, 0.05).sum(), logits)
    assert_near(followed(bilevel, w, monkeypatch, 0.05), wanted, 1e-3)


def test_moml_follows_the_least_of_the_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    bilevel, w = made("moml", inner_lr=0.05)
    logits = torch.full((3,), 1 / 3, dtype=torch.float64)
    table = torch.autograd.functional.jacobian(lambda x: looked_ahead(x, w, 0.05), logits)
    table = table / table.norm(dim=1, keepdim=True)
    wanted = solved(on_simplex, table @ table.T) @ table
    assert (followed(bilevel, w, monkeypatch, 1.0) - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_forum_weights_are_the_best_of_a_grid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(4, 6))
    gram, least, reward = rows @ rows.T, rng.normal(size=3), float(rng.uniform(0, 5))

    def value(w: np.ndarray) -> float:
        v = np.linspace(max(0.0, least @ w), max(0.0, least @ w) + 5, 400)
        whole = np.concatenate([np.tile(w, (len(v), 1)), v[:, None]], axis=1)
        return float((np.einsum("ki,ij,kj->k", whole, gram, whole) - reward * v).min())

    ours = _forum_weights(gram, least, reward)
    points = [np.array([i, j, 20 - i - j]) / 20 for i in range(21) for j in range(21 - i)]
    assert ours.min() > -1e-9 and ours.sum() == pytest.approx(1)
    assert value(ours) <= min(map(value, points)) + 1e-3


@pytest.mark.parametrize("method", ["autolambda", "moml", "forum"])
def test_parameters_end_as_they_were(method: str) -> None:
    """Bitwise; only forum leaves a gradient, the others only change the weights."""
    bilevel, w = made(method)
    before = w.detach().clone()
    assert bilevel.ahead().tolist() == pytest.approx([1 / 3] * 3)
    report = bilevel.update_weights(lambda: losses(w, INNER), lambda: losses(w, OUTER), [w], 0.1)
    assert w.detach().equal(before)
    assert (w.grad is not None) == (method == "forum")
    assert bilevel.ahead().equal(report.weights)
    assert report.weights.std() > 0 or method == "forum"  # which may leave the weights, where the outer losses fall anyway
    with pytest.raises(RuntimeError, match="broken"):
        bilevel.update_weights(lambda: losses(w, INNER), lambda: exec("raise RuntimeError('broken')"), [w], 0.1)  # type: ignore[arg-type]
    assert w.detach().equal(before)


@pytest.mark.parametrize("method", ["autolambda", "moml", "forum"])
def test_an_absent_task_is_left_out(method: str) -> None:
    bilevel, w = made(method)
    hole = torch.tensor([1.0, torch.nan, 1.0]).double()

    def inner() -> list[Tensor]:
        return [loss * h for loss, h in zip(losses(w, INNER), hole, strict=True)]

    report = bilevel.update_weights(inner, lambda: losses(w, OUTER), [w], 0.1)
    assert report.absent.tolist() == [0, 1, 0] and report.weights[1] == 0 and report.weights.isfinite().all()
    assert bilevel.state.values["logits"][1] == 1 / 3 and bilevel.absences.tolist() == [0, 1, 0]
    assert w.grad is None or w.grad.isfinite().all()


@pytest.mark.parametrize("method", ["autolambda", "moml", "forum"])
def test_batches_that_share_no_task_leave_the_weights(method: str) -> None:
    bilevel, w = made(method)
    before = bilevel.ahead().clone()

    def absent(scale: Tensor) -> Tensor:
        return torch.where(torch.zeros(3, dtype=torch.bool), losses(w, scale), torch.nan)

    report = bilevel.update_weights(lambda: absent(INNER), lambda: absent(OUTER), [w], 0.1)
    assert report.absent.tolist() == [1, 1, 1] and bilevel.ahead().equal(before)


@pytest.mark.parametrize("method", ["moml", "forum"])
def test_a_task_without_gradient_does_not_stop_the_others(method: str) -> None:
    """It would be all of the least element, which is zero then."""
    bilevel, w = made(method)
    touches, constant = torch.tensor([1.0, 0.0, 1.0]).double(), torch.tensor([0.0, 1.0, 0.0]).double()
    before = bilevel.ahead().clone()
    inner, outer = (lambda table=table: losses(w, table) * touches + constant for table in (INNER, OUTER))
    report = bilevel.update_weights(inner, outer, [w], 0.1)
    assert report.absent.tolist() == [0, 0, 0]
    if method == "moml":
        assert (report.weights - before).abs().max() > 1e-4
    else:
        assert bilevel.state.values["mixture"][1] == 0 and w.grad is not None and w.grad.norm() > 0.1
