"""Laws of MEND's networks and statistics, against slow references."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from omni.edit.config import Sides, TransformConfig
from omni.edit.mend import GradientTransform, Statistics
from omni.errors import UserError
from tests.close import assert_near


def samples(n: int, size: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, size, generator=g) * torch.linspace(0.1, 3, size) + 1


def noisy(transform: GradientTransform) -> GradientTransform:
    torch.manual_seed(4)
    with torch.no_grad():
        for p in transform.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return transform


def test_running_statistics_are_those_of_all_samples():
    """In pieces, one alone and none among them; against torch's own on all at once."""
    statistics, x = Statistics(6), samples(40, 6)
    for low, high in ((0, 1), (1, 1), (1, 2), (2, 17), (17, 40)):
        statistics.update(x[low:high])
    assert int(statistics.count) == 40
    assert_near(statistics.mean, x.double().mean(0), 1e-6)
    wanted = (x.double() - x.double().mean(0)) / (x.double().std(0) + 1e-7)
    assert_near(statistics.normalise(x), wanted, 1e-5)


def test_statistics_hold_no_graph_and_stop_no_gradient():
    """They are fed with what requires gradients, twice before one backward, and in place."""
    statistics, x = Statistics(4), samples(5, 4).requires_grad_()
    outputs = []
    for _ in range(2):
        statistics.update(x * 2)
        outputs.append(statistics.normalise(x * 2))
    assert not any(buffer.requires_grad for buffer in statistics.buffers())
    sum(out.square().sum() for out in outputs).backward()
    assert x.grad is not None and x.grad.abs().min() > 0
    addresses = [buffer.data_ptr() for buffer in statistics.buffers()]
    statistics.update(x)
    assert addresses == [buffer.data_ptr() for buffer in statistics.buffers()]


def by_hand(transform: GradientTransform, x: Tensor, delta: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """Of one token, with loops: normalised, then through each layer."""

    def normalise(statistics: Statistics, value: Tensor) -> Tensor:
        std = (statistics.squares / (statistics.count - 1)) ** 0.5
        return (value - statistics.mean) / (std + 1e-7)

    def layers(net, value: Tensor) -> Tensor:
        for layer in net.layers if net is not None else []:
            y = layer.u @ (layer.v @ value) + layer.bias
            y = y * layer.scale[mode] + layer.shift[mode]
            y = torch.tensor([max(0.0, float(part)) for part in y])
            value = y + value if layer.residual else y
        return value

    x, delta = normalise(transform.x_statistics, x), normalise(transform.delta_statistics, delta)
    if transform.both is not None:
        both = layers(transform.both, torch.cat([x, delta]))
        return both[: len(x)], both[len(x) :]
    return layers(transform.x_net, x), layers(transform.delta_net, delta)


@pytest.mark.parametrize("init", ["id", "xavier"])
@pytest.mark.parametrize("sides", get_args(Sides))
def test_a_transform_is_its_formula(sides, init):
    transform = noisy(GradientTransform(6, 4, TransformConfig(sides, hidden=2, rank=3, init=init), modes=2))
    x, delta = samples(9, 6), samples(9, 4, 1)
    transform(x, delta, 0)
    transform.eval()
    with torch.no_grad():
        got_x, got_delta = transform(x, delta, 1)
        other = transform(x, delta, 0)
        for token in range(9):
            wanted_x, wanted_delta = by_hand(transform, x[token], delta[token], 1)
            assert_near(got_x[token], wanted_x, 1e-5)
            assert_near(got_delta[token], wanted_delta, 1e-5)
    changed = [not torch.equal(a, b) for a, b in zip((got_x, got_delta), other, strict=True)]
    wanted = {"x_only": [True, False], "delta_only": [False, True], "one_sided": [False, True]}  # 6 inputs, 4 outputs
    assert changed == wanted.get(sides, [True, True])


def test_it_begins_as_the_identity_of_what_is_normalised():
    transform = GradientTransform(6, 4, TransformConfig(rank=3), modes=1)
    x, delta = samples(9, 6), samples(9, 4, 1)
    got_x, got_delta = transform(x, delta, 0)
    assert_near(got_x, (x - x.mean(0)) / x.std(0), 1e-4)
    assert_near(got_delta, (delta - delta.mean(0)) / delta.std(0), 1e-4)


def test_tokens_without_input_or_gradient_are_left_out():
    transform = noisy(GradientTransform(6, 4, TransformConfig(rank=3)))
    x, delta = samples(5, 6), samples(5, 4, 1)
    x[1], delta[3], delta[4, 0] = 0, 0, 0
    got_x, _ = transform(x.view(1, 5, 6), delta.view(1, 5, 4))
    assert len(got_x) == 3 and int(transform.x_statistics.count) == int(transform.delta_statistics.count) == 3
    empty_x, empty_delta = transform(x, torch.zeros(5, 4))
    assert empty_x.shape == (0, 6) and empty_delta.shape == (0, 4)


def test_evaluation_leaves_statistics_alone_and_needs_some():
    transform = GradientTransform(6, 4, TransformConfig(rank=3)).eval()
    with pytest.raises(UserError, match=r"the statistics of MEND rest on 0 tokens; fit it first"):
        transform(samples(3, 6), samples(3, 4))
    transform.train()(samples(3, 6), samples(3, 4))
    before = {name: buffer.clone() for name, buffer in transform.named_buffers()}
    transform.eval()(samples(3, 6, 7), samples(3, 4, 7))
    assert all(torch.equal(buffer, before[name]) for name, buffer in transform.named_buffers())
    GradientTransform(6, 4, TransformConfig(rank=3, norm=False)).eval()(samples(3, 6), samples(3, 4))
