"""Patches that are silently ignored: instance-level forwards, and modules that are read and not called."""

from __future__ import annotations

import copy

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
