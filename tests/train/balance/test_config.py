"""Configuration of the balance: what does not exist or does not fit together is refused, and the way out is named."""

from __future__ import annotations

from typing import Any

import pytest

from omni.config import from_dict
from omni.errors import UserError
from train.balance.balancer import Balancer, build
from train.balance.bilevel import Bilevel
from train.balance.config import LEVELS, BalanceConfig
from train.balance.methods import METHODS


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
    assert BalanceConfig(method, settings=settings).values == settings == BalanceConfig.of(method).values
    with pytest.raises(UserError, match=f"balance.settings.temprature is unknown to method {method}"):
        BalanceConfig.of(method, temprature=1.0)
    for name in settings:
        for wrong in (float("nan"), float("inf"), -100.0, True, "much", None):
            with pytest.raises(UserError, match=f"balance.settings.{name} is {wrong!r}"):
                BalanceConfig(method, settings={name: wrong})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"method": "pc_grad"}, "balance.method 'pc_grad' is unknown; the closest names are pcgrad"),
        ({"method": "Nash-MTL"}, "the closest names are nashmtl"),
        ({"method": "pcgrad", "level": "parameter"}, "the closest names are parameters"),
        ({"method": "famo", "level": "parameters"}, "level is 'parameters', which method famo does not have; use loss, or"),
        ({"method": "dwa", "settings": {"temperatur": 1.0}}, "the closest names are temperature"),
        ({"method": "dwa", "settings": {"window": 2.5}}, "balance.settings.window is 2.5; it must be a whole number"),
        ({"method": "dwa", "settings": {"temperature": 0}}, "balance.settings.temperature is 0; it must be above 0"),
        ({"method": "uncertainty", "settings": {"lr": float("inf")}}, "settings.lr is inf; it must be a finite number"),
        ({"method": "gradvac", "settings": {"beta": 1.5}}, "it must be at least 0 and at most 1"),
        ({"method": "mgda", "settings": {"normalize": "l1"}}, "use none or l2 or loss or loss"),
        ({"method": "mgda", "own": "wheighted"}, "balance.own is 'wheighted'; use plain or weighted"),
        ({"method": "dbmtl", "own": "weighted"}, "gives a direction and no weights"),
        ({"method": "equal", "settings": [1]}, "it must be a mapping"),
    ],
)
def test_refusals(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        BalanceConfig(**arguments)


def test_a_file_is_read_strictly() -> None:
    config = from_dict(BalanceConfig, {"method": "cagrad", "level": "parameters", "settings": {"c": 0.4}}, "balance")
    assert config.values == {"c": 0.4, "rescale": 1}
    with pytest.raises(UserError, match="methd"):
        from_dict(BalanceConfig, {"methd": "cagrad"}, "balance")


@pytest.mark.parametrize("tasks", [[], ["a"], [str(i) for i in range(11)]])
def test_the_number_of_tasks_is_checked(tasks: list[str]) -> None:
    with pytest.raises(UserError, match=rf"was given {len(tasks)} tasks; it needs 2 to 10"):
        build(BalanceConfig(), tasks)
