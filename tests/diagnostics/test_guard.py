"""The guard itself: what it leaves alone, what it puts back, and what it says of gradients and caches."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as library
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from omni.diagnostics import GraphError, Guard
from omni.diagnostics.guard import PATIENCE, restored
from omni.diagnostics.trace import Trace
from tests.diagnostics import programs
from tests.diagnostics.programs import WIDTH, data


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    on = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    return [len(h) for h in on] + [len(optimizer._optimizer_step_pre_hooks)]


@pytest.mark.parametrize("how", ["quiet", "traced", "failing", "interrupted"])
def test_nothing_stays_on_after_a_step(how):
    program = programs.token_by_token(True) if how == "failing" else programs.whole_sequence(cached=False)
    functions = (torch.autograd.backward, vars(library.CheckpointFunction).copy(), vars(library).copy())
    guard = Guard(program.model, program.optimizer)
    try:
        with guard.step(trace=how == "traced"):
            assert sum(hooks(program.model, program.optimizer)) > 0
            program.step(0)
            if how == "interrupted":
                raise KeyboardInterrupt
    except (GraphError, KeyboardInterrupt):
        pass
    assert sum(hooks(program.model, program.optimizer)) == 0
    assert _get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert functions == (torch.autograd.backward, dict(vars(library.CheckpointFunction)), vars(library))
    with guard.step():  # not taken for a step within the last one
        assert guard.active is not None


@pytest.mark.parametrize("error", [ValueError("bad data"), RuntimeError("CUDA out of memory"), KeyboardInterrupt()])
def test_other_errors_pass_as_they_are(error):
    guard = Guard(nn.Linear(2, 2))
    with pytest.raises(type(error)) as caught, guard.step():
        raise error
    assert caught.value is error and guard.findings == []


def draw() -> tuple:
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def test_rerun_starts_where_the_step_started_and_puts_everything_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    seen: list = []

    def step() -> None:
        seen.append((draw(), model[1].running_mean.clone(), getattr(model, "kept", None)))
        model.kept = len(seen)
        out = model(data(0))
        optimizer.zero_grad()
        out.mean().backward()
        optimizer.step()
        if len(seen) > 1:
            scale = torch.ones(4, WIDTH)
            loss = (model(data(0)) * scale.requires_grad_(False) * model[0].weight[0]).mean()
            with torch.no_grad():
                model[0].weight.add_(1)
            loss.backward()

    guard.run(step)
    with pytest.raises(GraphError), guard.step():
        step()
    before = (
        [t.clone() for t in (*model.parameters(), *model.buffers())],
        draw(),
        float(optimizer.state_dict()["state"][0]["step"]),
    )
    torch.manual_seed(5)
    after_seed = torch.rand(1)
    torch.manual_seed(5)
    found = guard.rerun(step)
    assert "model[0].weight.add_(1)" in [f.line.code for f in found if f.line is not None]
    assert torch.equal(torch.rand(1), after_seed)
    for a, b in zip(before[0], (*model.parameters(), *model.buffers()), strict=True):
        assert torch.equal(a, b)
    assert float(optimizer.state_dict()["state"][0]["step"]) == before[2]
    (_, *_), second, third = seen
    assert second[0] == third[0] and torch.equal(second[1], third[1]) and second[2] == third[2] == 1


def test_containers_are_put_back():
    model = nn.Linear(2, 2)
    model.rows, model.recent, model.names = [1, 2], deque([3]), {"a": 4}
    rows = model.rows
    with restored(model, None, []):
        rows.append(5)
        model.recent.clear()
        model.names = {}
    assert model.rows is rows and rows == [1, 2] and model.recent == deque([3]) and model.names == {"a": 4}


def test_a_step_that_is_looked_at_leaves_the_optimizers_state_to_the_bit():
    """Also state of another type than the weights', which `load_state_dict` would round."""
    model = nn.Linear(WIDTH, WIDTH).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p]["master"] = torch.rand(p.shape)
    held = {p: of["master"] for p, of in optimizer.state.items()}
    wanted = [master.clone() for master in held.values()]

    def step() -> None:
        optimizer.zero_grad()
        model(data(0).bfloat16()).mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 5.0
        for master in held.values():
            master.add_(1)
        optimizer.state[model.weight]["more"] = 1

    guard = Guard(model, optimizer)
    guard.run(step)
    guard.rerun(step)
    assert [of.keys() for of in optimizer.state.values()] == [{"master", "more"}, {"master"}]
    for master in held.values():
        master.sub_(1)
    assert optimizer.param_groups[0]["lr"] == 5.0
    for p, one in zip(model.parameters(), wanted, strict=True):
        assert optimizer.state[p]["master"] is held[p] and torch.allclose(held[p], one, atol=1e-6)


def test_parameters_without_gradient_and_without_owner():
    model = nn.ModuleDict({"used": nn.Linear(WIDTH, 1), "unused": nn.Linear(WIDTH, 1), "late": nn.Linear(WIDTH, 1)})
    optimizer = torch.optim.SGD([*model["used"].parameters(), *model["unused"].parameters()], lr=0.1)
    model["frozen"] = nn.Linear(1, 1).requires_grad_(False)
    guard = Guard(model, optimizer)

    def step() -> None:
        (model["used"](data(0)) + model["late"](data(0))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    guard.run(step, trace=True)
    lost, owner = guard.findings
    assert (lost.kind, lost.tensor) == ("no_gradient", "unused.weight, unused.bias") and "unused in forward" in lost.message
    assert (owner.kind, owner.tensor) == ("not_owned", "late.weight, late.bias")
    quiet = Guard(model, [optimizer, torch.optim.SGD(model["late"].parameters())], idle=model["unused"].parameters())
    quiet.run(step, trace=True)
    assert quiet.report() == ""


def test_parameters_used_without_recording():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    guard = Guard(model)

    def step() -> None:
        with torch.no_grad():
            hidden = model[0](data(0))
        model[1](hidden).mean().backward()

    guard.run(step, trace=True)
    (finding,) = guard.findings
    assert finding.kind == "no_gradient" and "not recorded" in finding.message and "weight" in finding.tensor
    assert finding.line is not None and finding.line.code == "hidden = model[0](data(0))"


def test_zeros_of_zero_grad_are_no_gradient():
    model = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    for i in range(PATIENCE + 2):
        assert not guard.findings  # parts may take turns
        with guard.step():
            (model[0](data(0)) + (model[1](data(0)) if i == 0 else 0)).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert [(f.kind, f.tensor) for f in guard.findings] == [("no_gradient", "1.weight, 1.bias")]


@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize(
    ("make", "line"),
    [
        (programs.checkpointed_state, "self.seen = 0.5 * self.seen.detach() + key.detach()"),
        (lambda: programs.hook_gone(False), "return out * 2"),
    ],
)
def test_a_part_that_is_repeated_otherwise_shows_in_the_second_step(make, line, run, monkeypatch):
    """Nobody asks for a trace, and no error is raised: steps 2 and 4 of a model with checkpointed parts are traced."""
    traces: list[int] = []

    class Counted(Trace):
        def __init__(self, *args: Any) -> None:
            traces.append(1)
            super().__init__(*args)

    monkeypatch.setattr("omni.diagnostics.guard.Trace", Counted)
    torch.manual_seed(0)
    program = make()
    guard = Guard(program.model, program.optimizer)
    for i in range(6):
        if run:
            guard.run(lambda i=i: program.step(i))
        else:
            with guard.step():
                program.step(i)
        assert [f.kind for f in guard.findings] == ["recompute"] * (i > 0)
    assert guard.findings[0].line is not None and guard.findings[0].line.code == line
    assert len(traces) == 2


@pytest.mark.parametrize("recording", [True, False])
def test_a_cache_that_is_passed_in_and_written_while_gradients_record(recording):
    model, cache = nn.Linear(WIDTH, WIDTH), SimpleNamespace(keys=torch.zeros(4, WIDTH))
    guard = Guard(model)

    def step() -> None:
        key = model(data(0))
        with torch.set_grad_enabled(recording):
            cache.keys[:2] = key[:2]
        (key * 2).sum().backward()

    guard.run(step, {"cache": cache}, trace=True)
    assert [(f.kind, f.tensor) for f in guard.findings] == [("cache", "batch['cache'].keys [4, 8] float32")] * recording
    if recording:
        assert guard.findings[0].line is not None
        assert guard.findings[0].line.code == "cache.keys[:2] = key[:2]"


def test_inference_tensors_in_parameters_and_batch():
    with torch.inference_mode():
        model, batch = nn.Linear(WIDTH, 1), data(0)
    guard = Guard(model)
    with guard.step(batch):
        F.relu(batch)
    assert [(f.kind, f.tensor.split(" ")[0]) for f in guard.findings] == [
        ("inference", "batch"),
        ("inference", "weight"),
        ("inference", "bias"),
    ]


def test_a_mistake_is_reported_once():
    program = programs.reentrant(fixed=False)
    guard = Guard(program.model, program.optimizer)
    for i in range(3):
        with guard.step():
            program.step(i)
    assert len(guard.findings) == 1 and guard.report().count("remedy:") == 1
