"""A whole training step on a GPU that is not there: nothing in it makes the host wait, and how much it launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor

from omni.config import ModelConfig, preset
from omni.model.recompute import Recompute
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from tests import waits
from tests.test_recompute import EVERY, gradients_of, made
from tests.waits import FakeGPU
from train.balance.balancer import build
from train.balance.config import BalanceConfig
from train.config.parse import read_fit_config
from train.config.sections import FabricConfig, OptimizerConfig
from train.data.batching.batch import computed_once
from train.data.config import PackingConfig
from train.distributed.fabric import build_fabric
from train.distributed.process_group import ProcessGroup
from train.objective.config import ObjectiveConfig
from train.objective.objective import GraphLosses, Losses, Objective, TaskLosses, cells_by_task, targets
from train.optim.optimizer import Average, build_optimizer
from train.plan.memory import worst_batch
from train.trainer.logs import HighestLosses
from train.trainer.metrics import StepMetrics
from train.trainer.parts import StepBatches
from train.trainer.step import PlainStep

GPU = torch.device("cuda")
HALF_B = replace(preset("qwen2-0.5b-omni"), ctc=30)
LACKING = {"cumsum", "put_", "histc", "kthvalue", "median", "scatter_reduce", "_ctc_loss", "_ctc_loss_backward", "bincount"}
"""Operators without a deterministic form on a GPU (`torch.use_deterministic_algorithms`), errors in deterministic runs."""
LAYERS = HALF_B.decoder.layers, HALF_B.encoder.layers


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    monkeypatch.setattr("omni.model.attention._ampere", lambda device: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr("torch.nn.functional.ctc_loss", ctc_loss)
    monkeypatch.setattr("torch.utils._foreach_utils._foreach_supported_types", [Tensor, nn.Parameter, FakeTensor])
    with FakeGPU() as mode:
        yield mode


def ctc_loss(scores: Tensor, ids: Tensor, frames: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    """A stand-in: torch's has no form without values."""
    assert scores.is_cuda and ids.is_cuda and not frames.is_cuda and not lengths.is_cuda
    return scores.sum()


class OnGPU:
    """What a step asks of Fabric."""

    device = GPU

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def backward(self, loss: Tensor) -> None:
        waits.backward(loss, self.monkeypatch)

    def clip_gradients(self, module: nn.Module, optimizer: Any, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm, error_if_nonfinite=error_if_nonfinite)

    def no_backward_sync(self, module: Any) -> Any:
        return nullcontext()


class InHalf(nn.Module):
    """An objective in bf16-mixed, as Fabric wraps it."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, *given: Any) -> Losses:
        with torch.autocast("cuda", torch.bfloat16):
            losses: Losses = self.objective(*given)
        return losses


class Steps:
    """A run of mini-omni's last stage over the fullest batches of 2 x 2,048 columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shape: ModelConfig, rule: str, recompute: Recompute) -> None:
        config = read_fit_config(["mini-omni/stage3"])[0]
        data = replace(config.data, packing=PackingConfig(rows=2, length=2048), alignment="letters")
        self.batch = worst_batch(data, shape)
        with GPU:
            model = SpeechModel(shape)
        model.set_checkpointing(recompute)
        named = list(model.named_parameters())
        optimizer = build_optimizer(named, replace(config.optimizer, name=rule), "bf16-mixed")
        self.average = Average(named, 0.99)
        module = InHalf(Objective(model, ObjectiveConfig(ctc_weight=0.2)))
        group = ProcessGroup(SimpleNamespace(global_rank=0, world_size=1))  # type: ignore[arg-type]
        meter = StepMetrics(tuple(TASKS), shape.layout.names, GPU, group)
        fabric: Any = OnGPU(monkeypatch)
        highest = HighestLosses(20, Path(), group)
        self.step = PlainStep(
            fabric, module, optimizer, optimizer, group, meter, lambda progress: (), SimpleNamespace(clip=1.0), highest
        )

    def take(self, micro_batches: int) -> None:
        counts = targets(self.batch).long() * micro_batches
        self.step(StepBatches([self.batch] * micro_batches, counts, 1.0, 1.0, 0.0, 0), 1.0)
        self.average.update(1)


def shallow(decoder: int, encoder: int) -> ModelConfig:
    return replace(HALF_B, decoder=replace(HALF_B.decoder, layers=decoder), encoder=replace(HALF_B.encoder, layers=encoder))


@pytest.mark.parametrize(
    ("rule", "recompute", "layers"),
    [
        ("adamw", False, (1, 1)),
        *(pytest.param("muon", recompute, (1, 1), marks=pytest.mark.long) for recompute in EVERY),
        pytest.param("adamw", False, LAYERS, marks=pytest.mark.long),
    ],
)
def test_nothing_in_a_step_waits_for_the_gpu(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, rule: str, recompute: Recompute, layers: tuple[int, int]
) -> None:
    steps, launched = Steps(monkeypatch, shallow(*layers), rule, recompute), []
    for micro_batches in (1, 1, 2)[: 3 if layers == LAYERS else 2]:  # the first step also makes the optimizer's state
        with gpu.counting() as (found, copies):
            steps.take(micro_batches)
        launched.append(gpu.launched.total())
        assert found == []
        assert len(copies) < 40 * micro_batches and not LACKING & set(gpu.launched)
    if layers == LAYERS:
        _, one, two = launched
        print(f"{two - one} operators a micro-batch, {2 * one - two} besides")
        assert two - one == pytest.approx(4000, rel=0.1)  # docs/training.md


@pytest.mark.long
@pytest.mark.parametrize("losses", ["with graphs", "of one task", "by mean"])
def test_nothing_in_a_balanced_pass_waits(losses: str, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method itself reads losses or gradients; what it is given must not wait once more."""
    steps = Steps(monkeypatch, shallow(1, 1), "adamw", False)
    cell, ratio = cells_by_task(["A1A2", "A1T1"], list(TASKS), len(HALF_B.layout)), None
    if losses == "by mean":
        ratio = torch.full(cell.shape, 0.5)
    weights = torch.tensor([0.0, 1.0, 1.0]) if losses == "of one task" else torch.ones(3)
    of_tasks = (GraphLosses if losses == "with graphs" else TaskLosses)(cell, weights, ratio)
    with gpu.counting() as (found, _):
        out = steps.step.module(steps.batch.to(GPU), targets(steps.batch).to(GPU, non_blocking=True), 1.0, of_tasks)
        waits.backward(out.total, monkeypatch)
    assert found == []


@pytest.mark.long
def test_no_gradient_of_a_task_waits_for_the_gpu(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level parameters: a forward and backward pass for each task, before the method reads the gradients' products."""
    steps, names = Steps(monkeypatch, shallow(1, 1), "adamw", False), ["A1A2", "A1T1"]
    balancer: Any = build(BalanceConfig("upgrad"), names)
    cell, counts = cells_by_task(names, list(TASKS), len(HALF_B.layout)), targets(steps.batch)
    batch, module = steps.batch.to(GPU), steps.step.module

    def of_task(task: int) -> Tensor:
        weights = torch.nn.functional.one_hot(torch.tensor(task), 3)
        total: Tensor = module(batch, counts.to(GPU, non_blocking=True), 1.0, TaskLosses(cell, weights)).total
        return total

    with gpu.counting() as (found, _):
        balancer.gather([of_task], list(module.parameters()), run=lambda loss: waits.backward(loss, monkeypatch))
    assert found == []


def test_what_waits_is_found(gpu: FakeGPU) -> None:
    with gpu.counting() as (found, copies):
        there = torch.zeros(3).to(GPU, non_blocking=True)
        assert (found, len(copies), gpu.launched.total()) == ([], 1, 1)
        there.cpu()
        with pytest.raises(DynamicOutputShapeException):
            there.nonzero()
    assert found == ["aten._to_copy.default"]


@pytest.mark.parametrize("recompute", EVERY)
def test_backward_without_an_engine_is_autograd_s(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, batch = made()
    wanted = gradients_of(objective, batch, recompute)
    objective.zero_grad()
    loss = objective(batch, targets(batch)).total
    waits.backward(loss, monkeypatch)
    found = [p.grad for p in objective.parameters() if p.grad is not None]
    assert len(found) == len(wanted) - 1 and all(map(torch.equal, found, wanted[1:]))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fabric_hands_on_what_the_host_has_found(precision: Any) -> None:
    _, batch = made()
    batch = batch.to("cpu")
    names = [name for name, value in vars(type(batch)).items() if isinstance(value, computed_once)]
    (given,) = build_fabric(FabricConfig("cpu", 1, precision=precision)).strategy.precision.convert_input((batch,))
    assert given is not batch and len(names) > 5 and set(vars(batch.known)) >= {*names} - {"_segments"}
    assert all(getattr(given, name) is getattr(batch, name) for name in vars(batch.known))
    assert not vars(replace(batch, task=batch.task).known)


@pytest.mark.cuda
@pytest.mark.parametrize("recompute", EVERY)
def test_nothing_in_a_step_waits_on_a_gpu(recompute: Recompute) -> None:
    objective, batch = made()
    batch.transcripts = [[] for _ in batch.transcripts]  # the alignment loss waits
    objective.model.set_checkpointing(recompute)
    fabric = build_fabric(FabricConfig("gpu", 1, precision="bf16-mixed"))
    fabric.launch()
    module = fabric.setup_module(objective)
    named = list(objective.model.named_parameters())
    optimizer = build_optimizer(named, OptimizerConfig(), "bf16-mixed")
    stepper: Any = fabric.setup_optimizers(optimizer)
    average, group = Average(named, 0.99), ProcessGroup(fabric)
    meter = StepMetrics(tuple(TASKS), objective.model.layout.names, fabric.device, group)
    highest = HighestLosses(20, Path(), group)
    step = PlainStep(fabric, module, optimizer, stepper, group, meter, lambda progress: (), SimpleNamespace(clip=1.0), highest)
    given = StepBatches([batch.pin_memory()], targets(batch).long(), 1.0, 1.0, 0.0, 0)
    step(given, 1.0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(given, 1.0)
        average.update(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.figures()["loss"] > 0
