"""Captures the state that a checkpointed part may depend on (hooks, forwards, buffers, attributes), and finds changes in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from omni.diagnostics.findings import Place
from omni.diagnostics.held import MODULE_FIELDS, HeldTensor, held_by, plain_in, storage_of, tensors_in, version_of
from omni.diagnostics.source import attribute_writes, definition, place_of
from omni.diagnostics.trace import Trace


class Entry(NamedTuple):
    """One piece of state.

    Attributes:
        kind: code (a hook or a forward), value (a number or a text) or tensor.
        token: compared between two moments: the function, the value, or a tensor's storage and version.
        value: the function, the value, or the tensor as `HeldTensor`.
        module, name: path of its module and its name there; `owner` is the module's class.
    """

    kind: str
    token: Any
    value: Any
    module: str
    name: str
    owner: type


class Change(NamedTuple):
    """A difference at the second run of a part.

    Attributes:
        kind: code (a hook or a forward), weight (a parameter), given (a tensor that the part was given or takes from around it,
            changed in place) or state (all else).
        name, module: its name, and the path of its module.
        place: the line that wrote it.
        tensor, storage: a tensor's name and shape, and its storage.
    """

    kind: str
    name: str
    module: str
    place: Place | None
    tensor: str = ""
    storage: int = 0


State = dict[str, Entry]
Doubt = tuple[str, str]
"""Module and name of a piece of state."""


class Part(NamedTuple):
    """Everything that a checkpointed part may depend on.

    Attributes:
        modules: modules that its function reaches.
        names: paths of modules by id.
        values: its arguments and the values that its function takes from outside, by name; tensors that are arguments
            themselves are left out: autograd checks them.
        weights: whether parameters keep their storage between forward and backward (FSDP2's do not).
    """

    modules: Sequence[nn.Module]
    names: dict[int, str]
    values: dict[str, Any]
    weights: bool


def capture(part: Part) -> State:
    """Captures the state of a part, by path."""
    state: State = {}
    for name, value in part.values.items():
        plain = [("", value)] if isinstance(value, (bool, int, float, str)) else plain_in(value)
        for rest, one in plain:
            state[name + rest] = Entry("value", one, one, "", name + rest, object)
        if isinstance(value, torch.Generator):
            drawn = hash(value.get_state().numpy().tobytes())
            state[name] = Entry("value", drawn, f"state {drawn:x}", "", name, object)
        for rest, tensor in tensors_in(value):
            held = HeldTensor(tensor, "", name, rest, None)
            state[held.path] = Entry("tensor", (storage_of(tensor), version_of(tensor)), held, "", held.path, object)
    for top in part.modules:
        state.update(_of_module(top, part.names, part.weights))
    return state


def _of_module(top: nn.Module, names: dict[int, str], weights: bool) -> State:
    state: State = {}
    prefix = names.get(id(top), "")
    for path, module in top.named_modules(prefix=prefix):
        owner = type(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                state[f"{path} hook {key}"] = Entry("code", hook, hook, path, "hook", owner)
        forward = vars(module).get("forward", owner.forward)
        state[f"{path} forward"] = Entry("code", forward, forward, path, "replaced forward", owner)
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)) and name not in MODULE_FIELDS:
                state[_join(path, name)] = Entry("value", value, value, path, name, owner)
    for held in held_by(top, parameters=weights):
        full = held._replace(module=_join(prefix, held.module))
        token = (storage_of(held.tensor), version_of(held.tensor))
        state[full.path] = Entry("tensor", token, full, full.module, full.name, held.owner or type(top))
    return state


class StateTokens:
    """State of modules at one moment, reduced to tokens that can be compared; keeps no tensor and no function alive."""

    def __init__(self, part: Part) -> None:
        self.tokens = self._take(part)

    def _take(self, part: Part) -> dict[str, tuple[Doubt, Any]]:
        state = capture(part).items()
        return {key: ((e.module, e.name), id(e.token) if e.kind == "code" else e.token) for key, e in state}

    def doubts(self, part: Part) -> set[Doubt]:
        """Pieces of state that are different now."""
        now = self._take(part)
        return {(now.get(key) or self.tokens[key])[0] for key in {*self.tokens, *now} if self.tokens.get(key) != now.get(key)}


def differences(before: State, after: State, trace: Trace, end: int) -> list[Change]:
    """Changes between two moments. `end`: the trace's clock when the first run was over."""
    changes = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        given = new or old
        if given is None or (old is not None and new is not None and old.token == new.token):
            continue
        if given.kind == "code":
            changes.append(_code(old, new))
        elif given.kind == "value":
            was, now = ("nothing" if entry is None else repr(entry.value) for entry in (old, new))
            places = attribute_writes(given.owner, given.name)
            changes.append(Change("state", f"{key} was {was} and is {now}", given.module, places[0] if places else None))
        else:
            held: HeldTensor = given.value
            rebound = old is None or new is None or old.token[0] != new.token[0]
            place = _written(held, rebound, trace, end)
            weight, outside = isinstance(held.tensor, nn.Parameter), held.owner is None and not rebound
            kind = "weight" if weight else "given" if outside else "state"
            changes.append(Change(kind, held.path, given.module, place, held.describe(), storage_of(held.tensor)))
    return changes


def _code(old: Entry | None, new: Entry | None) -> Change:
    """The change for a hook or a replaced forward that exists at one of the moments only."""
    gone = old is not None and (new is None or old.token is not getattr(old.owner, "forward", None))
    entry = old if gone else new
    assert entry is not None
    when = "was there in forward and is gone" if gone else "was not there in forward"
    return Change("code", f"a {entry.name} {when}", entry.module, definition(entry.value))


def _written(held: HeldTensor, rebound: bool, trace: Trace, end: int) -> Place | None:
    """The line that wrote a tensor: from the source of its class where the attribute was rebound, else from the trace."""
    places = held.written()
    if rebound and places:
        return places[0]
    storage = storage_of(held.tensor)
    later = trace.since(storage, end) or trace.since(storage, 0)
    return place_of(later[0].line) if later else next(iter(places), None)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
