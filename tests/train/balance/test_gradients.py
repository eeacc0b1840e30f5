"""Methods by gradients: closed forms, invariances, and one backward for all levels on a small network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.close import assert_near
from tests.train.balance.backward import backward
from train.balance.balancer import Balancer
from train.balance.config import BalanceConfig, of_level
from train.balance.methods import METHODS
from train.balance.rows import Rows

NAMES = ["a", "b", "c"]
LOSSES = torch.tensor([0.5, 2.0, 1.2])
BY_PARAMETERS = [m for m in of_level("parameters") if m != "forum"]


def rows(seed: int = 0, tasks: int = 3, width: int = 40) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(width, generator=g)
    return torch.randn(tasks, width, generator=g) + torch.randn(tasks, 1, generator=g) * common


def combine(method: str, table: Tensor, losses: Tensor = LOSSES, steps: int = 1, **settings: Any) -> tuple[Tensor, Any]:
    """The combined gradient after a number of steps with the same rows, and the last report."""
    balancer = Balancer(BalanceConfig(method, "parameters", settings), NAMES[: len(table)])
    others = [Rows(table) for _ in range(METHODS[method].batches - 1)]
    for _ in range(steps):
        p = nn.Parameter(torch.zeros(table.shape[1], dtype=table.dtype))
        report = balancer.combine(losses[: len(table)], Rows(table), [p], others=others)
    assert p.grad is not None
    return p.grad, report


@pytest.mark.parametrize("method", ["mgda", "pcgrad", "gradvac", "cagrad", "imtlg", "alignedmtl", "upgrad"])
def test_directions_grow_with_the_gradients(method: str) -> None:
    """Weights do not depend on a common scale."""
    direction, report = combine(method, rows(1))
    for scale in (64.0, 2.0**-20, 2.0**45):
        large, scaled = combine(method, scale * rows(1))
        assert_near(scaled.weights, report.weights, 1e-5)
        assert_near(large / scale, direction, 1e-5)


def test_excessmtl_outlives_a_first_step_without_measure() -> None:
    """A risk a million times that of the first step takes all weight, and what is no number stays out."""
    balancer = Balancer(BalanceConfig("excessmtl", "parameters"), NAMES[:2])
    for step in range(4):
        table = rows(1, 2) * torch.tensor([1.0, 1.0 if step else 1e-9])[:, None]
        report = balancer.combine(LOSSES[:2], Rows(table), [nn.Parameter(torch.zeros(40))])
        assert report.weights.isfinite().all() and float(report.weights.sum()) == pytest.approx(2)
    assert report.weights.tolist() == pytest.approx([0.0, 2.0], abs=1e-6)


@pytest.mark.parametrize("method", BY_PARAMETERS)
def test_an_absent_task_is_left_out(method: str) -> None:
    """A nan loss or row, or no target: the others' gradient is that of the others alone; the state of the absent one stays."""
    balancer = Balancer(BalanceConfig(method, "parameters"), NAMES)
    pair = Balancer(BalanceConfig(method, "parameters"), ["a", "c"])
    table, kept = rows(6), torch.tensor([0, 2])
    others = METHODS[method].batches - 1
    p, q = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(40))
    table[1] = torch.nan
    report = balancer.combine(LOSSES, Rows(table), [p], others=[Rows(table)] * others)
    wanted = pair.combine(LOSSES[kept], Rows(table[kept]), [q], others=[Rows(table[kept])] * others)
    assert report.absent.tolist() == [0, 1, 0] and report.weights[1] == 0 and report.norms[1].isnan()
    assert p.grad is not None and q.grad is not None and p.grad.isfinite().all()
    if method not in ("pcgrad", "gradvac", "moco", "sdmgrad", "modo"):  # what is drawn; weights that start at 1 / tasks
        assert_near(p.grad, q.grad, 1e-5)
        assert_near(report.weights[kept], wanted.weights, 1e-5)
    for name, value in balancer.state.values.items():
        initial = {"weights": {"excessmtl": 1.0}.get(method, 1 / 3)}.get(name, 0.0)
        assert (value[1] == initial).all(), name
    balancer.combine(LOSSES, Rows(rows(7)), [p], others=[Rows(rows(8))] * others)
    assert p.grad.isfinite().all() and balancer.absences.tolist() == [0, 1, 0]


@pytest.mark.parametrize("own", ["plain", "weighted"])
@pytest.mark.parametrize("method", BY_PARAMETERS)
def test_a_task_that_does_not_touch_the_shared_part_has_no_say(method: str, own: str) -> None:
    """The others' direction is that of the others alone; what it has for itself is trained by its own loss."""
    if own == "weighted" and not METHODS[method].linear:
        return
    table, kept = rows(6), torch.tensor([0, 2])
    table[1] = 0.0
    balancer = Balancer(BalanceConfig(method, "parameters", own=own), NAMES)
    pair = Balancer(BalanceConfig(method, "parameters", own=own), ["a", "c"])
    others = METHODS[method].batches - 1
    p, q, head = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(3))
    report = balancer.combine(LOSSES, Rows(table), [p], [head], torch.eye(3), others=[Rows(table)] * others)
    wanted = pair.combine(LOSSES[kept], Rows(table[kept]), [q], others=[Rows(table[kept])] * others)
    assert report.zero.tolist() == [0, 1, 0] and report.absent.tolist() == [0, 0, 0] and report.weights[1] == 0
    assert report.figures(NAMES)["zero/b"] == 1 and report.norms[1] == 0
    assert p.grad is not None and q.grad is not None and head.grad is not None
    expected = torch.where(report.zero == 1, 1.0, report.weights) if own == "weighted" else torch.ones(3)
    assert_near(head.grad, expected.float(), 1e-6)
    if method != "moco":  # whose weights start at 1 / tasks
        assert_near(p.grad, q.grad, 1e-5)
        assert_near(report.weights[kept], wanted.weights, 1e-5)


@pytest.mark.parametrize("method", of_level("features"))
def test_nobody_touches_the_shared_part(method: str) -> None:
    """No direction, and no state moves."""
    balancer = Balancer(BalanceConfig(method, "features"), NAMES)
    choice, report = balancer.choose(LOSSES.double(), None, Rows(torch.zeros(3, 8)))
    assert report.zero.tolist() == [1, 1, 1] and not report.weights.any() and not balancer.state.values
    assert choice.combine(Rows(torch.zeros(3, 8))).tolist() == [0] * 8


@pytest.mark.parametrize("method", ["nashmtl", "fairgrad"])
@pytest.mark.parametrize("level", ["features", "parameters"])
def test_opposite_gradients_cancel(method: str, level: str) -> None:
    """Of a, -a and b with weights in the thousands: neither of the first two may lose."""
    table = torch.tensor([[1.0, 2, 3], [-1, -2, -3], [1, -1, 0]])
    shared, own = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    features = shared[None].expand(3, 3)
    losses = [(features[i] * row).sum() + (own * row).sum() for i, row in enumerate(table)]
    balancer = Balancer(BalanceConfig(method, level, {"max_norm": 0.0} if method == "nashmtl" else {}), NAMES)
    report = backward(balancer, losses, [shared], [own], features=[features])
    assert shared.grad is not None and shared.grad.norm() > 0.9
    assert (table @ shared.grad).min() > -1e-3 and report.weights.max() < 1e5


class Net(nn.Module):
    """An encoder that the tasks share, and a head each."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.encoder = nn.Linear(5, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in NAMES)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g)

    def forward(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        features = self.encoder(x).tanh()
        return [(head(features)[:, 0] - y[:, i]).square().mean() for i, head in enumerate(self.heads)], features


def example() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(9)
    return torch.randn(7, 5, generator=g), torch.randn(7, 3, generator=g)


@pytest.mark.parametrize(
    ("level", "own"), [("loss", "plain"), ("features", "plain"), ("parameters", "plain"), ("parameters", "weighted")]
)
def test_linear_methods_learn_the_weighted_losses(level: str, own: str) -> None:
    """Shared parameters learn sum of weight * loss; the own ones the plain sum, or (loss, weighted) the same."""
    method = {"loss": "geometric"}.get(level, "nashmtl")
    net, (x, y) = Net(), example()
    shared, heads = list(net.encoder.parameters()), list(net.heads.parameters())
    losses, features = net(x, y)
    report = backward(Balancer(BalanceConfig(method, level, own=own), NAMES), losses, shared, heads, features=[features])
    losses, _ = net(x, y)
    weighted = sum(w * loss for w, loss in zip(report.weights.float(), losses, strict=True))
    for p, wanted in zip(shared, torch.autograd.grad(weighted, shared, retain_graph=True), strict=True):  # type: ignore[arg-type]
        assert p.grad is not None
        assert_near(p.grad, wanted, 1e-5)
    total = weighted if own == "weighted" or level == "loss" else sum(losses)
    for p, wanted in zip(heads, torch.autograd.grad(total, heads), strict=True):  # type: ignore[arg-type]
        assert p.grad is not None
        assert_near(p.grad, wanted, 1e-5)
    assert report.weights.std() > 1e-3


@pytest.mark.parametrize("method", BY_PARAMETERS)
def test_gathered_gradients_are_the_direct_ones(method: str) -> None:
    """One backward per task and micro-batch, each through its own forward, gives what one graph gives."""
    (x, y), m = example(), METHODS[method].batches
    one, two = Net().double(), Net().double()
    batches = [(x.double() + i, y.double()) for i in range(m)]
    shared, heads = list(one.encoder.parameters()), list(one.heads.parameters())
    direct = Balancer(BalanceConfig(method, "parameters"), NAMES)
    losses = [one(*batch)[0] for batch in batches]
    report = backward(direct, losses[-1], shared, heads, others=losses[:-1])
    balancer = Balancer(BalanceConfig(method, "parameters"), NAMES)
    shared_two, heads_two = list(two.encoder.parameters()), list(two.heads.parameters())
    gathered = []
    for x_, y_ in batches:
        halves = [
            lambda task, a=a, b=b: two(a, b)[0][task] * len(a) / 7
            for a, b in ((x_[:3], y_[:3]), (x_[3:], y_[3:]))
        ]  # fmt: skip
        gathered.append(balancer.gather(halves, shared_two, heads_two))
    table, rest, values = gathered[-1]
    again = balancer.combine(values, table, shared_two, heads_two, rest, others=[g[0] for g in gathered[:-1]])
    assert_near(again.weights, report.weights, 1e-5)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_near(q.grad, p.grad, 1e-5)
