"""Wrong training programs of many styles: the line that is to be changed has a name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from omni.diagnostics import Finding, GraphError, Guard
from tests.diagnostics.programs import WIDTH, Program, data, train
from tests.diagnostics.test_correct import sgd


class Masked(nn.Module):
    """Layers under a decaying mask, checkpointed; `how` the mask comes to them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def part(self, layer: nn.Module, x: Tensor, mask: Any) -> Tensor:
        return (layer(x) * (mask["mask"] if isinstance(mask, dict) else mask)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH)
        for layer in self.layers:
            if self.how == "keyword":
                x = checkpoint(self.part, layer, x, mask=mask, use_reentrant=False)
            elif self.how == "partial":
                x = checkpoint(functools.partial(self.part, layer, mask=mask), x, use_reentrant=False)
            elif self.how == "closure":
                x = checkpoint(lambda x, layer=layer: self.part(layer, x, mask), x, use_reentrant=False)  # noqa: B023
            else:
                x = checkpoint(self.part, layer, x, {"mask": mask}, use_reentrant=False)
            mask *= 0.9
        return x


def masked(how: str) -> Program:
    model = Masked(how)
    return train(model, lambda i: model(data(i).requires_grad_()).square().mean())


def weights_put_back() -> Program:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    average = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss = checkpoint(model, data(i), use_reentrant=False).square().mean()
        model.load_state_dict(average)
        loss.backward()
        optimizer.step()

    return Program(model, optimizer, step)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> None:
        return None


def no_gradient() -> Program:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return train(model, lambda i: model[1](Nothing.apply(model[0](data(i)))).mean())


SILENT: dict[str, tuple[Callable[[], Program], str, str]] = {
    **{how: (lambda how=how: masked(how), "recompute", "mask *= 0.9") for how in ("keyword", "partial", "closure", "dict")},
    "weights": (weights_put_back, "recompute", "model.load_state_dict(average)"),
    "nothing": (no_gradient, "no_gradient", ""),
}


@pytest.mark.parametrize("name", SILENT)
def test_wrong_gradients_without_an_error_are_found_without_being_asked_for_a_trace(name: str) -> None:
    make, kind, line = SILENT[name]
    program = make()
    guard = Guard(program.model, program.optimizer)
    for i in range(3):
        with guard.step():
            program.step(i)
    assert [finding.kind for finding in guard.findings] == [kind]
    place = guard.findings[0].line
    assert (place.code if place is not None else "") == line


class Trainer:
    """A loop of the user's own that carries something from step to step."""

    def __init__(self) -> None:
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.optimizer = sgd(self.layer)
        self.guard = Guard(self.layer, self.optimizer)
        self.state: Any = None
        self.total: Any = 0.0

    def on_itself(self, i: int) -> Tensor:
        out, self.state = self.layer(data(i)[None], self.state)
        return out.mean()

    def summed(self, i: int) -> Tensor:
        loss = self.layer(data(i)[None])[0].mean()
        self.total += loss
        return self.total / 2

    def train(self, how: str) -> Finding:
        loss = getattr(self, how)
        for i in range(3):
            with self.guard.step():
                self.optimizer.zero_grad()
                loss(i).backward()
                self.optimizer.step()
        raise AssertionError("nothing failed")


def in_a_variable(trainer: Trainer) -> None:
    state = None
    for i in range(3):
        with trainer.guard.step():
            out, state = trainer.layer(data(i)[None], state)
            out.mean().backward()


CARRIED = {
    "on_itself": "out, self.state = self.layer(data(i)[None], self.state)",
    "summed": "self.total += loss",
    "in_a_variable": "out, state = trainer.layer(data(i)[None], state)",
}


@pytest.mark.parametrize("how", CARRIED)
def test_who_carries_a_graph_from_step_to_step(how: str) -> None:
    trainer = Trainer()
    with pytest.raises(GraphError) as error:
        in_a_variable(trainer) if how == "in_a_variable" else trainer.train(how)
    (finding,) = error.value.findings
    assert finding.kind == "freed" and "carries the graph" in finding.message and "detach" in finding.remedy
    assert finding.line is not None and finding.line.code == CARRIED[how]


def test_a_tensor_of_autocast_that_is_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[0](data(0)).exp()
            hidden[:, 0] = 0
            F.relu(model[1](hidden)).float().mean().backward()

    guard = Guard(model, sgd(model))
    with pytest.raises(GraphError) as error:
        guard.run(step)
    (finding,) = error.value.findings
    assert finding.line is not None and finding.line.code == "hidden[:, 0] = 0" and "fill_" in finding.message
    assert Path(finding.line.file).name == Path(__file__).name


def test_a_loop_that_went_on_before_a_part_is_repeated() -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def loss(i: int) -> Tensor:
        x = data(i)
        for layer in layers:
            x = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)  # noqa: B023
        return x.mean()

    program = train(layers, loss)
    guard = Guard(program.model, program.optimizer)
    for i in range(2):
        with guard.step():
            program.step(i)
    kinds = {(finding.kind, finding.line.code if finding.line else "") for finding in guard.findings}
    line = "x = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)  # noqa: B023"
    assert (
        kinds == {("recompute", line)} and "uses 2.bias when it is repeated" in guard.report() and "bind what" in guard.report()
    )


@pytest.mark.parametrize("kind", ["list", "mapping", "object"])
def test_values_that_a_part_reads(kind: str) -> None:
    model = nn.Linear(WIDTH, 1)
    held: Any = {"list": [1.0], "mapping": {0: 1.0}, "object": types.SimpleNamespace(scale=1.0)}[kind]

    def part(x: Tensor) -> Tensor:
        return (model(x) * (held.scale if kind == "object" else held[0])).tanh()

    def loss(i: int) -> Tensor:
        out = checkpoint(part, data(i), use_reentrant=False).mean()
        if kind == "object":
            held.scale *= 0.5
        else:
            held[0] *= 0.5
        return out

    program = train(model, loss)
    guard = Guard(program.model, program.optimizer)
    for i in range(2):
        with guard.step():
            program.step(i)
    (finding,) = guard.findings
    assert finding.kind == "recompute" and "through none of its tensors" in finding.message
    assert finding.line is not None and finding.line.code.startswith("return (model(x) * (held.scale")
