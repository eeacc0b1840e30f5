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
    assert "bound to another module" in finding.message and "functional_call" in finding.remedy
    assert finding.line is not None and finding.line.file == "tests/diagnostics/programs.py"
    assert finding.line.code == "def new_forward(*args: Any, **kwargs: Any) -> Any:"


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
    assert finding.line is not None and finding.line.code == "def new_forward(*args: Any, **kwargs: Any) -> Any:"


class Wider(nn.Linear):
    """A part beside another that is itself a linear, and keeps the other's `forward`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.base = base.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.base(x)


def hooked(kind: str) -> nn.Module:
    """A model under accelerate's own hooks."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    if kind == "hook":
        accelerate.hooks.add_hook_to_module(model[2], accelerate.hooks.ModelHook())
    elif kind == "offloaded":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    return model


@pytest.mark.parametrize("kind", ["hook", "dispatched"])
def test_a_deep_copy_under_accelerate_runs_its_own_weights(kind):
    model, x = hooked(kind), data(0)
    edited = copy.deepcopy(model)
    with torch.no_grad():
        plain = model(x)
        edited[2].weight.add_(1)
        guard = Guard(edited)
        with guard.step(x), guard.expect_changed(edited[2]):
            changed = edited(x)
        assert torch.equal(model(x), plain) and not torch.equal(changed, plain)
    assert guard.report() == ""
    edited.to(torch.float64)
    moved = [one[2].weight.dtype == torch.float64 for one in (model, edited)]
    assert moved == [kind == "dispatched", kind == "hook"], "the trap is gone: say so in docs/gradients.md"


@pytest.mark.parametrize("asked", [False, True])
def test_a_shallow_copy_under_accelerate_is_edited_in_vain(asked):
    """`copy.copy` and parameters of its own: the copied `forward` is bound to the original still."""
    original, x = hooked("hook")[2], data(0)
    edited = copy.copy(original)
    edited._parameters = {name: nn.Parameter(p.detach() + 1) for name, p in original.named_parameters()}
    guard = Guard(edited)
    with torch.no_grad(), guard.expect_changed(edited) if asked else guard.step(x):
        assert torch.equal(edited(x), original(x)), "the law of this test: the edit is ignored"
    (finding,) = guard.findings
    assert finding.kind == "patch" and "bound to another module" in finding.message and "weight, bias" in finding.tensor
    assert finding.line is not None and finding.line.file.endswith("accelerate/hooks.py")


def test_weights_that_accelerate_offloads_are_edited_in_vain_and_a_hook_is_not():
    """They come from its own map in every forward, whatever the module was given."""
    model, x = hooked("offloaded"), data(0)
    guard = Guard(model)
    with torch.no_grad():
        plain = model(x)
        model[2].weight = weight = nn.Parameter(torch.ones(2, WIDTH))
        with guard.expect_changed(model[2], weight):
            assert torch.equal(model(x), plain), "the law of this test: the edit is ignored"
        (finding,) = guard.findings
        assert "takes no part in forward" in finding.message and "forward hook" in finding.remedy
        guard = Guard(model)
        model[2].register_forward_hook(low_rank)
        with guard.expect_changed(model[2]):
            assert not torch.equal(model(x), plain)
    assert guard.report() == ""


def test_forwards_that_use_the_modules_own_weights_are_no_patch():
    """Wrapped, handed on to a part or to the whole, accelerate's own, which copies well, another module's."""
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
    wide = nn.Linear(WIDTH, WIDTH)
    wide.forward = Wider(wide).forward
    holder = nn.Module()
    holder.table, holder.forward = nn.Parameter(torch.ones(2)), nn.Linear(WIDTH, WIDTH).forward
    model = nn.Sequential(wrapped, down, tied, hooked, copy.deepcopy(hooked), lora, rotary, held, wide, holder)
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


@pytest.mark.parametrize("through", ["forward", "weights"])
def test_hooks_do_not_run_where_the_module_is_not_called(through):
    model = nn.Linear(WIDTH, 2)
    model.register_forward_hook(low_rank)
    guard = Guard(model)
    with guard.expect_changed(model):
        model.forward(data(0)) if through == "forward" else nn.functional.linear(data(0), model.weight, model.bias)
    (finding,) = guard.findings
    assert finding.kind == "patch" and "never called" in finding.message and "module(x)" in finding.remedy
