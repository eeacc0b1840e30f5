"""Whether a patch takes part in forward: weights that were written or handed in, hooks, and a replaced `forward`."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.held import modules_of, shape_of, storage_of, tensors_in
from omni.diagnostics.source import definition

if TYPE_CHECKING:
    from omni.diagnostics.guard import Guard

HOOK = (
    "add the edit to the module's output in a forward hook (out + scale * (x @ A.T) @ B): it runs wherever the module is called"
)
FUNCTIONAL = "call torch.func.functional_call(model, weights, inputs) on the original instead of patching a copy, or " + HOOK


class Expectation:
    """Around one forward; see `Guard.expect_changed`."""

    def __init__(self, guard: Guard, module: nn.Module, tensors: Any) -> None:
        self.guard, self.module = guard, module
        given = list(tensors_in(tensors)) if tensors is not None else []
        own = [(name, p) for name, p in module.named_parameters()]
        self.tensors: list[tuple[str, Tensor]] = (
            [(name or "tensor", t) for name, t in given] if tensors is not None else list(own)
        )
        self.wants_call = bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        self.called = False
        self.mode = _Seen()
        self.found: list[Finding] = []

    def __enter__(self) -> Expectation:
        self.hook = self.module.register_forward_pre_hook(self._note)
        self.mode.__enter__()
        return self

    def _note(self, module: nn.Module, args: Any) -> None:
        self.called = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.mode.__exit__(kind, error, trace)
        self.hook.remove()
        if error is None:
            self.found = self.guard.add(self._findings())

    def _findings(self) -> list[Finding]:
        path = self.guard.names().get(id(self.module), type(self.module).__name__)
        forward = vars(self.module).get("forward")
        unused = [(name, t) for name, t in self.tensors if storage_of(_local(t)) not in self.mode.storages]
        if unused:
            names = some([name for name, _ in unused])
            tensor = f"{unused[0][0]} {shape_of(unused[0][1])}" if len(unused) == 1 else names
            return [Finding("patch", *self._why(names, forward), tensor, path, self._place(forward))]
        if self.wants_call and not self.called:
            what = "the module is never called, only its weights are read: its hooks and its replaced forward do not run"
            return [
                Finding("patch", what, "call the module itself (module(x), not module.forward(x) or F.linear(x, w))", "", path)
            ]
        return []

    def _why(self, names: str, forward: Any) -> tuple[str, str]:
        sharded = any(isinstance(p, DTensor) for p in self.module.parameters())
        if forward is not None and not any(m is self.module for m in _bound(forward)):
            return (
                f"{names} takes no part in forward: the instance has a `forward` of its own, bound to another module, whose "
                "weights are used",
                FUNCTIONAL,
            )
        if sharded:
            return f"{names} takes no part in forward: FSDP2 gathers its own shards, whatever functional_call was given", HOOK
        if not self.called:
            return f"{names} takes no part in forward: the module is not called", FUNCTIONAL
        return f"{names} takes no part in forward", HOOK

    def _place(self, forward: Any) -> Place | None:
        hooks = [*self.module._forward_hooks.values(), *self.module._forward_pre_hooks.values()]
        return definition(forward) if forward is not None else definition(hooks[0]) if hooks else None


def _bound(forward: Any) -> list[nn.Module]:
    """Modules whose forward a replaced `forward` ends in."""
    while isinstance(forward, functools.partial):
        if any(isinstance(a, nn.Module) for a in forward.args):
            return [a for a in forward.args if isinstance(a, nn.Module)]
        forward = forward.func
    owner = getattr(forward, "__self__", None)
    return [owner] if isinstance(owner, nn.Module) else modules_of(forward)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Seen(TorchDispatchMode):
    """Storages that operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for _, tensor in tensors_in([*args, *(kwargs or {}).values()]):
            self.storages.add(storage_of(_local(tensor)))
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))
