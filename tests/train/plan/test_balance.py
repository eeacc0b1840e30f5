"""Laws of planning a balanced run: what is said of memory is what a step takes, and passes are counted as they are made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni.errors import UserError
from omni.tasks import TASKS
from tests.train.plan.test_plan import counted, run, saved, shape
from train.balance.config import BalanceConfig, balanced_tasks
from train.commands.dry_run import Workbench
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.data.config import SourceConfig
from train.distributed.process_group import ProcessGroup
from train.objective.config import ObjectiveConfig
from train.objective.objective import cells, targets
from train.plan.memory import meta_model, worst_batch
from train.plan.plan import pace
from train.trainer.balanced_step import Balancing
from train.trainer.parts import Parts
from train.trainer.step import StepBatches

pytestmark = pytest.mark.usefixtures("forked")
MIX = {"A1T1": 1.0, "A1A2": 1.0, "A1T2": 1.0}


def balanced(method: str, level: str | None = None, micro: int = 1, settings: Any = None, **more: Any) -> FitConfig:
    config = run(micro=micro, **more)
    section = BalanceConfig(method, level, settings or {})
    return replace(config, data=replace(config.data, sources=(SourceConfig("spoken-digits", tasks=MIX),)), balance=section)


@pytest.mark.parametrize(("method", "at"), [("upgrad", "parameters"), ("dbmtl", "parameters"), ("forum", None)])
def test_gradients_by_task_are_counted_and_what_is_not_is_said(method: str, at: str | None) -> None:
    """Three rows, and the same as one table; what is kept of each; of bilevel methods a line."""
    config, model = balanced(method, at), shape()
    found, rows = counted(config, model), 3 * 4.0 * sum(p.numel() for p in meta_model(config, model).parameters())
    assert bool(found.uncounted) == (method == "forum")
    if method != "forum":
        assert found.phases["gradients of tasks"]["working"] == 2 * rows and found.uncounted == ""
        assert found.phases["optimizer"]["balance"] == (rows if method == "dbmtl" else 0)
    two = replace(config, fabric=replace(config.fabric, devices=2, strategy="fsdp"), data=replace(config.data, micro_batches=2))
    assert method != "upgrad" or counted(two, model).phases["gradients of tasks"]["working"] == rows


class OneProcess:
    """The part of Fabric's interface that `Balancing` uses."""

    global_rank, world_size, device = 0, 1, torch.device("cpu")

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_backward_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


def assign_tasks(batch: Batch, config: FitConfig) -> Batch:
    """The batch with its positions given the balanced tasks in turn, so that none is absent."""
    assert config.balance is not None
    numbers = torch.tensor([list(TASKS).index(name) for name in balanced_tasks(config.balance, config.data)])
    return replace(batch, task=numbers[torch.arange(batch.task.numel()) % len(numbers)].view_as(batch.task))


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("method", "level", "micro", "settings"), METHODS)
def test_passes_are_as_many_as_a_step_makes(method: str, level: str | None, micro: int, settings: Any, aligned: bool) -> None:
    config = balanced(method, level, micro, settings, rows=1, length=48)
    config = replace(config, objective=ObjectiveConfig(ctc_weight=0.2 if aligned else 0.0))
    model = replace(shape(width=32, layers=1), ctc=20 if aligned else 0)
    bench = Workbench(config, model)
    batch, section = assign_tasks(worst_batch(config.data, model), config), config.balance
    assert section is not None
    outer, fabric = (batch,) if section.spec.bilevel else (), OneProcess()
    group, streams = ProcessGroup(fabric), bench.objective.model.layout.names  # type: ignore[arg-type]
    parts = Parts(
        bench.objective, lambda *_: iter(()), targets, streams, tuple(TASKS), balanced=balanced_tasks(section, config.data),
        outer=outer,
    )  # fmt: skip
    balancing = Balancing(section, parts, fabric, bench.objective, bench.named, group, micro)  # type: ignore[arg-type]
    forwards = 0

    def count(module: nn.Module, args: Any, out: Any) -> None:
        nonlocal forwards
        forwards += 1

    bench.objective.register_forward_hook(count)
    wanted = targets(batch) * micro
    step = StepBatches([batch] * micro, wanted, 0, 0, 0, 0, cells=cells(batch).double() * micro)
    balancing.take(step, wanted, 1.0, config.optimizer.lr, lambda losses: None)
    after = int(settings.get("look") == "same")  # the look back comes after the optimizer's step
    passes, backwards = section.passes(config.data, config.objective.by_heads, len(model.layout))
    assert forwards == (passes - after) * micro
    assert passes >= backwards >= 1 and (section.spec.bilevel or backwards in (1, 3, 4))


def test_a_pass_ahead_is_counted_where_a_process_has_several_micro_batches() -> None:
    config = balanced("geometric", "loss", 4)
    assert config.balance is not None
    assert [config.balance.passes(config.data, False, 5, world) for world in (1, 2, 4)] == [(2.0, 1.0), (2.0, 1.0), (1.0, 1.0)]


def test_further_passes_take_time_and_are_said() -> None:
    config, model = balanced("upgrad", "parameters"), shape()
    plain, full = (pace(one, meta_model(one, model), 1, 1e12) for one in (replace(config, balance=None), config))
    assert full["seconds"] == pytest.approx(3 * plain["seconds"]) and full["columns"] == plain["columns"]
    assert (full["forwards"], full["backwards"]) == (3, 3) and (plain["forwards"], plain["backwards"]) == (1, 1)


def test_knobs_leave_out_what_a_balance_cannot_have() -> None:
    config, model = balanced("modo", micro=3, rows=4), shape(layers=1)
    found = saved(config, model, 64, cuda=True)
    assert found and all(one.config.data.micro_batches % 3 == 0 for one in found)
    with pytest.raises(UserError, match="one micro-batch|to balance"):
        counted(
            replace(config, data=replace(config.data, sources=(SourceConfig("spoken-digits", tasks={"A1A2": 1.0}),))), model
        )
