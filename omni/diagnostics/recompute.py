"""Checks activation checkpointing: parts that run without an input gradient, and parts whose repetition in backward differs.

In a traced step every operation of a checkpointed part is compared with its first run, by sum and norm of its result. Where one
differs, its inputs tell why: a tensor with other values than in forward, or another operation than in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as library
from torch import Tensor, nn

from omni.diagnostics.findings import Finding, Line, line_of, shortlist, user_frame
from omni.diagnostics.held import HeldTensor, held_by, modules_of, shape_of, storage_of, version_of
from omni.diagnostics.trace import Saved, Trace, digest, replaced, same, variable

_CASTS = frozenset({"aten._to_copy", "aten.clone", "aten.detach"})
"""Operations that may be absent in one of the runs: autocast caches casts of the weights, and drops them before backward."""
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""Generators that set up non-reentrant checkpointing, in torch 2.14 and before; their first argument is the function."""

STATE = "hand the state in as an argument and return the new one; or switch checkpointing off while a cache is in use"
GIVEN = "make a new tensor instead (x = x * 0.9 for x *= 0.9), so that backward finds what forward was given"
WEIGHT = "step the optimizer (or write the weights) only after every backward that needs them has run"
BOUND = "bind what the function takes where it is made (lambda x, layer=layer: ...): a loop has gone on when backward runs"
CODE = "keep the hook, edit or patched forward in place until backward has run: call backward inside its scope"
REENTRANT = "call checkpoint with use_reentrant=False, or let its input require a gradient (model.enable_input_require_grads())"


class Operation(NamedTuple):
    """An operation of a checkpointed part, sum and norm of its result, and those of its sources with the storage of each."""

    name: str
    digest: tuple[float, ...]
    line: Line | None
    sources: list[tuple[int, tuple[float, ...]]]


class Region:
    """One checkpointed part: its first run and, when backward comes to it, the second.

    Attributes:
        saved: its arguments; one that was changed in place is reported by the trace, and nothing else of the part.
        start: the trace's clock at the start of the present run.
        at: number of the operation that the second run should come to next; None in the first.
    """

    def __init__(self, trace: Trace, model: nn.Module | None, inputs: Iterable[Any]) -> None:
        self.trace, self.model = trace, model
        self.line = line_of(user_frame())
        self.others = () if self.line is None else (self.line,)
        self.saved = [Saved(t, version_of(t), trace.clock, self.line) for t in inputs if isinstance(t, Tensor)]
        self.operations: list[Operation] = []
        self.at: int | None = None
        self.start = trace.clock
        self.difference: Finding | None = None

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Compares the operations of a run with the first one's."""
        for saved in self.saved:
            self.trace.unpack(saved)
        self.start, self.at = self.trace.clock, 0
        with replaced(self.trace, "listener", self.note):
            yield  # torch stops early by an exception: a first run may be longer than the second
        if self.at < len(self.operations) and self.difference is None:
            self.difference = self._of_operation(self.operations[self.at], "is not done again")

    def note(self, name: str, inputs: list[Tensor], out: Any, frame: FrameType | None) -> None:
        """Records an operation of the first run, and compares one of the second."""
        is_skipped = name in _CASTS or name.endswith("_like") or "empty" in name  # casts, and tensors made in the shape of one
        if is_skipped or self.difference is not None or not any(t.requires_grad for t in inputs):
            return
        sources = [t for t in inputs if not t.requires_grad or not self._is_own(t)]
        operation = Operation(name, digest(out), line_of(frame), [(storage_of(t), digest(t)) for t in sources])
        if self.at is None:
            self.operations.append(operation)
            return
        left = self.operations[self.at :]
        if left and left[0].name == name and same(left[0].digest, operation.digest):
            self.at += 1
        else:
            self.difference = self._compare(left, operation, sources, frame)

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in the present run."""
        return any(write.clock > self.start for write in self.trace.writes.get(storage_of(tensor), [])[:1])

    def _compare(self, left: list[Operation], new: Operation, sources: list[Tensor], frame: FrameType | None) -> Finding:
        """The finding about the operation at which the second run differs from what is left of the first."""
        if all(operation.name != new.name for operation in left):
            return self._of_operation(new, "was not done in forward")
        if left[0].name != new.name:
            return self._of_operation(left[0], "is not done again")
        for tensor, (storage, content), (_, now) in zip(sources, left[0].sources, new.sources, strict=False):
            if not same(content, now):
                return self._of_tensor(tensor, storage, new, frame)
        text = "a checkpointed part gives another result when backward repeats it, through none of its tensors"
        return Finding("recompute", text, STATE, line=new.line, others=self.others)

    def _of_operation(self, operation: Operation, words: str) -> Finding:
        text = f"a checkpointed part is repeated differently: its {operation.name.removeprefix('aten.')} {words}"
        return Finding("recompute", text, CODE, line=operation.line, others=self.others)

    def _of_tensor(self, tensor: Tensor, before: int, operation: Operation, frame: FrameType | None) -> Finding:
        """The finding about a tensor with other values than in forward; `before`: its storage then."""
        held = {storage_of(h.tensor): h for h in held_by(self.model, parameters=True)}
        write = self.trace.last_write(tensor)
        name = variable(frame, tensor) or (write.name if write is not None else "")
        source = held.get(storage_of(tensor)) or HeldTensor(tensor, "", name or "a tensor")
        text = f"a checkpointed part is repeated with another state than in forward: {source.path}"
        is_weight = isinstance(source.tensor, nn.Parameter)
        line = write.line if write is not None else next(iter(source.written()), None)
        remedy = WEIGHT if is_weight else GIVEN if source.owner is None else STATE
        if is_weight and before in held and before != storage_of(tensor):
            text = f"a checkpointed part used {held[before].path} in forward and uses {source.path} when it is repeated"
            line, remedy = self.line, BOUND
        others = tuple(other for other in dict.fromkeys((operation.line, self.line)) if other is not None and other != line)
        return Finding("recompute", text, remedy, source.describe(), source.module, line, others)

    def findings(self) -> list[Finding]:
        is_reported = any(saved.now is not None for saved in self.saved)
        return [] if self.difference is None or is_reported else [self.difference]


@contextmanager
def watched_checkpoints(
    report: Callable[[Finding], None], trace: Trace | None, model: nn.Module | None, names: dict[int, str]
) -> Iterator[list[Region | None]]:
    """Reports reentrant checkpoints without input gradient while a block runs, and collects the other checkpointed parts that
    are repeated whole, each as None where there is no trace.

    Args:
        names: paths by id of parameters and modules.
    """
    name = next(n for n in _GENERATORS if hasattr(library, n))
    apply, generator = library.CheckpointFunction.apply, getattr(library, name)
    regions: list[Region | None] = []

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        if torch.is_grad_enabled() and not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            for finding in _without_gradient(function, args, names):
                report(finding)
        return apply(function, preserve, *args)

    def generate(function: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        if not torch.is_grad_enabled() or not any(value is library.noop_context_fn for value in (*rest, *kwargs.values())):
            yield from generator(function, *rest, **kwargs)
            return
        if trace is None:
            regions.append(None)
            yield from generator(function, *rest, **kwargs)
            return
        region = Region(trace, model, rest[0] if isinstance(rest[0], tuple) else rest[5:])  # torch 2.14, and before
        regions.append(region)

        def again(*args: Any, **kwargs: Any) -> Any:
            with region.repeated():
                return function(*args, **kwargs)

        with replaced(trace, "listener", region.note):
            yield from generator(again, *rest, **kwargs)

    with replaced(library.CheckpointFunction, "apply", staticmethod(reentrant)), replaced(library, name, generate):
        yield regions


def _without_gradient(function: Any, args: tuple[Any, ...], names: dict[int, str]) -> list[Finding]:
    modules = modules_of(function)
    inside = {id(p): p for m in modules for p in m.parameters() if p.requires_grad}
    if modules and not inside:
        return []
    lost = [names.get(i, "parameter") for i in inside]
    shapes = ", ".join(shape_of(a) for a in args if isinstance(a, Tensor))
    text = f"reentrant checkpoint: no input ({shapes}) requires a gradient, so {len(lost) or 'all'} parameters inside get none"
    return [Finding("reentrant", text, REENTRANT, tensor=shortlist(lost), line=line_of(user_frame()))]
