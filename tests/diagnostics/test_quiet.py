"""No false alarms: real steps of our own model, and what looks like a mistake and is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from omni.diagnostics import Guard
from omni.diagnostics.held import held_by, held_in
from omni.model.kv_cache import FunctionalKVCache
from omni.model.recompute import Recompute
from omni.model.speech_model import SpeechModel
from tests.diagnostics.programs import WIDTH, data
from tests.train.objective.test_objective import MODELS, make_examples, pack
from train.config.sections import OptimizerConfig
from train.objective.config import ObjectiveConfig
from train.objective.objective import Objective, targets
from train.optim.optimizer import Average, build_optimizer, set_trainable


class Run:
    """Steps of our objective as the loop takes them: micro-batches, clipping, optimizer, running average."""

    def __init__(self, name: str, checkpointing: Recompute, trainable: list[str], dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        self.model = SpeechModel(MODELS[name])
        self.model.set_checkpointing(checkpointing)
        set_trainable(self.model, trainable)
        weight = 0.3 if self.model.config.ctc and trainable == ["*"] else 0.0
        self.objective = Objective(self.model, ObjectiveConfig(ctc_weight=weight))
        learning = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = build_optimizer(learning, OptimizerConfig(lr=1e-3))
        self.average = Average(learning, 0.9)
        examples = make_examples(self.model, ["A1A2", "T1T2", "A1T1", "T1A2"])
        self.batches = [pack(self.model, [examples[:2], examples[2:]], 96), pack(self.model, [examples[1:3], examples[:1]], 96)]
        self.dtype = dtype
        left = () if weight else ("alignment_head",)
        self.idle = [p for n, p in self.model.named_parameters() if n.startswith(left)] if left else []

    def step(self, i: int) -> None:
        denominators = sum((targets(batch) for batch in self.batches), torch.zeros(()))
        for batch in self.batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is not None):
                losses = self.objective(batch, denominators)
            losses.total.backward()
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(i + 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("trace", [False, True], ids=["watched", "traced"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"], ids=["plain", "checkpointed", "selective"])
@pytest.mark.parametrize(("name", "trainable"), [("codec2", ["*"]), ("codec2", ["decoder.*"]), ("mini-omni", ["*"])])
def test_our_own_steps_give_no_findings(name, trainable, checkpointing, dtype, trace):
    run = Run(name, checkpointing, trainable, dtype)
    guard = Guard(run.objective, run.optimizer, idle=run.idle)
    for i in range(2):
        with guard.step(run.batches, trace=trace):
            run.step(i)
    assert guard.report() == ""
    assert run.model.decoder.blocks[0].mlp.up.weight.requires_grad


class Count(TorchDispatchMode):
    """Operations of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_a_watched_step_is_cheap():
    """It copies buffers and batch, and leaves the step's own operations as they are; the benchmarks measure the time."""
    counts = []
    for watched in (False, True):
        run = Run("codec2", False, ["*"])
        guard = Guard(run.objective, run.optimizer, idle=run.idle)
        with Count() as count:
            if watched:
                with guard.step(run.batches):
                    run.step(0)
            else:
                run.step(0)
        counts.append(count.operations)
    plain, watched = counts
    held = 2 + sum(1 for _ in [*held_by(run.objective), *held_in(run.batches, "")])
    assert plain < watched <= plain + 3 * held < 1.3 * plain


def test_gradient_accumulation_over_steps_of_the_guard():
    """A part that only the second micro-batch uses has its gradient when the optimizer steps."""
    model = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    for i in range(4):
        with guard.step(data(i), last=i % 2 == 1):
            model[i % 2](data(i)).mean().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert guard.report() == ""


def test_training_through_a_functional_cache():
    model = nn.Linear(WIDTH, 2 * WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    for i in range(2):
        cache = FunctionalKVCache(1)
        with guard.step((data(i), cache), trace=True):
            for t in range(3):
                k, v = model(data(t)).view(1, 1, 4, 2 * WIDTH).chunk(2, dim=-1)
                cache.begin_forward(torch.arange(4)[None] + 4 * t)
                keys, values = cache.update(0, k, v)
            (keys * values).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.report() == ""


class Everything(nn.Module):
    """Batch norm, dropout in place, weight norm, a view of a parameter, a counter and a kept constant, all checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.table = nn.Parameter(torch.ones(2, WIDTH))
        self.row = self.table[0]
        self.calls, self.constant = 0, None
        self.register_buffer("count", torch.zeros(()))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        if self.constant is None:
            self.constant = torch.ones(WIDTH)
        y = nn.functional.dropout(self.norm(x), 0.3, self.training)
        return torch.relu_(self.old(self.linear(y) * self.constant))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) * self.table[0] + self.table[1]


@pytest.mark.parametrize("trace", [False, True], ids=["watched", "traced"])
def test_harmless_state(trace):
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    target = copy.deepcopy(nn.Linear(2, 2))  # a model beside the one that learns
    guard = Guard(model, optimizer)
    kept = torch.zeros(())
    for i in range(3):
        with guard.step({"x": data(i), "mask": torch.ones(4, dtype=torch.bool)}, trace=trace):
            loss = model(data(i)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.no_grad():
                target.weight.mul_(0.9)
                kept += loss
    assert guard.report() == ""
