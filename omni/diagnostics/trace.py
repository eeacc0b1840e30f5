"""Traces one step completely: writes to tensors, tensors saved for backward, uses of parameters, and cuts of the graph.

Costly, because every operation is recorded. A graph's tensors are saved through hooks, which switch torch's own version check
off; the trace makes that check itself, without stopping, so that one repetition shows every mistake.

Of parts that activation checkpointing repeats in backward, every operation is compared with its first run, by sum and norm of
its result. Where one differs, its inputs tell why: a tensor with other values than in forward, or another operation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as library
from torch import Tensor, nn

from omni.diagnostics.findings import OWN, TORCH, Finding, Line, line_of, shortlist, user_frame
from omni.diagnostics.held import HeldTensor, held_by, modules_of, shape_of, storage_of, version_of
from omni.utils import private

_HARMLESS = frozenset({"aten._local_scalar_dense", "aten.detach", "aten.alias"})
"""Operations that do not count as a use of a tensor with an older graph, because no gradient is asked for through them."""

_MACHINERY = ("_python_dispatch", "_dynamo", "_compile.py", OWN)
"""Parts of the names of files between a user's line and the trace."""

Node = Any  # torch.autograd.graph.Node, whose C++ attributes have no types


def next_number() -> int:
    """The number that autograd will give to the next node of this thread; nodes with a smaller one are older."""
    with torch.enable_grad(), torch.inference_mode(False):
        node: Node = torch.zeros((), requires_grad=True).clone().grad_fn
    return private.sequence_nr(node)


def is_older(node: Node, first: int) -> bool:
    return is_inner(node) and private.sequence_nr(node) < first


def is_inner(node: Node) -> bool:
    """Whether a node computes something (one that hands a gradient to a parameter is shared by all graphs)."""
    return not hasattr(node, "variable")


def nodes_of(tensors: Iterable[Any], since: int = 0) -> set[Node]:
    """Every node of the graphs that tensors (others are passed over) are the result of.

    Args:
        since: do not go beyond nodes that are older than this number; tensors whose own node is older are passed over.
    """
    nodes = [t.grad_fn for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None]
    todo = [node for node in nodes if not is_older(node, since)]
    seen: set[Node] = set(todo)
    while todo:
        after = {node for node, _ in todo.pop().next_functions if node is not None} - seen
        seen |= after
        todo += [node for node in after if not is_older(node, since)]
    return seen


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value while a block runs; an inherited one is inherited again after it."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


class Write(NamedTuple):
    """One write to a storage, its creation included. `name`: the variable in the user's function, if there is one."""

    clock: int
    line: Line | None
    op: str
    name: str


@dataclass
class Saved:
    """A tensor saved for backward, and where it was changed before it was used its version `now` and the changes."""

    tensor: Tensor
    version: int
    clock: int
    line: Line | None
    now: int | None = None
    writes: list[Write] = field(default_factory=list)


@dataclass(eq=False)
class Trace(private.TorchDispatchMode):
    """Record of a traced step, whose every operation comes here.

    Attributes:
        names, first: path by id of each parameter, and number of the step's first graph node.
        uses: by parameter and whether gradients were recorded, the first line that uses it.
        cuts: lines that leave the graph (`detach`, or work under no_grad), the operation, and its input.
        backwards: of each call of backward its line and the nodes it walks.
        listener: is called with each operation, its inputs, its result and the user's frame; not while `busy`, when operations
            are the trace's own.
    """

    names: dict[int, str]
    first: int
    clock: int = 0
    writes: dict[int, list[Write]] = field(default_factory=dict)
    changed: list[Saved] = field(default_factory=list)
    uses: dict[tuple[str, bool], Line | None] = field(default_factory=dict)
    cuts: list[tuple[Line, str, Tensor]] = field(default_factory=list)
    backwards: list[tuple[Line | None, set[Node]]] = field(default_factory=list)
    old_uses: dict[Node, Line | None] = field(default_factory=dict)
    listener: Callable[[str, list[Tensor], Any, FrameType | None], None] | None = None
    busy: bool = False
    supports_higher_order_operators = True

    def __post_init__(self) -> None:
        super().__init__()

    def last_write(self, tensor: Tensor) -> Write | None:
        writes = self.writes.get(storage_of(tensor))
        return writes[-1] if writes else None

    def forget(self) -> None:
        """Releases all tensors: a graph that backward has not run through holds this trace, and must not be held by it."""
        for kept in (self.writes, self.changed, self.uses, self.cuts, self.backwards, self.old_uses):
            kept.clear()

    def pack(self, tensor: Tensor) -> Saved:
        """Stores a tensor that autograd saves for backward."""
        with replaced(self, "busy", True):
            return Saved(tensor.detach(), version_of(tensor), self.clock, line_of(user_frame()))

    def unpack(self, saved: Saved) -> Tensor:
        """Gives a saved tensor, and records it if it has changed since it was saved."""
        now = version_of(saved.tensor)
        if saved.now is None and now != saved.version:
            writes = self.writes.get(storage_of(saved.tensor), [])
            saved.now, saved.writes = now, [write for write in writes if write.clock > saved.clock]
            self.changed.append(saved)
        return saved.tensor

    @contextmanager
    def running(self) -> Iterator[None]:
        """Traces a block. Compiled functions run eagerly: they show no operations, and a compiler may refuse tracing."""
        original, graph = torch.autograd.backward, torch.autograd.graph

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = tuple(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor) else (tensors,)
            self.backwards.append((line_of(user_frame()), nodes_of(roots)))
            original(roots, *args, **kwargs)

        with (
            replaced(torch.autograd, "backward", backward),
            graph.saved_tensors_hooks(self.pack, self.unpack),
            replaced(graph, "disable_saved_tensors_hooks", self._without_hooks(graph.disable_saved_tensors_hooks)),
            torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
            self,
        ):
            yield

    def _without_hooks(self, disable: Callable[[str], Any]) -> Callable[[str], Any]:
        """Wraps torch's way to forbid hooks, which functions of `torch.func` use, so that it removes this trace's first."""

        @contextmanager
        def without(message: str) -> Iterator[None]:
            top = private.saved_tensor_hooks(False)
            ours = top is not None and top[0] == self.pack
            if ours:
                private.pop_saved_tensor_hooks()
            try:
                with disable(message):
                    yield
            finally:
                if ours:
                    private.push_saved_tensor_hooks(self.pack, self.unpack)

        return without

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy or isinstance(func, private.HigherOrderOperator):
            return func(*args, **kwargs)
        self.clock += 1
        frame, op = user_frame(), str(func).rsplit(".", 1)[0]
        inputs = list(_tensors([*args, *kwargs.values()]))
        with private.DisableTorchFunctionSubclass():  # reading an attribute of a subclass may come here again
            if not private.in_backward():
                self._look(inputs, op, line_of(frame))
        out = func(*args, **kwargs)
        with private.DisableTorchFunctionSubclass():
            writes, is_view = _effects(func)
            written = _tensors([args[index] if index < len(args) else kwargs.get(name) for index, name in writes])
            for t in written:
                write = Write(self.clock, line_of(frame), op, variable(frame, t))
                self.writes.setdefault(storage_of(t), []).append(write)
            for storage in {storage_of(t) for t in _tensors([out])} - {storage_of(t) for t in inputs}:
                self.writes[storage] = [Write(self.clock, line_of(frame), op, "")]
            if self.listener is not None and not is_view:
                with replaced(self, "busy", True):
                    self.listener(op, inputs, out, frame)
        return out

    def _look(self, inputs: list[Tensor], op: str, line: Line | None) -> None:
        """Records uses of parameters, cuts of the graph, and tensors whose graph is older than the step."""
        recording = torch.is_grad_enabled()
        for t in inputs:
            if not t.requires_grad or t.is_nested:  # reading a jagged tensor's graph here does not return
                continue
            if id(t) in self.names:
                self.uses.setdefault((self.names[id(t)], recording), line)
            if line is not None and (op == "aten.detach" or not recording):
                files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe()))
                caller = next((file for file in files if not any(part in file for part in _MACHINERY)), TORCH)
                # A function of torch that the user's line called makes no cut of its own.
                if not caller.startswith(TORCH) and sum(cut[0] == line for cut in self.cuts) < 8:
                    self.cuts.append((line, op if recording else "no_grad", t))
            elif recording and op not in _HARMLESS and t.grad_fn is not None and is_older(t.grad_fn, self.first):
                self.old_uses.setdefault(t.grad_fn, line)


def digest(out: Any) -> tuple[float, ...]:
    """Sum and norm of the first tensor among an operation's results that has them, its size and whether it is on the CPU.
    Sparse, nested and 8-bit tensors cannot be summed on every device."""
    for t in out if isinstance(out, (list, tuple)) else [out]:
        if not isinstance(t, Tensor) or t.layout is not torch.strided or t.is_nested or t.device.type == "meta":
            continue
        if t.is_floating_point() and t.itemsize > 1:
            t, wide = t.detach(), torch.float64
            norm = float(torch.linalg.vector_norm(t, dtype=wide))
            return float(t.sum(dtype=wide)), norm, float(t.numel()), float(t.device.type == "cpu")
    return ()


def same(old: tuple[float, ...], new: tuple[float, ...]) -> bool:
    """Whether two digests are equal: exactly on the CPU; within 1e-4 of the norm on a GPU, where sums may change order."""
    if repr(old) == repr(new) or not old or not new or old[2:] != new[2:] or old[3]:  # repr: nan is equal to nan
        return repr(old) == repr(new)
    return abs(old[1] - new[1]) <= 1e-4 * old[1] and abs(old[0] - new[0]) <= 1e-4 * old[1] * max(old[2], 1) ** 0.5


@functools.lru_cache(maxsize=4096)
def _effects(func: Any) -> tuple[list[tuple[int, str]], bool]:
    """The arguments that an operation writes, by position and name, and whether it returns a view of one and writes none."""
    aliases = [(i, a.name, a.alias_info) for i, a in enumerate(private.schema_of(func).arguments) if a.alias_info is not None]
    writes = [(i, name) for i, name, alias in aliases if alias.is_write]
    return writes, not writes and any(r.alias_info is not None for r in private.schema_of(func).returns)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def variable(frame: FrameType | None, tensor: Tensor) -> str:
    """Name of the local variable of the user's function that holds a tensor."""
    if frame is None or frame.f_code.co_name == "<module>":
        return ""
    storage, values = storage_of(tensor), frame.f_locals.items()
    return next((name for name, value in values if isinstance(value, Tensor) and storage_of(value) == storage), "")


# --- checkpointed parts -----------------------------------------------------------------------------------------------


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
        # A source was not made in the present run.
        first_writes = [(t, self.trace.writes.get(storage_of(t), [])[:1]) for t in inputs]
        sources = [t for t, first in first_writes if not t.requires_grad or not any(w.clock > self.start for w in first)]
        operation = Operation(name, digest(out), line_of(frame), [(storage_of(t), digest(t)) for t in sources])
        if self.at is None:
            self.operations.append(operation)
            return
        left = self.operations[self.at :]
        if left and left[0].name == name and same(left[0].digest, operation.digest):
            self.at += 1
        else:
            self.difference = self._compare(left, operation, sources, frame)

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
