"""Configuration of the balance: what does not exist or does not fit together is refused, and the way out is named."""

from __future__ import annotations

import pytest

from omni.errors import UserError
from train.balance.balancer import Balancer
from train.balance.bilevel import Bilevel, build
from train.balance.config import BalanceConfig
from train.balance.methods import METHODS
from train.balance.registry import LEVELS


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_made_at_its_levels_and_refused_at_the_others(method: str) -> None:
    for level in LEVELS:
        if level in METHODS[method].levels:
            made = build(BalanceConfig(method, level), ["a", "b"])
            assert isinstance(made, Bilevel if method in ("autolambda", "moml", "forum") else Balancer)
        else:
            with pytest.raises(UserError, match=rf"balance.level is '{level}', which method {method} does not have; use"):
                BalanceConfig(method, level)
    assert BalanceConfig(method).at == METHODS[method].levels[0]


@pytest.mark.parametrize("method", METHODS)
def test_settings(method: str) -> None:
    """Defaults are within their own bounds; what is not a setting of the method is refused."""
    settings = {name: setting.default for name, setting in METHODS[method].settings.items()}
    assert BalanceConfig(method, settings=settings).values == settings == BalanceConfig(method).values
    with pytest.raises(UserError, match=f"balance.settings.temprature is unknown to method {method}"):
        BalanceConfig(method, settings={"temprature": 1.0})
    for name in settings:
        for wrong in (float("nan"), float("inf"), -100.0, True, "much", None):
            with pytest.raises(UserError, match=f"balance.settings.{name} is {wrong!r}"):
                BalanceConfig(method, settings={name: wrong})


@pytest.mark.parametrize("tasks", [[], ["a"], [str(i) for i in range(11)]])
def test_the_number_of_tasks_is_checked(tasks: list[str]) -> None:
    with pytest.raises(UserError, match=rf"was given {len(tasks)} tasks; it needs 2 to 10"):
        build(BalanceConfig(), tasks)
