"""Checks activation checkpointing: parts that run without an input gradient, and parts whose recomputation differs.

In a full trace every operation of a checkpointed part is compared with its first run, by sum and norm of its result, and so
are the hooks, buffers and attributes of its modules: the operation is the effect, the state the cause. Without a trace only the
state is compared: a difference may be harmless, and makes a trace worth its cost.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as library
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.held import modules_of, reached_from, shape_of, storage_of, version_of
from omni.diagnostics.sharded import is_sharded
from omni.diagnostics.source import Line, is_ours, left_block, line_of, outer_lines, place_of, user_frame
from omni.diagnostics.state import Change, Doubt, Part, StateTokens, capture, differences
from omni.diagnostics.trace import Saved, Trace, digest, same

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
"""Remedies by kind of change."""
REMEDY_REENTRANT = (
    "call checkpoint with use_reentrant=False; if it must stay reentrant, let the input require a gradient "
    "(model.enable_input_require_grads() in transformers, x.requires_grad_() here)"
)


class RecomputeStep(NamedTuple):
    """An operation of a checkpointed part, and sum and norm of its result."""

    op: str
    digest: tuple[float, ...]
    line: Line | None
    clock: int
    inputs: list[int]


class Region:
    """One checkpointed part: its first run and, when backward comes to it, the second."""

    def __init__(self, part: Part, inputs: Iterable[Any], trace: Trace) -> None:
        self.trace = trace
        self.line = line_of(user_frame())
        self.callers, self.later = outer_lines(), list[Line]()
        self.saved = [Saved(t, version_of(t), trace.clock, self.line) for t in inputs if isinstance(t, Tensor)]
        self.before = capture(part)
        self.modules = part.modules
        self.selective = False
        self.steps: list[RecomputeStep] = []
        self.at: int | None = None
        self.end = trace.clock
        self.changes: list[Change] = []
        self.different: tuple[RecomputeStep | None, RecomputeStep | None] | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        self.trace.listeners.append(self)
        try:
            yield
        finally:
            self.trace.listeners.remove(self)
            self.end = self.trace.clock

    @contextmanager
    def second(self, part: Part) -> Iterator[None]:
        trace = self.trace
        for saved in self.saved:
            trace.check(saved)
        self.later = outer_lines()
        if [id(m) for m in self.modules] != [id(m) for m in part.modules]:
            self.changes = [self._bound(part)]
        else:
            self.changes = differences(self.before, capture(part), trace, self.end)
        self.selective = any(type(mode).__name__ == _CACHED for mode in _get_current_dispatch_mode_stack())
        self.at = 0
        self.trace.listeners.append(self)
        try:
            yield
        except Exception:
            raise  # torch stops early by an exception: a first run may be longer than the second
        else:
            if self.at < len(self.steps) and self.different is None and not self.selective:
                self.different = (self.steps[self.at], None)
        finally:
            self.trace.listeners.remove(self)

    def note(self, op: str, args: list[Tensor], out: Any, line: Line | None, clock: int) -> None:
        if op in _CASTS or "empty" in op or self.different is not None or not any(t.requires_grad for t in args):
            return
        step = RecomputeStep(op, digest(out), line, clock, [storage_of(t) for t in args])
        if self.at is None:
            self.steps.append(step)
            return
        left = range(self.at, len(self.steps) if self.selective else min(self.at + 1, len(self.steps)))
        for i in left:  # under selective checkpointing only recomputed operations arrive here
            if self.steps[i].op == step.op and same(self.steps[i].digest, step.digest, out):
                self.at = i + 1
                return
        self.different = (next((self.steps[i] for i in left), None), step)

    def findings(self, failed: bool = False) -> list[Finding]:
        """Findings about this part; with `failed`, torch itself found the second run different.

        A saved argument that was changed in place is reported by the trace instead.
        """
        if any(saved.reported for saved in self.saved) or (self.different is None and not (failed and self.changes)):
            return []
        old, new = self.different or (None, None)
        step = new or old
        places = [place_of(None if step is None else step.line), place_of(self.line)]
        read = set(() if step is None else step.inputs)
        self.changes.sort(key=lambda c: (c.kind != "code", c.storage not in read, not c.tensor, c.kind == "weight"))
        wrong = "" if failed else "; its gradients are wrong"
        if not self.changes:
            what = f"a checkpointed part gives another result when backward repeats it, through none of its arguments{wrong}"
            first, others = places[0] or places[1], tuple(p for p in places[1:] if p is not None)
            return [Finding("recompute", what, REMEDIES["state"], place=first, others=others if places[0] is not None else ())]
        cause, *more = self.changes
        code = cause.kind in ("code", "bound")
        beside = f" (and {some([change.name for change in more], 3)})" if more and not code else ""
        how = "differently" if code else "with another state than in forward"
        what = f"a checkpointed part is repeated {how}: {cause.name}{beside}{wrong}"
        place, remedy = cause.place, REMEDIES[cause.kind]
        if place is not None and is_ours(place.file):
            place, remedy = self._left(place, remedy)
        others = tuple(p for p in dict.fromkeys([*places, cause.place]) if p is not None and p != place)
        return [Finding("recompute", what, remedy, cause.tensor, cause.module, place, others)]

    def _bound(self, part: Part) -> Change:
        """The change for a function that runs through other modules than before."""
        was, now = (
            ", ".join(part.names.get(id(m), type(m).__name__) for m in modules) for modules in (self.modules, part.modules)
        )
        what = f"it ran through {was or 'no module'} in forward and runs through {now or 'none'} now"
        return Change("bound", what, "", place_of(self.line))

    def _left(self, place: Place, remedy: str) -> tuple[Place, str]:
        """Replaces a line of this repository's packages by the user's: the block that ended before backward, or the call."""
        block = left_block(self.callers, self.later)
        if block is not None:
            return place_of(block) or place, REMEDIES["code"]
        return place_of(self.callers[0] if self.callers else None) or place, remedy


def _values(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a part and values that its function takes from outside, by name, without modules and tensor arguments."""
    taken = {name: value for name, (value, _) in reached_from(function).items()}
    try:
        given = inspect.signature(getattr(function, "forward", function)).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a C function, or arguments that do not fit
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    direct = {id(a) for a in args if isinstance(a, Tensor)}
    return {name: v for name, v in {**taken, **given}.items() if id(v) not in direct and not isinstance(v, nn.Module)}


@contextmanager
def watch_checkpoints(
    report: Callable[[Finding], None],
    trace: Trace | None,
    model: nn.Module | None,
    names: dict[int, str],
    doubt: Callable[[set[Doubt]], None] | None = None,
) -> Iterator[list[Region]]:
    """Report reentrant checkpoints without input gradient; with a trace, yield the regions as they come.

    Args:
        names: paths by id of parameters and modules.
        doubt: without a trace, called with state that differs when a part is repeated; graphs that outlive the step keep it.
    """
    function_class, regions, weights = library.CheckpointFunction, list[Region](), not is_sharded(model)
    left = COMPARE_SECONDS
    original, outer = function_class.apply, vars(function_class).get("apply")  # the latter is another guard's around this

    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        if torch.is_grad_enabled() and not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            finding = _without_gradient(function, args, names)
            if finding is not None:
                report(finding)
        if not torch.is_grad_enabled() or (trace is None and doubt is None):
            return original(function, preserve, *args)
        if trace is None:
            return original(compared(function, args, {}, repeats=False), preserve, *args)
        region = Region(part(function, args), args, trace)
        regions.append(region)

        def run(*inputs: Any) -> Any:
            if not region.steps:
                with _quiet(trace):
                    out = function(*inputs)
                region.steps = [RecomputeStep("the result", digest(out), region.line, trace.clock, [])]
                region.end = trace.clock
                return out
            with region.second(part(function, inputs)), _quiet(trace):
                out = function(*inputs)
            region.different = None if same(region.steps[0].digest, digest(out), out) else (region.steps[0], None)
            return out

        return original(run, preserve, *args)

    def part(function: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Part:
        modules = modules_of(function) or ([model] if model is not None else [])
        return Part(modules, names, _values(function, args, kwargs or {}), weights)

    def compared(function: Any, args: Sequence[Any], kwargs: dict[str, Any], repeats: bool) -> Any:
        """Wraps the function of a part to report doubts when it is called again, or at the first call where it `repeats`.

        The time that a step spends on this is bounded, because a part may reach all of a model.
        """
        nonlocal left
        if left <= 0:
            return function
        started, calls = time.perf_counter(), [repeats]
        glance = StateTokens(part(function, args, kwargs))
        left -= time.perf_counter() - started

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if calls[0] and doubt is not None and left > 0:
                started = time.perf_counter()
                doubt(glance.doubts(part(function, args, kwargs)))
                left -= time.perf_counter() - started
            calls[0] = True
            return function(*args, **kwargs)

        return run

    name = next((n for n in _GENERATORS if hasattr(library, n)), None)
    generator = None if name is None or (trace is None and doubt is None) else getattr(library, name)

    def generate(function: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        assert generator is not None
        if not torch.is_grad_enabled():
            yield from generator(function, *rest, **kwargs)
            return
        given, named = _given(rest, kwargs)
        if trace is None:
            yield from generator(compared(function, given, named, repeats=True), *rest, **kwargs)
            return
        region = Region(part(function, given, named), given, trace)
        regions.append(region)

        def again(*args: Any, **kw: Any) -> Any:
            with region.second(part(function, args, kw)):
                return function(*args, **kw)

        with region.first():
            yield from generator(again, *rest, **kwargs)

    function_class.apply = staticmethod(apply)  # type: ignore[method-assign, assignment]
    if generator is not None and name is not None:
        setattr(library, name, generate)
    try:
        yield regions
    finally:
        if outer is None:
            del function_class.apply
        else:
            function_class.apply = outer  # type: ignore[method-assign]
        if generator is not None and name is not None:
            setattr(library, name, generator)


@contextmanager
def _quiet(trace: Trace) -> Iterator[None]:
    """Switches the comparison of single operations off: a reentrant part is first run without gradients."""
    held, trace.listeners = trace.listeners, []
    try:
        yield
    finally:
        trace.listeners = held


def _given(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Extracts the arguments of a part's function from those of the function that sets up its checkpointing."""
    if len(rest) == 2 and isinstance(rest[0], tuple) and isinstance(rest[1], dict):  # torch 2.14
        return rest
    return rest[5:], kwargs


def _without_gradient(function: Any, args: tuple[Any, ...], names: dict[int, str]) -> Finding | None:
    modules = modules_of(function)
    inside = {id(p): p for m in modules for p in m.parameters() if p.requires_grad}
    if modules and not inside:
        return None
    lost = [names.get(i, "parameter") for i in inside]
    shapes = ", ".join(shape_of(a) for a in args if isinstance(a, Tensor))
    what = f"reentrant checkpoint: no input ({shapes}) requires a gradient, so {len(lost) or 'all'} parameters inside get none"
    return Finding("reentrant", what, REMEDY_REENTRANT, tensor=some(lost), place=place_of(line_of(user_frame())))
