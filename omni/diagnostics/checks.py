"""Checks of a batch (ends and streams that are not trained) and of a forward (patches that take no part in it)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.diagnostics.findings import Finding, Line, definition, shortlist
from omni.diagnostics.held import join, modules_of, reached_from, shape_of, storage_of, tensors_in
from omni.utils.private import TorchDispatchMode, forward_hooks

HOOK = "add the edit in a forward hook of the module (out + scale * (x @ A.T) @ B): it runs wherever the module is called"
TWIN = "the instance has a `forward` of its own, bound to another module, whose weights are used"
FUNCTIONAL = "call torch.func.functional_call(model, weights, inputs) on the original instead of patching a copy, or " + HOOK
REMEDY_END = "mask by length, not by id: labels[time >= length] = ignore, the first end counted in; or give padding its own id"


def check_labels(tokens: Tensor, labels: Tensor, eos: int, pad: int, ignore: int = -100) -> list[Finding]:
    """Checks that the end of each sequence is trained where it follows trained tokens.

    Args:
        tokens, labels: ids [B, T]; a label is at the time step of its token, or one before it (shifted already).
        eos, pad: ids that end and fill a sequence; they are equal in some tokenizers.
        ignore: the label that is left out of the loss.
    """
    trained = labels != ignore
    at = trained & (tokens == labels)
    before = trained[:, :-1] & (tokens[:, 1:] == labels[:, :-1])
    shift = int(before.sum() > at.sum())
    time = torch.arange(tokens.shape[1], device=tokens.device)
    last = torch.where(trained, time, -1).amax(1)  # the last time step with a label; -1 where nothing is trained
    end = last + shift + 1  # time step of the token after it
    inside = (last >= 0) & (end < tokens.shape[1])
    follows = tokens.gather(1, end.clamp(0, tokens.shape[1] - 1)[:, None])[:, 0]
    taught = labels.gather(1, last.clamp_min(0)[:, None])[:, 0]
    wrong = (inside & (follows == eos) & (taught != eos)).nonzero()[:, 0].tolist()
    if not wrong:
        return []
    masked = f"pad and eos are both {eos}, and padding is masked by its id"
    why = masked if pad == eos else f"eos {eos} follows, with label {ignore}"
    text = f"{len(wrong)} of {len(tokens)} rows train no end ({why}): the model will not stop"
    where = f"labels of rows {shortlist(list(map(str, wrong)))}; row {wrong[0]}, column {int(end[wrong[0]]) - shift}"
    return [Finding("label_end", text, REMEDY_END, tensor=where)]


def check_targets(counts: Tensor, names: Sequence[str]) -> list[Finding]:
    """Finds streams or tasks without any target; `counts` are the targets of each [N]."""
    values = counts.tolist()
    empty = [name for name, count in zip(names, values, strict=True) if not count]
    text = f"{shortlist(empty)} got no target: a mean over nothing is nan"
    remedy = "sum the losses and divide by a count of at least 1, counted over the whole step; look at the data if it stays so"
    return [Finding("no_target", text, remedy, tensor=f"counts {values} of {shortlist(names, 12)}")] if empty else []


# --- patches ----------------------------------------------------------------------------------------------------------


@contextmanager
def expectation(add: Callable[[list[Finding]], Any], names: Mapping[int, str], module: nn.Module, patch: Any) -> Iterator[None]:
    """Watches one forward, and adds findings about a patch that took no part in it; see `Guard.expect_changed`."""
    hooks = [hook for held in forward_hooks(module) for hook in held.values()]
    # Offloaded weights are empty between forwards; a hook on such a module is a patch that works.
    own: list[tuple[str, Tensor]] = [(name, p) for name, p in module.named_parameters() if not (hooks and p.is_meta)]
    tensors = own if patch is None else [(name or "tensor", t) for name, t in tensors_in(patch)]
    forward, calls, reads = vars(module).get("forward"), list[int](), _Reads(module)
    handle = module.register_forward_pre_hook(lambda module, args: calls.append(1))
    try:
        with reads:
            yield
    finally:
        handle.remove()
    path = names.get(id(module), type(module).__name__)
    unused = [(name, t) for name, t in tensors if not reads.has(t)]
    if unused:
        unread = shortlist([name for name, _ in unused])
        why, remedy = _why(module, forward, bool(calls), reads, [t for _, t in tensors])
        line = definition(forward if forward is not None else next(iter(hooks), None))
        tensor = f"{unread} {shape_of(unused[0][1])}" if len(unused) == 1 else unread
        add([Finding("patch", f"{unread} takes no part in forward{why}", remedy, tensor, path, line)])
    elif (hooks or forward is not None) and not calls:
        text = "the module is never called, only its weights are read: its hooks and its replaced forward do not run"
        add([Finding("patch", text, "call the module itself (module(x), not module.forward(x) or F.linear(x, w))", "", path)])


def _why(module: nn.Module, forward: Any, is_called: bool, reads: _Reads, tensors: list[Tensor]) -> tuple[str, str]:
    """Why tensors take no part in a forward, and the remedy."""
    elsewhere = HOOK if reads.is_sharded else FUNCTIONAL
    if forward is not None and not any(m is module for m in modules_of(forward)):
        return f": {TWIN}", elsewhere
    if not is_called:
        return ": the module is not called", elsewhere
    if reads.is_sharded and any(id(t) not in reads.names for t in tensors):
        return ": FSDP2 gathers its own shards, whatever functional_call was given", HOOK
    return "", HOOK


def foreign_forwards(model: nn.Module | None) -> list[Finding]:
    """Finds copies of patched modules: an instance's `forward` runs another module of their kind instead, with none of their
    own parameters. Modules with the same `forward` give one finding."""
    copies: dict[Line | None, list[tuple[str, nn.Module]]] = {}
    for path, module in () if model is None else model.named_modules():
        forward = vars(module).get("forward")
        others = [] if forward is None else modules_of(forward)
        if not any(type(other) is type(module) for other in others) or any(other is module for other in others):
            continue
        used = {*(id(value) for value, _ in reached_from(forward).values()), *(id(p) for o in others for p in o.parameters())}
        ids = {id(p) for p in module.parameters()}
        if ids and not ids & used:
            copies.setdefault(definition(forward), []).append((path, module))
    findings = []
    for line, members in copies.items():
        weights = shortlist([join(path, name) for path, module in members for name, _ in module.named_parameters()])
        remedy = HOOK if any(isinstance(p, DTensor) for _, module in members for p in module.parameters()) else FUNCTIONAL
        findings.append(Finding("patch", f"{weights} take no part in forward: {TWIN}", remedy, weights, members[0][0], line))
    return findings


def _storage(tensor: Tensor) -> int:
    return storage_of(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


class _Reads(TorchDispatchMode):
    """Records the storages that operations read.

    FSDP2 gathers shards of parameters whether anything uses them or not: such a shard counts as used where the gathered
    parameter is read (`read`, of those in `whole` at that moment).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.is_sharded = module, any(isinstance(p, DTensor) for p in module.parameters())
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.storages: set[int] = set()
        self.gathered: set[int] = set()
        self.whole: dict[int, tuple[str, torch.Size]] | None = None
        self.read: set[tuple[str, torch.Size]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {_storage(tensor) for _, tensor in tensors_in([*args, *(kwargs or {}).values()])}
        frames = walk_stack(sys._getframe(1)) if self.is_sharded else ()
        if any("/torch/distributed/fsdp/" in frame.f_code.co_filename for frame, _ in frames):  # FSDP2's own operation
            self.gathered |= read
            self.whole = None
        else:
            self.storages |= read
            if self.is_sharded and self.whole is None:  # FSDP2 has done something since
                self.whole = {_storage(p): (name, p.shape) for name, p in self.module.named_parameters()}
            self.read |= {self.whole[storage] for storage in read if storage in self.whole} if self.whole else set()
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor was read; for a gathered one, whether its parameter was (if it is not one yet, one of its shape)."""
        storage, name = _storage(tensor), self.names.get(id(tensor))
        if storage in self.storages or storage not in self.gathered:
            return storage in self.storages
        return any(tensor.shape == shape and name in (None, other) for other, shape in self.read)
