"""Methods that TorchJD has too: the same combined gradient from the same losses and gradients, over several steps.

Ours of `pcgrad`, `gradvac`, `imtlg`, `alignedmtl`, `upgrad`, `sdmgrad` and `modo` ask TorchJD for their weights: compared is
what they give it, what they draw, and what they keep between steps. All others are written here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchjd import aggregation as agg
from torchjd import scalarization as scalar

from tests.close import assert_near
from tests.train.balance.backward import backward
from train.balance.balancer import Balancer
from train.balance.config import BalanceConfig
from train.balance.methods import METHODS

NAMES = ["a", "b", "c"]
M, WIDTH, STEPS = len(NAMES), 60, 6
ELSEWHERE = {"gradnorm", "dbmtl", "moco", "autolambda", "moml", "forum", "nashmtl"}
"""TorchJD has none of these, and stops its own Nash-MTL at a residual of 1e-3: for all of them see tests/parity/libmtl.py."""


@dataclass
class Step:
    """What both see of a step: losses before and after it [M], gradients [M, P] (the last ones are trained from), the features
    that they are of [P], and the seed of what is drawn."""

    number: int
    losses: Tensor
    later: Tensor
    jacobians: list[Tensor]
    features: Tensor
    key: int = 0


Theirs = Callable[[Step], Tensor]
"""The combined gradient [P]; remembers what it has seen."""


def by_losses(scalarizer: Callable[[Tensor], Tensor], after: Callable[[Step], object] = lambda step: None) -> Theirs:
    def combine(step: Step) -> Tensor:
        leaf = step.losses.clone().requires_grad_()
        scalarizer(leaf).backward()
        after(step)
        assert leaf.grad is not None
        return leaf.grad @ step.jacobians[-1]

    return combine


def by_gradients(aggregator: agg.Aggregator) -> Theirs:
    return lambda step: aggregator(step.jacobians[-1])


def uncertainty() -> Theirs:
    """Both start at -0.5; theirs learns by torch's Adam."""
    theirs = scalar.UW(M).double()
    theirs.log_var.data.fill_(-0.5)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.1)

    def update_weights(step: Step) -> None:
        adam.step()
        adam.zero_grad()

    return by_losses(theirs, update_weights)


def dwa() -> Theirs:
    """An epoch of theirs is a window of two steps."""
    theirs = scalar.DWA(temperature=1.5)
    return by_losses(theirs, lambda step: theirs.step() if step.number % 2 else None)


def stch() -> Theirs:
    """Of log losses over their means in two steps, whose log losses are trained."""
    seen: list[Tensor] = []

    def scalarizer(values: Tensor) -> Tensor:
        if len(seen) < 2:
            seen.append(values.detach())
            return values.log().sum()
        return scalar.STCH(0.3, torch.ones(M))((values / torch.stack(seen).mean(0)).log()) * M

    return by_losses(scalarizer)


def famo() -> Theirs:
    theirs = scalar.FAMO(M).double()
    return by_losses(theirs, lambda step: theirs.update(step.later))


def mgda(kind: str) -> Theirs:
    """Frank and Wolfe's weights of the divided gradients, run to the end, for the given ones."""
    theirs = agg.MGDAWeighting(epsilon=1e-11, max_iters=5000)

    def combine(step: Step) -> Tensor:
        rows = step.jacobians[-1]
        size = {"none": torch.ones(M), "l2": rows.norm(dim=1), "loss": step.losses, "loss+": rows.norm(dim=1) * step.losses}
        divided = rows / size[kind][:, None]
        return theirs(divided @ divided.T) @ rows

    return combine


def graddrop() -> Theirs:
    """Theirs is what follows once the features' signs are in; draws of both are fp32."""
    theirs = agg.GradDrop(leak=torch.full((M,), 0.2))
    return lambda step: theirs((step.jacobians[-1] * step.features.sign()).float()) * step.features.sign()


def of_two_batches(weighting: Callable[[Tensor], Tensor]) -> Theirs:
    return lambda step: weighting(step.jacobians[0] @ step.jacobians[1].T) @ step.jacobians[2]


@dataclass(frozen=True)
class Case:
    """A method of ours with its settings, and TorchJD's.

    Attributes:
        factor: ours over theirs.
        bound: where theirs ends before the last digits.
    """

    method: str
    theirs: Callable[[], Theirs]
    settings: dict[str, Any] = field(default_factory=dict)
    factor: float = 1.0
    bound: float = 1e-5


CASES = [
    Case("equal", lambda: by_losses(scalar.Sum())),
    Case("uncertainty", uncertainty, {"lr": 0.1}),
    Case("dwa", dwa, {"window": 2, "temperature": 1.5}),
    Case("random", lambda: by_losses(lambda values: scalar.Random()(values.float()))),  # draws of both are fp32
    Case("geometric", lambda: by_losses(scalar.GeometricMean())),
    Case("stch", stch, {"mu": 0.3, "warmup": 2}),
    Case("famo", famo),
    # Theirs sum to 1, ours to M. Our first step only measures, as theirs does with a warm-up of one step; without one it learns
    # at once, by the risks as they are, which the paper divides by those of the beginning (section 3.2).
    Case("excessmtl", lambda: by_gradients(agg.ExcessMTL(0.2, n_warmup_steps=1)), {"step_size": 0.2}, factor=M),
    *(Case("mgda", lambda kind=kind: mgda(kind), {"normalize": kind}) for kind in ("none", "l2", "loss", "loss+")),  # type: ignore[misc]
    Case("pcgrad", lambda: by_gradients(agg.PCGrad())),
    Case("gradvac", lambda: by_gradients(agg.GradVac(0.3)), {"beta": 0.3}),
    Case("graddrop", graddrop, {"leak": 0.2}),
    Case("cagrad", lambda: by_gradients(agg.CAGrad(0.4)), {"c": 0.4, "rescale": 0}, bound=1e-3),
    Case("imtlg", lambda: by_gradients(agg.IMTLG())),
    *(
        Case("alignedmtl", lambda mode=mode: by_gradients(agg.AlignedMTL(scale_mode=mode)), {"scale": mode})  # type: ignore[misc]
        for mode in ("min", "median", "rmse")
    ),
    Case("fairgrad", lambda: by_gradients(agg.FairGrad(2.0)), {"alpha": 2.0}, bound=1e-4),
    Case("upgrad", lambda: by_gradients(agg.UPGrad())),
    Case("sdmgrad", lambda: of_two_batches(agg.SDMGradWeighting(lr=0.5, lambda_=0.4)), {"lr": 0.5, "preference": 0.4}),
    Case("modo", lambda: of_two_batches(agg.MoDoWeighting(gamma=2e-3, rho=5.0)), {"gamma": 2e-3, "rho": 5.0}),
]
AT = [(case, level) for case in CASES for level in METHODS[case.method].levels]


def step_of(number: int) -> Step:
    """Gradients as long as the features are wide, more or less; some conflict, some agree."""
    g = torch.Generator().manual_seed(number)
    common = torch.randn(WIDTH, generator=g)
    jacobians = [torch.randn(M, WIDTH, generator=g) + 0.3 * torch.randn(M, 1, generator=g) * common for _ in range(3)]
    losses = 0.8 + torch.rand(M, generator=g)
    later = losses * (0.8 + 0.3 * torch.rand(M, generator=g))
    return Step(number, losses.double(), later.double(), [j.double() for j in jacobians], torch.randn(WIDTH, generator=g))


def linear(losses: Tensor, jacobian: Tensor, features: Tensor) -> list[Tensor]:
    """Losses of these values and gradients by the features."""
    return [loss + (features - features.detach())[0] @ row for loss, row in zip(losses, jacobian, strict=True)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("case", "level"), AT, ids=[" ".join([c.method, level, *(str(v) for v in c.settings.values())]) for c, level in AT]
)
def test_ours_is_torchjds(case: Case, level: str) -> None:
    """Draws of both start at the seed of our step."""
    theirs = case.theirs()
    own, seen = Balancer(BalanceConfig(case.method, level, case.settings), NAMES, seed=5), []
    for number in range(STEPS):
        step = step_of(number)
        step.key = own.method_input(step.losses, torch.ones(M, dtype=torch.bool), None, ()).key
        theta = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        features = (theta + step.features)[None]
        first, second, last = [linear(step.losses, jacobian, features) for jacobian in step.jacobians]
        others = [first, second] if METHODS[case.method].batches == 3 else []
        backward(own, last, [theta], others=others, features=[features])
        own.after(step.later)
        with torch.random.fork_rng([]):
            torch.manual_seed(step.key)
            wanted = theirs(step).double()
        assert theta.grad is not None
        assert_near(theta.grad, case.factor * wanted, case.bound, f"step {number}")
        seen.append(torch.linalg.lstsq(step.jacobians[-1].T, theta.grad).solution)
    if case.method != "equal":
        assert torch.stack(seen).std(0).max() > 1e-3 * torch.stack(seen).abs().max(), "weights that stand still show nothing"


def test_every_method_is_compared_with_code_of_others() -> None:
    assert {case.method for case in CASES} | ELSEWHERE == set(METHODS)
