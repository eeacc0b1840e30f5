"""Checks that a patch takes part in forward: weights that were written or passed in, hooks, and a replaced `forward`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.held import join, modules_of, reached_from, shape_of, storage_of, tensors_in
from omni.diagnostics.source import definition

HOOK = (
    "add the edit to the module's output in a forward hook (out + scale * (x @ A.T) @ B): it runs wherever the module is called"
)
TWIN = "bound to another module, whose weights are used"
FUNCTIONAL = "call torch.func.functional_call(model, weights, inputs) on the original instead of patching a copy, or " + HOOK


@contextmanager
def expectation(add: Callable[[list[Finding]], Any], names: Mapping[int, str], module: nn.Module, given: Any) -> Iterator[None]:
    """Watches one forward, and adds findings about a patch that took no part in it; see `Guard.expect_changed`."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # Offloaded weights are empty between forwards; a hook on such a module is a patch that works.
    own: list[tuple[str, Tensor]] = [(name, p) for name, p in module.named_parameters() if not (hooks and p.is_meta)]
    tensors = own if given is None else [(name or "tensor", t) for name, t in tensors_in(given)]
    forward = vars(module).get("forward")
    wants_call, calls = bool(hooks) or forward is not None, list[int]()
    seen = _Seen(module)
    handle = module.register_forward_pre_hook(lambda module, args: calls.append(1))
    try:
        with seen:
            yield
    finally:
        handle.remove()
    unused = [(name, t) for name, t in tensors if not seen.has_used(t)]
    lost = some([name for name, _ in unused])
    if unused:
        what, remedy = _why(module, forward, bool(calls), seen, [t for _, t in tensors])
        what = f"{lost} takes no part in forward{what}"
        lost = f"{lost} {shape_of(unused[0][1])}" if len(unused) == 1 else lost
    elif wants_call and not calls:
        what = "the module is never called, only its weights are read: its hooks and its replaced forward do not run"
        remedy = "call the module itself (module(x), not module.forward(x) or F.linear(x, w))"
    else:
        return
    patch = forward if forward is not None else next(iter(hooks), None)
    place = definition(patch) if unused else None
    add([Finding("patch", what, remedy, lost, names.get(id(module), type(module).__name__), place)])


def _why(module: nn.Module, forward: Any, is_called: bool, seen: _Seen, tensors: list[Tensor]) -> tuple[str, str]:
    """Why tensors take no part in a forward, and the remedy."""
    elsewhere = HOOK if seen.sharded is not None else FUNCTIONAL
    if forward is not None and not any(m is module for m in modules_of(forward)):
        return f": the instance has a `forward` of its own, {TWIN}", elsewhere
    if not is_called:
        return ": the module is not called", elsewhere
    if seen.sharded is not None and any(id(t) not in seen.names for t in tensors):
        return ": FSDP2 gathers its own shards, whatever functional_call was given", HOOK
    return "", HOOK


def foreign_forwards(model: nn.Module | None, names: Mapping[int, str]) -> list[Finding]:
    """Finds copies of patched modules: an instance's `forward` runs another module of their kind instead, with none of their
    own parameters. Modules with the same `forward` give one finding."""
    found: dict[Place | None, list[nn.Module]] = {}
    for module in () if model is None else model.modules():
        forward = vars(module).get("forward")
        others = [] if forward is None else modules_of(forward)
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def _in_fsdp() -> bool:
    """Whether FSDP2 itself runs the operation."""
    return any("/torch/distributed/fsdp/" in frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(2)))


class _Seen(TorchDispatchMode):
    """Records the storages that operations read.

    FSDP2 gathers shards of parameters whether anything uses them or not: such a shard counts as used where the gathered
    parameter is read.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.sharded = module if _is_sharded(module) else None
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.storages: set[int] = set()
        self.gathered: set[int] = set()
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
        """Records which of a sharded module's parameters, gathered at this moment, an operation reads."""
        if self.sharded is not None:
            if self.whole is None:  # FSDP2 has done something since
                self.whole = {storage_of(_local(p)): (name, p.shape) for name, p in self.sharded.named_parameters()}
            self.read |= {self.whole[storage] for storage in read if storage in self.whole}

    def has_used(self, tensor: Tensor) -> bool:
        """Whether a tensor was read; for a gathered one, whether its parameter was (if it is not one yet, one of its shape)."""
        storage, name = storage_of(_local(tensor)), self.names.get(id(tensor))
        if storage in self.storages or storage not in self.gathered:
            return storage in self.storages
        return any(tensor.shape == shape and name in (None, other) for other, shape in self.read)
