"""The hook between encoder and decoder: one backward gives what one backward per task gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.close import assert_near
from tests.train.balance.backward import backward
from train.balance.balancer import Balancer, FeatureHook
from train.balance.config import BalanceConfig, of_level

NAMES = ["a", "b", "c"]
TASK = torch.tensor([0, 0, 1, 1, 1, 2, 2, -1])


class Net(nn.Module):
    """Encoder, hook, decoder; every position belongs to a task. The losses [m] are shares of the means over all positions."""

    def __init__(self, hook: FeatureHook | None = None, checkpointing: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.hook, self.checkpointing = hook, checkpointing
        g = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g)

    def forward(self, x: Tensor, task: Tensor = TASK) -> Tensor:
        features = self.features = checkpoint(self.encoder, x, use_reentrant=False) if self.checkpointing else self.encoder(x)
        hooked = features if self.hook is None else self.hook(features, task)
        out = checkpoint(self.decoder, hooked, use_reentrant=False) if self.checkpointing else self.decoder(hooked)
        loss = (out[:, 0].float() - 1).square()
        return torch.stack([loss[task == t].sum() / (t == TASK).sum() for t in range(3)])


def inputs() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", of_level("features"))
def test_one_backward_gives_what_one_per_task_gives(method: str, checkpointing: bool) -> None:
    hook = FeatureHook(Balancer(BalanceConfig(method, "features"), NAMES))
    one, two = Net(hook, checkpointing), Net()
    losses = one(inputs())
    hook.losses = losses.detach()
    losses.sum().backward()
    direct = Balancer(BalanceConfig(method, "features"), NAMES)
    losses = two(inputs())
    report = backward(direct, losses, list(two.encoder.parameters()), list(two.decoder.parameters()), features=[two.features])
    assert hook.report is not None
    assert_near(hook.report.weights, report.weights, 1e-5)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_near(p.grad, q.grad, 1e-5)


def test_bf16() -> None:
    """Under autocast the gradient that arrives is bf16: rows are summed in fp32, and weights come near the fp32 ones."""
    weights = []
    for half in (False, True):
        hook = FeatureHook(Balancer(BalanceConfig("nashmtl", "features"), NAMES))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            net = Net(hook)
            losses = net(inputs())
        assert net.features.dtype == (torch.bfloat16 if half else torch.float32)
        losses.sum().backward()
        assert hook.report is not None
        weights.append(hook.report.weights)
    assert_near(weights[1], weights[0], 0.05)


def test_micro_batches_move_the_state_once() -> None:
    """The last one's choice is by all of the step's rows, as if it had been one batch."""
    config = BalanceConfig("excessmtl", "features", {"step_size": 0.5})
    whole, parts = FeatureHook(Balancer(config, NAMES)), FeatureHook(Balancer(config, NAMES))
    for _ in range(2):
        Net(whole)(inputs()).sum().backward()
        for low, high, last in ((0, 3, False), (3, 8, True)):
            parts.last = last
            Net(parts)(inputs()[low:high], TASK[low:high]).sum().backward()
    assert parts.balancer.steps == 2 and parts.report is not None and whole.report is not None
    assert_near(parts.report.weights, whole.report.weights, 1e-5)
    for name, value in whole.balancer.state.values.items():
        assert_near(parts.balancer.state.values[name], value, 1e-5, name)


def test_tasks_without_features_or_targets_are_absent() -> None:
    """They take no part in the choice (a row of zeros would be the least combination of all)."""
    hook = FeatureHook(Balancer(BalanceConfig("mgda", "features"), NAMES))
    losses = Net(hook)(inputs(), torch.where(TASK == 1, -1, TASK))
    losses[[0, 2]].sum().backward()
    assert hook.report is not None and hook.report.absent.tolist() == [0, 1, 0]
    assert float(hook.report.weights.sum()) == pytest.approx(1)
    hook.counts = torch.tensor([1, 1, 0])
    Net(hook)(inputs()).sum().backward()
    assert hook.report.absent.tolist() == [0, 0, 1] and hook.report.weights[2] == 0


def test_a_scaler_and_no_gradient() -> None:
    grads: list[Any] = []
    for scale in (1.0, 512.0):
        hook = FeatureHook(Balancer(BalanceConfig("fairgrad", "features"), NAMES))
        hook.scale, net = scale, Net(hook)
        (net(inputs()).sum() * scale).backward()
        grads.append(net.encoder.weight.grad)
    assert_near(grads[1], 512 * grads[0], 1e-5)
    with torch.no_grad():
        assert Net(hook)(inputs()).requires_grad is False
