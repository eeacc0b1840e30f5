"""A balance that is stored and loaded goes on bitwise where it stood, absent tasks and draws included."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.balance.balancer import Balancer, Bilevel, build
from train.balance.config import BalanceConfig
from train.balance.methods import METHODS
from train.balance.rows import Rows

NAMES = ["a", "b", "c"]
SETTINGS: dict[str, dict[str, Any]] = {"dwa": {"window": 2}, "stch": {"warmup": 3}, "forum": {"inner_steps": 2}}


def step(balancer: Balancer | Bilevel, number: int) -> list[Tensor]:
    """What a step of random losses and gradients leaves; task b is absent from every third."""
    g = torch.Generator().manual_seed(number)
    losses, method = torch.rand(3, generator=g) + 0.5, balancer.config.method
    counts = torch.tensor([3, number % 3, 5])
    if isinstance(balancer, Bilevel):
        w = nn.Parameter(torch.rand(4, generator=g))
        tables = [torch.randn(3, 4, generator=g) for _ in range(2)]
        report = balancer.update_weights(*(lambda t=t: (t @ w).square() + losses for t in tables), [w], lr=0.1)
        return [report.weights, w.detach()] + ([w.grad] if w.grad is not None else [])
    if balancer.config.at == "loss":
        report = balancer.weights(losses, counts)
        balancer.after(losses * 0.9)
        return [report.weights]
    rows = [Rows(torch.randn(3, 20, generator=g)) for _ in range(METHODS[method].batches)]
    if balancer.config.at == "features":
        choice, report = balancer.choose(losses.double(), counts, rows[0])
        return [report.weights, choice.combine(rows[0].take(report.absent == 0))]
    p = nn.Parameter(torch.zeros(20))
    report = balancer.combine(losses, rows[-1], [p], counts=counts, others=rows[:-1])
    assert p.grad is not None
    return [report.weights, p.grad]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("method", "level"), [(m, level) for m in METHODS for level in METHODS[m].levels])
def test_resuming_is_bitwise(method: str, level: str) -> None:
    config = BalanceConfig(method, level, SETTINGS.get(method, {}))
    whole, first, second = (build(config, NAMES, seed=7) for _ in range(3))
    wanted = [step(whole, i) for i in range(8)]
    for i in range(4):
        step(first, i)
    state = first.state_dict()
    assert all(type(value) is Tensor for value in state.values()), "plain tensors only"
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    second.load_state_dict(torch.load(stored, weights_only=True))
    step(first, 9)  # what is stored is a copy
    for i in range(4, 8):
        for ours, theirs in zip(step(second, i), wanted[i], strict=True):
            assert ours.equal(theirs)
    assert second.absences.equal(whole.absences) and second.steps == whole.steps == 8
