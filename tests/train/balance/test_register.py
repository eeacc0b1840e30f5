"""A balance method from outside of the package: one function, registered, is trained, stored and refused like those inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.config import from_dict
from omni.errors import UserError
from tests.train.balance.test_absent import poisoned
from tests.train.balance.test_resume import test_resuming_is_bitwise as check_that_resuming_is_bitwise
from tests.train.balance.toys import balanced_config, balanced_fit, balanced_parts
from tests.train.toys import toy_fit
from train.balance.balancer import Balancer
from train.balance.bilevel import BilevelStep, OuterGradient
from train.balance.config import BalanceConfig
from train.balance.registry import METHODS, Setting, register_method
from train.balance.rows import MethodChoice, MethodInput
from train.trainer.logs import BALANCE, read_table


@pytest.fixture
def registered() -> Iterator[None]:
    """A method of each kind, for one test."""
    before = dict(METHODS)

    @register_method("inverse", "loss", settings={"power": Setting(1.0, low=0.0, high=2.0)})
    def inverse(given: MethodInput) -> MethodChoice:
        """Weights losses by their inverse, smoothed over steps."""
        mean = given.get("mean", 0.0)
        mean = torch.where(given.count() == 1, given.losses, (mean + given.losses) / 2)
        given.set("mean", mean)
        return MethodChoice(mean ** -given.settings["power"])

    @register_method("loudest", "features", "parameters", losses=lambda settings: True)
    def loudest(given: MethodInput) -> MethodChoice:
        """Follows the gradient of the task of the largest loss."""
        return MethodChoice((given.losses == given.losses.max()).double())

    @register_method(
        "still",
        "loss",
        settings={"lr": Setting(0.1)},
        batches=2,
        ahead=True,
        bilevel=True,
        passes=lambda m, rest, s: (2.0, 1.0),
    )
    def still(step: BilevelStep) -> OuterGradient:
        """Follows the held-out losses themselves."""
        losses = step.values(step.outer)
        present = losses.isfinite()
        return OuterGradient(losses[present], present, None)

    yield
    METHODS.clear()
    METHODS.update(before)


def moved(folder: Path, section: BalanceConfig | None) -> Tensor:
    """How far three steps move the weights."""
    config = balanced_config(folder, section)
    start = balanced_parts(config).objective.state_dict()
    found = balanced_fit(config)
    return torch.cat([(found[f"model.{name}"] - t).flatten() for name, t in start.items() if t.is_floating_point()])


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("method", "level"), [("inverse", "loss"), ("loudest", "features"), ("loudest", "parameters"), ("still", "loss")]
)
def test_a_run_is_balanced_by_it(tmp_path: Path, method: str, level: str) -> None:
    names = ("A1T1", "A1A2") if level == "features" else ()
    found = moved(tmp_path / "own", BalanceConfig(method, level, names=names))
    assert found.isfinite().all() and not found.equal(moved(tmp_path / "plain", None))
    rows = read_table(tmp_path / "own" / BALANCE)
    assert [row["step"] for row in rows] == [1, 2, 3]
    weights = torch.tensor([[value for name, value in row.items() if name.startswith("weight/")] for row in rows])
    if method == "loudest":
        assert (weights.sum(1) == 1).all() and weights.max() == 1
    else:
        assert (weights > 0).all() and not weights[0].equal(weights[1])


@pytest.mark.usefixtures("registered")
def test_it_resumes_bitwise() -> None:
    for method, level in (("inverse", "loss"), ("loudest", "parameters"), ("still", "loss")):
        check_that_resuming_is_bitwise(method, level)


@pytest.mark.usefixtures("registered")
def test_the_configuration_knows_it(tmp_path: Path) -> None:
    section = from_dict(BalanceConfig, {"method": "inverse", "settings": {"power": 0.5}}, "balance")
    assert section.at == "loss" and section.values == {"power": 0.5}
    with pytest.raises(UserError, match="balance.settings.power is 3.0; it must be at least 0 and at most 2"):
        BalanceConfig("inverse", settings={"power": 3.0})
    with pytest.raises(UserError, match="balance.method 'invers' is unknown; did you mean 'inverse'"):
        BalanceConfig("invers")
    assert section.passes(balanced_config(tmp_path, section).data, False, 5) == (2.0, 1.0)
    assert BalanceConfig("still").passes(balanced_config(tmp_path, BalanceConfig("still")).data, False, 5) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda given: MethodChoice(given.losses.log() / 0), r"odd returned weights \[nan, nan\] for losses \[1.0, 1.0\]"),
        (lambda given: given.settings["absent"], "odd failed with KeyError"),
    ],
)
def test_a_method_that_breaks_its_word_is_named(monkeypatch: pytest.MonkeyPatch, choose: Any, said: str) -> None:
    monkeypatch.setitem(METHODS, "odd", None)  # type: ignore[arg-type]
    register_method("odd", "loss")(choose)
    with pytest.raises(UserError, match=said):
        Balancer(BalanceConfig("odd"), ["a", "b"]).choose(torch.ones(2, dtype=torch.float64), None)


@pytest.mark.parametrize("method", ["equal", "uncertainty"])
def test_a_run_whose_losses_are_no_numbers_ends(tmp_path: Path, method: str) -> None:
    config = balanced_config(tmp_path, BalanceConfig(method))
    parts = balanced_parts(config)
    for at in range(3):
        parts = poisoned(parts, at)
    with pytest.raises(UserError, match="norm of all 3 steps is nan"):
        toy_fit(config, parts)
