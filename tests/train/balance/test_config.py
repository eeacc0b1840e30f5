"""`balance:` in a configuration: what it names, and what is refused when it is read, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni.errors import UserError
from tests.train.balance.toys import balanced_config, balanced_fit, balanced_parts
from train.balance.balancer import Balancer, Bilevel, build
from train.balance.config import BalanceConfig, balanced_tasks
from train.balance.methods import METHODS
from train.balance.registry import LEVELS
from train.config.parse import read_fit_config
from train.data.config import DataConfig, SourceConfig
from train.data.sources.mixture import Stage

RECIPE = "configs/nano-balance.yaml"
WITH = [RECIPE, "--balance.method"]


def test_a_recipe_and_its_overrides() -> None:
    config, _ = read_fit_config([*WITH, "cagrad", "--balance.level", "parameters", "--balance.settings", "{c: 0.2}"])
    assert config.balance is not None
    assert (config.balance.method, config.balance.at, config.balance.values["c"]) == ("cagrad", "parameters", 0.2)
    assert balanced_tasks(config.balance, config.data) == ["A1T1", "A1A2", "T1A2"]
    assert read_fit_config(["configs/nano.yaml"])[0].balance is None


def test_tasks_are_those_of_all_sources_and_stages() -> None:
    data = DataConfig(
        sources=(
            SourceConfig("spoken-digits", tasks={"A1T1": 1.0, "T1A1": 0.0}),
            SourceConfig("spoken-digits", tasks={"T1T2": 1.0}, stages=(Stage(10, {"A1T2": 1.0}),)),
        )
    )
    assert balanced_tasks(BalanceConfig(), data) == ["A1T1", "A1T2", "T1T2"]
    assert balanced_tasks(BalanceConfig("mgda", "features"), data) == ["A1T1", "A1T2"]
    assert balanced_tasks(BalanceConfig(names=("T1T2", "A1T1")), data) == ["A1T1", "T1T2"]
    assert balanced_tasks(BalanceConfig(tasks="streams"), data) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["mgda", "--balance.level", "loss"], "balance.level is 'loss', which method mgda does not have"),
        (["upgrad", "--balance.separate", "['*']"], "balance.separate is ['*'], which is for methods that take a gradient of"),
        (["equal", "--balance.names", "[A1T1, T1T2]"], "balance.names has T1T2, but no source has that task"),
        (["upgrad", "--fabric.precision", "16-mixed"], "may overflow under fabric.precision 16-mixed"),
        (
            ["moml", "--data.micro_batches", "4", "--fabric.devices", "2"],
            "data.micro_batches is 4 and fabric has 2 process(es); make data.micro_batches 2",
        ),
    ],
)
def test_what_does_not_combine_is_refused_when_it_is_read(options: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_fit_config([*WITH, *options])
    assert words in str(caught.value)


def test_data_without_two_tasks_that_ask_by_speech() -> None:
    data = DataConfig(sources=(SourceConfig("spoken-digits", tasks={"A1T1": 1.0, "T1A2": 1.0}),))
    with pytest.raises(UserError, match=r"features.*\b1 task.*\(A1T1\)"):
        balanced_tasks(BalanceConfig("mgda"), data)


def test_two_levels_need_held_out_rows(tmp_path: Path) -> None:
    data = DataConfig(sources=(SourceConfig("spoken-digits", tasks={"A1T1": 1.0, "A1A2": 1.0}),))
    config = balanced_config(tmp_path, BalanceConfig("moml"), data=data)
    with pytest.raises(UserError, match="judges by held-out rows, and the run has none"):
        balanced_fit(config, balanced_parts(config, outers=0))


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
