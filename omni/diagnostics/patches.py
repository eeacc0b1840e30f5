"""Checks that a patch takes part in forward: weights that were written or passed in, hooks, and a replaced `forward`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.held import join, modules_of, reached_from, shape_of, storage_of, tensors_in
from omni.diagnostics.source import definition

_FSDP = "/torch/distributed/fsdp/"
HOOK = (
    "add the edit to the module's output in a forward hook (out + scale * (x @ A.T) @ B): it runs wherever the module is called"
)
TWIN = "bound to another module, whose weights are used"
FUNCTIONAL = "call torch.func.functional_call(model, weights, inputs) on the original instead of patching a copy, or " + HOOK


class FindingSink(Protocol):
    """Receives findings, and has the names of modules by their ids; `omni.diagnostics.guard.Guard` is one."""

    def add(self, findings: Iterable[Finding]) -> list[Finding]: ...
    def names(self) -> Mapping[int, str]: ...


class Expectation:
    """Context manager around one forward; see `Guard.expect_changed`."""

    def __init__(self, guard: FindingSink, module: nn.Module, tensors: Any) -> None:
        self.guard, self.module = guard, module
        given = list(tensors_in(tensors)) if tensors is not None else []
        hooked = bool(module._forward_hooks or module._forward_pre_hooks)
        # Offloaded weights are empty between forwards; a hook on such a module is a patch that works.
        own = [(name, p) for name, p in module.named_parameters() if not (hooked and p.is_meta)]
        self.tensors: list[tuple[str, Tensor]] = (
            [(name or "tensor", t) for name, t in given] if tensors is not None else list(own)
        )
        self.wants_call = hooked or "forward" in vars(module)
        self.called = False
        self.sharded = _is_sharded(module)
        self.mode = _Seen(module if self.sharded else None)
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
        unused = [(name, t) for name, t in self.tensors if not self.mode.has_used(t)]
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
        elsewhere = HOOK if self.sharded else FUNCTIONAL
        if forward is not None and not any(m is self.module for m in _bound(forward)):
            return (
                f"{names} takes no part in forward: the instance has a `forward` of its own, {TWIN}",
                elsewhere,
            )
        if not self.called:
            return f"{names} takes no part in forward: the module is not called", elsewhere
        if self.sharded and any(id(t) not in self.mode.names for _, t in self.tensors):
            return f"{names} takes no part in forward: FSDP2 gathers its own shards, whatever functional_call was given", HOOK
        return f"{names} takes no part in forward", HOOK

    def _place(self, forward: Any) -> Place | None:
        hooks = [*self.module._forward_hooks.values(), *self.module._forward_pre_hooks.values()]
        return definition(forward) if forward is not None else definition(hooks[0]) if hooks else None


def foreign_forwards(model: nn.Module | None, names: Mapping[int, str]) -> list[Finding]:
    """Finds copies of patched modules: an instance's `forward` runs another module of their kind instead, with none of their
    own parameters. Modules with the same `forward` give one finding."""
    found: dict[Place | None, list[nn.Module]] = {}
    for module in () if model is None else model.modules():
        forward = vars(module).get("forward")
        others = [] if forward is None else _bound(forward)
        if not any(type(other) is type(module) for other in others) or any(other is module for other in others):
            continue
        ids = {id(p) for p in module.parameters()}
        used = {*(id(value) for value, _ in reached_from(forward).values()), *(id(p) for o in others for p in o.parameters())}
        if ids and not ids & used:
            found.setdefault(definition(forward), []).append(module)
    findings = []
    for place, modules in found.items():
        paths = [names.get(id(module), type(module).__name__) for module in modules]
        weights = [
            join(path, name) for path, module in zip(paths, modules, strict=True) for name, _ in module.named_parameters()
        ]
        what = f"{some(weights)} take no part in forward: the instance has a `forward` of its own, {TWIN}"
        remedy = HOOK if any(map(_is_sharded, modules)) else FUNCTIONAL
        findings.append(Finding("patch", what, remedy, some(weights), paths[0], place))
    return findings


def _bound(forward: Any) -> list[nn.Module]:
    """Modules that a replaced `forward` is bound to or holds."""
    given: list[Any] = []
    while isinstance(forward, functools.partial):
        given += [*forward.args, *forward.keywords.values()]
        forward = forward.func
    held = [a if isinstance(a, nn.Module) else getattr(a, "__self__", None) for a in given]
    owner = getattr(forward, "__self__", None)
    return [m for m in held if isinstance(m, nn.Module)] + ([owner] if isinstance(owner, nn.Module) else modules_of(forward))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def _in_fsdp() -> bool:
    """Whether FSDP2 itself runs the operation."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if _FSDP in frame.f_code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back
    return False


class _Seen(TorchDispatchMode):
    """Records the storages that operations read.

    Args:
        sharded: a module that FSDP2 wraps. Shards of its parameters are gathered whether anything uses them or not: such a
            shard counts as used where the gathered parameter is read.
    """

    def __init__(self, sharded: nn.Module | None = None) -> None:
        super().__init__()
        self.sharded = sharded
        self.storages: set[int] = set()
        self.gathered: set[int] = set()
        self.names = {} if sharded is None else {id(p): name for name, p in sharded.named_parameters()}
        self.whole: dict[int, tuple[str, torch.Size]] | None = None
        self.read: set[tuple[str, torch.Size]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {storage_of(_local(tensor)) for _, tensor in tensors_in([*args, *(kwargs or {}).values()])}
        if self.sharded is not None and _in_fsdp():
            self.gathered |= read
            self.whole = None
        else:
            self.storages |= read
            self._note_whole(read)
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def _note_whole(self, read: set[int]) -> None:
        """Record which of the module's parameters, gathered at this moment, an operation reads."""
        if self.sharded is None:
            return
        if self.whole is None:  # FSDP2 has done something since
            self.whole = {storage_of(_local(p)): (name, p.shape) for name, p in self.sharded.named_parameters()}
        self.read |= {self.whole[storage] for storage in read if storage in self.whole}

    def has_used(self, tensor: Tensor) -> bool:
        """Whether a tensor was read; for a gathered one, whether its parameter was (if it is not one yet, one of its shape)."""
        storage, name = storage_of(_local(tensor)), self.names.get(id(tensor))
        if storage in self.storages or storage not in self.gathered:
            return storage in self.storages
        return any(tensor.shape == shape and name in (None, other) for other, shape in self.read)
