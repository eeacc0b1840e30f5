"""Patches that are silently ignored: instance-level forwards, and modules that are read and not called."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import accelerate
import pytest
import torch
from torch import nn

from omni.diagnostics import Guard
from tests.diagnostics.programs import WIDTH, data, dispatch, edited_copy


def test_a_copy_of_a_dispatched_model_is_edited_in_vain():
    model, edited, x = edited_copy()
    guard = Guard(edited)
    with guard.expect_changed(edited[2], edited[2].weight):
        assert torch.equal(edited(x), model(x)), "the law of this test: the edit is ignored"
    (finding,) = guard.findings
    assert (finding.kind, finding.module) == ("patch", "2")
    assert "bound to another module" in finding.what and "functional_call" in finding.remedy
    assert finding.place is not None and finding.place.file == "tests/diagnostics/programs.py"
    assert finding.place.code == "def new_forward(*args: Any, **kwargs: Any) -> Any:"


class LoRA(nn.Module):
    """As in kohya's scripts: beside a module whose `forward` it keeps."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.low, self.base = nn.Linear(WIDTH, WIDTH), base.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x)


def turned(other: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return forward(other(x))


def by_weight(weight: torch.Tensor, other: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.linear(other(x), weight)


@pytest.mark.parametrize("partly", [False, True])
def test_a_step_tells_of_a_copy_that_is_edited_in_vain(partly):
    """Without being asked: no weight of the copy takes part, or only the patched layer's do not."""
    _, edited, x = edited_copy()
    module, path = (edited, "2") if partly else (edited[2], "")
    guard = Guard(module)
    for _ in range(2):
        with guard.step(x), torch.no_grad():
            edited(x)
    (finding,) = guard.findings
    assert (finding.kind, finding.module) == ("patch", path)
    assert finding.tensor == ("2.weight, 2.bias" if partly else "weight, bias")
    assert finding.place is not None and finding.place.code == "def new_forward(*args: Any, **kwargs: Any) -> Any:"


def test_forwards_that_use_the_modules_own_weights_are_no_patch():
    """Wrapped, handed on to a part or to the whole, and accelerate's own, which copies well."""
    wrapped = nn.Linear(WIDTH, WIDTH)
    dispatch(wrapped)
    down = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    down.forward = down[0].forward
    tied, source = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    tied.weight, tied.forward = source.weight, source.forward
    hooked = accelerate.hooks.add_hook_to_module(nn.Linear(WIDTH, WIDTH), accelerate.hooks.ModelHook())
    lora, rotary, held = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    lora.forward = LoRA(lora).forward
    rotary.forward = functools.partial(turned, nn.Linear(WIDTH, WIDTH), rotary.forward)
    held.forward = by_weight(held.weight, nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(wrapped, down, tied, hooked, copy.deepcopy(hooked), lora, rotary, held)
    guard = Guard(model)
    with guard.step(), torch.no_grad():
        model(data(0))
    assert guard.report() == ""


def low_rank(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
    a, b = torch.ones(2, WIDTH), torch.ones(2, 2)
    return out + 0.5 * (args[0] @ a.T) @ b  # type: ignore[index]


@pytest.mark.parametrize("dispatched", [False, True])
def test_functional_call_and_a_hook_take_part(dispatched):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    if dispatched:
        dispatch(model[2])
    x, guard = data(0), Guard(model)
    plain = model(x)
    weight = model[2].weight.detach() + 1
    with guard.expect_changed(model[2], weight):
        assert not torch.equal(torch.func.functional_call(model, {"2.weight": weight}, x), plain)
    model[2].register_forward_hook(low_rank)
    with guard.expect_changed(model[2]):
        assert not torch.equal(model(x), plain)
    assert guard.report() == ""


def test_an_edited_copy_without_a_forward_of_its_own_takes_part():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    edited = copy.deepcopy(model)
    guard = Guard(edited)
    with guard.expect_changed(edited[1]):
        edited(data(0))
    assert guard.report() == ""


@pytest.mark.parametrize("through", ["forward", "weights"])
def test_hooks_do_not_run_where_the_module_is_not_called(through):
    model = nn.Linear(WIDTH, 2)
    model.register_forward_hook(low_rank)
    guard = Guard(model)
    with guard.expect_changed(model):
        model.forward(data(0)) if through == "forward" else nn.functional.linear(data(0), model.weight, model.bias)
    (finding,) = guard.findings
    assert finding.kind == "patch" and "never called" in finding.what and "module(x)" in finding.remedy
