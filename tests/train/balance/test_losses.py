"""Methods by losses alone, against autograd and their own definitions (against TorchJD: test_torchjd.py)."""

from __future__ import annotations

import pytest
import torch

from tests.close import assert_near
from train.balance.balancer import Balancer
from train.balance.config import BalanceConfig, of_level
from train.balance.methods import METHODS

NAMES = ["a", "b", "c"]
LOSSES = torch.tensor([0.5, 2.0, 1.2], dtype=torch.float64)


def balancer(method: str, **settings: float) -> Balancer:
    return Balancer(BalanceConfig(method, "loss", settings), NAMES)


def test_random_weights_are_drawn_once_a_step() -> None:
    one, two = balancer("random"), balancer("random")
    torch.manual_seed(1)
    first = one.weights(LOSSES).weights
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert two.weights(LOSSES * 9).weights.equal(first)
    assert torch.get_rng_state().equal(before), "the run's own generator is left alone"
    assert not one.weights(LOSSES).weights.equal(first)
    other = Balancer(BalanceConfig("random"), NAMES, seed=1)
    assert not other.weights(LOSSES).weights.equal(first)
    draws = torch.stack([one.weights(LOSSES).weights for _ in range(200)])
    assert draws.sum(1).allclose(torch.ones(200, dtype=torch.float64))
    assert (draws.mean(0) - 1 / 3).abs().max() < 0.06


@pytest.mark.parametrize("method", [m for m in of_level("loss") if METHODS[m].batches == 1])
def test_ahead_is_what_the_step_then_uses(method: str) -> None:
    """Micro-batches may be run through with it before the step's losses are known; asking changes nothing."""
    own = Balancer(BalanceConfig(method, settings={"window": 1} if method == "dwa" else {}), NAMES)
    for step in range(4):
        known = own.ahead()
        assert (known is not None) == METHODS[method].ahead
        used = own.weights(LOSSES * torch.tensor([1.0, 1 / (1 + step), 1 + step])).weights
        assert known is None or known.equal(used)


@pytest.mark.parametrize("method", [m for m in of_level("loss") if METHODS[m].batches == 1])
@pytest.mark.parametrize("how", ["nan", "no target"])
def test_an_absent_task_is_left_out(method: str, how: str) -> None:
    """Its weight is 0, it is counted, its state stays, and the others are combined as if it did not exist."""
    own = Balancer(BalanceConfig(method, settings={"window": 1} if method == "dwa" else {}), NAMES)
    for _ in range(2):
        own.weights(LOSSES)
    before = {name: value.clone() for name, value in own.state.values.items()}
    losses = LOSSES.clone()
    losses[1] = torch.nan if how == "nan" else 0.0
    report = own.weights(losses, None if how == "nan" else torch.tensor([4, 0, 2]))
    assert report.absent.tolist() == [0, 1, 0] and own.absences.tolist() == [0, 1, 0]
    assert report.weights[1] == 0 and report.weights.isfinite().all() and (report.weights[[0, 2]] > 0).all()
    for name, value in own.state.values.items():
        assert value[1].equal(before[name][1]), name
    if method in ("geometric", "famo"):
        pair = Balancer(BalanceConfig(method), ["a", "c"]).weights(LOSSES[[0, 2]])
        assert_near(report.weights[[0, 2]], pair.weights, 1e-12)


def test_the_weighted_sum_leaves_a_nan_out() -> None:
    """Its gradients stay finite, where losses come apart."""
    w = torch.ones(3, requires_grad=True)
    parts = [w[0] * 2, (w[1] * -1).log(), w[2] * 3]
    own = balancer("equal")
    own.total(parts, own.weights(parts)).backward()
    assert w.grad is not None and w.grad.tolist() == [2.0, 0.0, 3.0]
    assert own.weights([x * torch.nan for x in parts]).weights.tolist() == [0.0, 0.0, 0.0]


def test_famo_does_not_take_an_absent_task_for_a_solved_one() -> None:
    """Without targets in the step that is looked at, a task's loss of zero says nothing; as where it is no number."""
    states = []
    for later, counts in (([1.9, 0.0, 1.0], torch.tensor([5, 0, 4])), ([1.9, torch.nan, 1.0], None), ([1.9, 0.0, 1.0], None)):
        one = balancer("famo", look="next")
        one.weights(torch.tensor([2.0, 2.0, 1.0]), torch.tensor([5, 5, 4]))
        one.after(torch.tensor(later), counts=counts)
        states.append(one.state_dict())
    first, same, other = states
    assert all(value.equal(same[name]) for name, value in first.items())
    assert not all(value.equal(other[name]) for name, value in first.items())
