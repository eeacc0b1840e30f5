"""Laws of planning a balanced run: what is said of memory is what a step takes, and passes are counted as they are made."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from omni.errors import UserError
from tests.train.plan.test_plan import MIB, run, shape
from train.balance.section import BalanceSection
from train.config.run import FitConfig
from train.data.config import SourceConfig
from train.objective.config import ObjectiveConfig
from train.objective.objective import targets
from train.plan.balanced import assign_tasks, passes_of
from train.plan.balanced_trial import balance_of
from train.plan.estimate import estimate, phases_of, sharded
from train.plan.knobs import try_knobs
from train.plan.pace import pace
from train.plan.parameters import meta_model
from train.plan.step import build_workbench, take_step
from train.plan.trial import attempt
from train.plan.worst_batch import worst_batch

pytestmark = pytest.mark.usefixtures("forked")
MIX = {"A1T1": 1.0, "A1A2": 1.0, "A1T2": 1.0}


def balanced(method: str, level: str | None = None, micro: int = 1, settings: Any = None, **more: Any) -> FitConfig:
    config = run(micro=micro, **more)
    section = BalanceSection(method, level, settings or {})
    return replace(config, data=replace(config.data, sources=(SourceConfig("spoken-digits", tasks=MIX),)), balance=section)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "level", "micro", "rows"),
    [
        ("upgrad", "features", 2, 8),
        pytest.param("dbmtl", "parameters", 1, 2, marks=pytest.mark.long),
        pytest.param("forum", None, 1, 2, marks=pytest.mark.long),
    ],
)
def test_a_balanced_step_takes_what_is_said(method: str, level: str | None, micro: int, rows: int) -> None:
    config, model = balanced(method, level, micro, rows=rows, length=128), shape(width=384, layers=2)
    wanted, found = attempt(config, model, micro, "cpu").peak, estimate(config, model).total
    assert found == pytest.approx(wanted, rel=0.15), (found / MIB, wanted / MIB)


@pytest.mark.long
def test_gradients_by_task_and_what_is_kept_are_counted_by_hand() -> None:
    model = shape()
    config = balanced("upgrad", "parameters")
    shared = 4.0 * sum(p.numel() for n, p in meta_model(config, model).named_parameters() if "_head." not in n)
    own = 4.0 * sum(p.numel() for n, p in meta_model(config, model).named_parameters() if "_head." in n)
    gathered = phases_of(config, model, 1, cuda=False)["balance"]
    assert gathered["balance"] == pytest.approx(6 * (shared + own), rel=0.01)  # three rows, and the same as one table
    kept = phases_of(balanced("dbmtl"), model, 1, cuda=False)["optimizer"]["balance"]
    assert kept == pytest.approx(3 * shared, rel=0.01)
    assert phases_of(config, model, 1, cuda=False)["optimizer"]["balance"] < 0.01 * shared
    spread_out = sharded("balance", gathered, meta_model(config, model), 2, (4, 4, False))
    assert spread_out["balance"] == gathered["balance"] / 2


METHODS = [
    ("equal", None, 2, {}),
    ("stch", None, 1, {}),
    ("stch", None, 2, {}),
    ("famo", None, 2, {"look": "same"}),
    ("famo", None, 1, {}),
    ("upgrad", "features", 2, {}),
    ("upgrad", "parameters", 2, {}),
    ("modo", None, 3, {}),
    ("autolambda", None, 1, {}),
    ("moml", None, 1, {}),
    ("forum", None, 1, {"inner_steps": 3}),
]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("method", "level", "micro", "settings"), METHODS)
def test_passes_are_as_many_as_a_step_makes(method: str, level: str | None, micro: int, settings: Any, aligned: bool) -> None:
    config = balanced(method, level, micro, settings, rows=1, length=48)
    config = replace(config, objective=ObjectiveConfig(ctc_weight=0.2 if aligned else 0.0))
    model = replace(shape(width=32, layers=1), ctc=20 if aligned else 0)
    bench = build_workbench(config, model)
    batch = worst_batch(config.data, model)
    batch = replace(batch, task=assign_tasks(batch.task, config))
    bench.balance = balance_of(bench, config, batch, micro, torch.device("cpu"))
    forwards = 0

    def count(module: nn.Module, args: Any, out: Any) -> None:
        nonlocal forwards
        forwards += 1

    bench.objective.register_forward_hook(count)
    take_step(bench, [batch] * micro, targets(batch) * micro, 1)
    after = int(settings.get("look") == "same")  # the look back comes after the optimizer's step
    wanted, backwards = passes_of(config, len(model.layout))
    assert forwards == (wanted - after) * micro
    assert config.balance is not None
    assert wanted >= backwards >= 1 and (config.balance.kind.bilevel or backwards in (1, 3, 4))


def test_a_pass_ahead_is_counted_where_a_process_has_several_micro_batches() -> None:
    config = balanced("geometric", "loss", 4)
    assert [passes_of(config, 5, world) for world in (1, 2, 4)] == [(2.0, 1.0), (2.0, 1.0), (1.0, 1.0)]


def test_further_passes_take_time_and_are_said() -> None:
    config, model = balanced("upgrad", "parameters"), shape()
    plain, full = (
        pace(one, meta_model(one, model), ([], "no data"), worst_batch(one.data, model), 1, speed=1e12)
        for one in (replace(config, balance=None), config)
    )
    assert full.seconds == pytest.approx(3 * plain.seconds) and full.columns == plain.columns  # type: ignore[operator]
    assert (full.forwards, full.backwards) == (3, 3) and (plain.forwards, plain.backwards) == (1, 1)


def test_knobs_leave_out_what_a_balance_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = balanced("modo", micro=3), shape(layers=1)
    totals = (SimpleNamespace(total=2.0**-i) for i in itertools.count())  # each knob saves
    monkeypatch.setattr("train.plan.knobs.estimate", lambda *given: next(totals))
    alone, row = try_knobs(config, model, 0.0, cuda=True)
    assert len(alone) > 3 and all(one.knob.config.data.micro_batches % 3 == 0 for one in [*alone, *row])
    with pytest.raises(UserError, match="one micro-batch|to balance"):
        estimate(
            replace(config, data=replace(config.data, sources=(SourceConfig("spoken-digits", tasks={"A1A2": 1.0}),))), model
        )
