"""Checks activation checkpointing: parts that run without an input gradient, and parts whose recomputation differs.

In a full trace every operation of a checkpointed part is compared with its first run, by sum and norm of its result, and so
are the hooks, buffers and attributes of its modules: the operation is the effect, the state the cause. Without a trace only the
state is compared: a difference may be harmless, and makes a trace worth its cost.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as library
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.held import (
    DEPTH,
    MODULE_FIELDS,
    VALUES,
    VISITS,
    HeldTensor,
    held_by,
    join,
    leaves_in,
    modules_of,
    reached_from,
    shape_of,
    storage_of,
    version_of,
)
from omni.diagnostics.snapshot import fsdp_modules
from omni.diagnostics.source import attribute_writes, definition, place_of, user_frame
from omni.diagnostics.trace import Saved, Trace, digest, replaced, same

COMPARE_SECONDS = 0.25
"""Most seconds of a step for comparing the state of its parts without a trace."""

_CACHED = "_CachedTorchDispatchMode"
"""Dispatch mode of torch that returns the results kept by selective checkpointing."""

_CASTS = frozenset({"aten._to_copy", "aten.clone", "aten.detach"})
"""Operations that may be absent in one of the runs: autocast caches casts of the weights, and drops them before backward."""
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""Generators that set up non-reentrant checkpointing, in torch 2.14 and before; their first argument is the function."""

REMEDIES = {
    "state": "hand the state in as an argument and return the new one, so that nothing is kept between forward and backward; "
    "or switch checkpointing off while a cache is in use",
    "given": "make a new tensor instead (x = x * 0.9 for x *= 0.9), so that backward finds what forward was given",
    "weight": "step the optimizer (or write the weights) only after every backward that needs them has run",
    "bound": "bind what the function takes from around it where it is made (lambda x, layer=layer: ...), or hand it over as an "
    "argument: a loop has gone on when backward runs",
    "code": "keep the hook, edit or patched forward in place until backward has run: call backward inside its scope",
}
"""Remedies by kind of change: of a module's own state, a tensor that a part takes from outside, a parameter, the modules that
its function reaches, a hook or a forward."""
REMEDY_REENTRANT = (
    "call checkpoint with use_reentrant=False; if it must stay reentrant, let the input require a gradient "
    "(model.enable_input_require_grads() in transformers, x.requires_grad_() here)"
)


class Entry(NamedTuple):
    """One piece of a part's state: a hook or a forward (`code`), a number or a text (`value`), or a `tensor` (`HeldTensor`).

    `token` is compared between two moments: the id of the function, the value, or a tensor's storage and version.
    """

    kind: str
    token: Any
    value: Any
    module: str
    name: str
    owner: type = object


class Change(NamedTuple):
    """A difference at the second run of a part, of a kind in `REMEDIES`, and the line that wrote it."""

    kind: str
    name: str
    module: str
    place: Place | None
    tensor: str = ""
    storage: int = 0


State = dict[str, Entry]
Doubt = tuple[str, str]
"""Module and name of a piece of state."""


def capture(modules: Sequence[nn.Module], names: dict[int, str], values: dict[str, Any], weights: bool) -> State:
    """Captures the state that a part may depend on, by path.

    Args:
        values: its arguments and the values that its function takes from outside, by name.
        weights: whether parameters keep their storage between forward and backward.
    """
    state: State = {}
    for name, value in values.items():
        for rest, leaf in leaves_in(value, set(), DEPTH, "", VISITS, plain=True):
            if isinstance(leaf, Tensor):
                _add_tensor(state, HeldTensor(leaf, "", name, rest))
            else:
                state[name + rest] = Entry("value", leaf, leaf, "", name + rest)
    for top in modules:
        prefix = names.get(id(top), "")
        for path, module in top.named_modules(prefix=prefix):
            _add_module(state, path, module)
        for held in held_by(top, parameters=weights):
            _add_tensor(state, held._replace(module=join(prefix, held.module)))
    return state


def _add_tensor(state: State, held: HeldTensor) -> None:
    token = storage_of(held.tensor), version_of(held.tensor)
    state[held.path] = Entry("tensor", token, held, held.module, held.name + ("" if held.owner else held.rest))


def _add_module(state: State, path: str, module: nn.Module) -> None:
    """Adds a module's hooks, its `forward`, and its numbers and strings."""
    owner = type(module)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            state[f"{path} hook {key}"] = Entry("code", id(hook), hook, path, "hook")
    forward = vars(module).get("forward", owner.forward)
    state[f"{path} forward"] = Entry("code", id(forward), forward, path, "replaced forward", owner)
    for name, value in vars(module).items():
        if isinstance(value, VALUES) and name not in MODULE_FIELDS:
            state[join(path, name)] = Entry("value", value, value, path, name, owner)


def differences(before: State, after: State, trace: Trace, end: int) -> list[Change]:
    """Changes between two moments. `end`: the trace's clock when the first run was over."""
    changes = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        entry = new or old
        if entry is None or (old is not None and new is not None and old.token == new.token):
            continue
        if entry.kind == "code":
            gone = old is not None and (new is None or old.value is not getattr(old.owner, "forward", None))
            code = old if gone and old is not None else entry
            when = "was there in forward and is gone" if gone else "was not there in forward"
            changes.append(Change("code", f"a {code.name} {when}", code.module, definition(code.value)))
        elif entry.kind == "value":
            was, now = ("nothing" if one is None else repr(one.value) for one in (old, new))
            place = next(iter(attribute_writes(entry.owner, entry.name)), None)
            changes.append(Change("state", f"{key} was {was} and is {now}", entry.module, place))
        else:
            rebound = old is None or new is None or old.token[0] != new.token[0]
            changes.append(_of_tensor(entry.value, rebound, trace, end))
    return changes


def _of_tensor(held: HeldTensor, rebound: bool, trace: Trace, end: int) -> Change:
    """The change of a tensor; its line is from the source of its class where the attribute was rebound, else from the trace."""
    storage, places = storage_of(held.tensor), held.written()
    writes = [] if rebound and places else trace.since(storage, end) or trace.since(storage, 0)
    place = writes[0].place if writes else next(iter(places), None)
    weight, outside = isinstance(held.tensor, nn.Parameter), held.owner is None and not rebound
    kind = "weight" if weight else "given" if outside else "state"
    return Change(kind, held.path, held.module, place, held.describe(), storage)


class RecomputeStep(NamedTuple):
    """An operation of a checkpointed part, and sum and norm of its result."""

    op: str
    digest: tuple[float, ...]
    place: Place | None
    inputs: list[int]


class Region:
    """One checkpointed part: its first run and, when backward comes to it, the second.

    Args:
        names: of the modules that its function reaches.
    """

    def __init__(self, trace: Trace, names: list[str], before: State, inputs: Iterable[Any]) -> None:
        self.trace, self.names, self.before = trace, names, before
        self.place = place_of(user_frame())
        self.saved = [Saved(t, version_of(t), trace.clock, self.place) for t in inputs if isinstance(t, Tensor)]
        self.selective = False
        self.steps: list[RecomputeStep] = []
        self.at: int | None = None
        self.end = trace.clock
        self.changes: list[Change] = []
        self.different: tuple[RecomputeStep | None, RecomputeStep | None] | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        self.trace.listeners.append(self.note)
        try:
            yield
        finally:
            self.trace.listeners.remove(self.note)
            self.end = self.trace.clock

    @contextmanager
    def second(self, names: list[str], after: State) -> Iterator[None]:
        for saved in self.saved:
            self.trace.check(saved)
        if names != self.names:
            was, now = (", ".join(one) or "no module" for one in (self.names, names))
            self.changes = [Change("bound", f"it ran through {was} in forward and runs through {now} now", "", self.place)]
        else:
            self.changes = differences(self.before, after, self.trace, self.end)
        self.selective = any(type(mode).__name__ == _CACHED for mode in _get_current_dispatch_mode_stack())
        self.at = 0
        self.trace.listeners.append(self.note)
        try:
            yield  # torch stops early by an exception: a first run may be longer than the second
            if self.at < len(self.steps) and self.different is None and not self.selective:
                self.different = (self.steps[self.at], None)
        finally:
            self.trace.listeners.remove(self.note)

    def note(self, op: str, args: list[Tensor], out: Any, place: Place | None) -> None:
        """Records an operation of the first run, and compares one of the second."""
        if op in _CASTS or "empty" in op or self.different is not None or not any(t.requires_grad for t in args):
            return
        step = RecomputeStep(op, digest(out), place, [storage_of(t) for t in args])
        if self.at is None:
            self.steps.append(step)
            return
        left = range(self.at, len(self.steps) if self.selective else min(self.at + 1, len(self.steps)))
        for i in left:  # under selective checkpointing only recomputed operations arrive here
            if self.steps[i].op == step.op and same(self.steps[i].digest, step.digest):
                self.at = i + 1
                return
        self.different = (next((self.steps[i] for i in left), None), step)

    def findings(self, failed: bool = False) -> list[Finding]:
        """Findings about this part; with `failed`, torch itself found the second run different.

        A saved argument that was changed in place is reported by the trace instead.
        """
        if any(saved.now is not None for saved in self.saved) or (self.different is None and not (failed and self.changes)):
            return []
        old, new = self.different or (None, None)
        step, wrong = new or old, "" if failed else "; its gradients are wrong"
        places = [self.place] if step is None else [step.place, self.place]
        read = set(() if step is None else step.inputs)
        self.changes.sort(key=lambda c: (c.kind != "code", c.storage not in read, not c.tensor, c.kind == "weight"))
        if not self.changes:
            what = f"a checkpointed part gives another result when backward repeats it, through none of its arguments{wrong}"
            known = [place for place in places if place is not None]
            return [Finding("recompute", what, REMEDIES["state"], place=next(iter(known), None), others=tuple(known[1:]))]
        cause, *more = self.changes
        code = cause.kind in ("code", "bound")
        beside = f" (and {some([change.name for change in more], 3)})" if more and not code else ""
        how = "differently" if code else "with another state than in forward"
        what = f"a checkpointed part is repeated {how}: {cause.name}{beside}{wrong}"
        others = [p for p in dict.fromkeys(places) if p is not None and p != cause.place]
        return [Finding("recompute", what, REMEDIES[cause.kind], cause.tensor, cause.module, cause.place, tuple(others))]


def _values(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a part and values that its function takes from outside, by name, without modules and tensor arguments."""
    taken = {name: value for name, (value, _) in reached_from(function).items()}
    try:
        given = inspect.signature(getattr(function, "forward", function)).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a C function, or arguments that do not fit
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    direct = {id(a) for a in args if isinstance(a, Tensor)}
    return {name: v for name, v in {**taken, **given}.items() if id(v) not in direct and not isinstance(v, nn.Module)}


@dataclass
class CheckpointWatch:
    """Reports reentrant checkpoints without input gradient; with a trace, collects other checkpointed parts as `regions`.

    Attributes:
        names: paths by id of parameters and modules.
        doubt: without a trace, called with state that differs when a part is repeated; graphs that outlive the step keep it.
        left: seconds that may still be spent on it.
    """

    report: Callable[[Finding], None]
    trace: Trace | None
    model: nn.Module | None
    names: dict[int, str]
    doubt: Callable[[Iterable[Doubt]], None] | None
    regions: list[Region] = field(default_factory=list)
    left: float = COMPARE_SECONDS

    @contextmanager
    def running(self) -> Iterator[None]:
        name = next(n for n in _GENERATORS if hasattr(library, n))
        reentrant = staticmethod(self._reentrant(library.CheckpointFunction.apply))
        generate = self._generate(getattr(library, name))
        with replaced(library.CheckpointFunction, "apply", reentrant), replaced(library, name, generate):
            yield

    def _reentrant(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def watched(function: Any, preserve: bool, *args: Any) -> Any:
            if torch.is_grad_enabled() and not any(isinstance(a, Tensor) and a.requires_grad for a in args):
                for finding in _without_gradient(function, args, self.names):
                    self.report(finding)
            return apply(function, preserve, *args)

        return watched

    def _generate(self, generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def watched(function: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
            first: AbstractContextManager[None] = nullcontext()
            if torch.is_grad_enabled() and (self.trace is not None or self.doubt is not None):
                args, named = _given(rest, kwargs)
                if self.trace is None:
                    function = self._compared(function, args, named)
                else:
                    function, first = self._traced(function, args, named, self.trace)
            with first:
                yield from generator(function, *rest, **kwargs)

        return watched

    def _state(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[str], State]:
        """Names of the modules that a part's function reaches, and its state at this moment."""
        modules = modules_of(function) or ([self.model] if self.model is not None else [])
        names = [self.names.get(id(module), type(module).__name__) for module in modules]
        return names, capture(modules, self.names, _values(function, args, kwargs), weights=not fsdp_modules(self.model))

    def _traced(self, function: Any, args: Any, kwargs: Any, trace: Trace) -> tuple[Any, AbstractContextManager[None]]:
        """A part's function as it is called the second time, and what its first run is to happen in."""
        region = Region(trace, *self._state(function, args, kwargs), args)
        self.regions.append(region)

        def again(*args: Any, **kwargs: Any) -> Any:
            with region.second(*self._state(function, args, kwargs)):
                return function(*args, **kwargs)

        return again, region.first()

    def _compared(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A part's function that reports doubts when it is called the second time; it keeps no tensor and no function alive.

        The time that a step spends on this is bounded, because a part may reach all of a model.
        """
        if self.left <= 0:
            return function
        before = self._tokens(function, args, kwargs)

        def again(*args: Any, **kwargs: Any) -> Any:
            if self.doubt is not None and self.left > 0:
                now = self._tokens(function, args, kwargs)
                self.doubt({doubt for doubt, _ in before.items() ^ now.items()})
            return function(*args, **kwargs)

        return again

    def _tokens(self, function: Any, args: Any, kwargs: Any) -> dict[Doubt, Any]:
        """The state of a part at this moment, reduced to what can be compared."""
        started = time.perf_counter()
        tokens: dict[Doubt, Any] = {}
        for entry in self._state(function, args, kwargs)[1].values():
            key = entry.module, entry.name
            tokens[key] = (*tokens.get(key, ()), entry.token)
        self.left -= time.perf_counter() - started
        return tokens


def _given(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Extracts the arguments of a part's function from those of the function that sets up its checkpointing."""
    if len(rest) == 2 and isinstance(rest[0], tuple) and isinstance(rest[1], dict):  # torch 2.14
        return rest
    return rest[5:], kwargs


def _without_gradient(function: Any, args: tuple[Any, ...], names: dict[int, str]) -> list[Finding]:
    modules = modules_of(function)
    inside = {id(p): p for m in modules for p in m.parameters() if p.requires_grad}
    if modules and not inside:
        return []
    lost = [names.get(i, "parameter") for i in inside]
    shapes = ", ".join(shape_of(a) for a in args if isinstance(a, Tensor))
    what = f"reentrant checkpoint: no input ({shapes}) requires a gradient, so {len(lost) or 'all'} parameters inside get none"
    return [Finding("reentrant", what, REMEDY_REENTRANT, tensor=some(lost), place=place_of(user_frame()))]
