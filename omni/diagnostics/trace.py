"""Traces one step completely: writes to tensors, tensors saved for backward, uses of parameters, and cuts of the graph.

Costly, because every operation is recorded. A graph's tensors are saved through hooks, which switch torch's own version check
off; the trace makes that check itself, without stopping, so that one repetition shows every mistake.
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
from torch import Tensor

from omni.diagnostics.findings import OWN, TORCH, Line, line_of, user_frame
from omni.diagnostics.held import storage_of, version_of
from omni.utils import private

_HARMLESS = frozenset({"aten._local_scalar_dense", "aten.detach", "aten.alias"})
"""Operations that do not count as a use of a tensor with an older graph, because no gradient is asked for through them."""

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
        names: path by id of each parameter.
        first: number of the step's first graph node.
        uses: by parameter and whether gradients were recorded, the first line that uses it.
        cuts: lines that leave the graph (`detach`, or work under no_grad), the operation, and its input.
        backwards: of each call of backward its line and the nodes it walks.
        listener: is called with each operation, its inputs, its result and the user's frame.
        busy: operations are the trace's own.
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
            self._note(op, frame, inputs, written, out)
            if self.listener is not None and not is_view:
                with replaced(self, "busy", True):
                    self.listener(op, inputs, out, frame)
        return out

    def _note(self, op: str, frame: FrameType | None, inputs: list[Tensor], written: Iterable[Tensor], out: Any) -> None:
        """Records the tensors that an operation has written and created."""
        line = line_of(frame)
        for t in written:
            self.writes.setdefault(storage_of(t), []).append(Write(self.clock, line, op, variable(frame, t)))
        for storage in {storage_of(t) for t in _tensors([out])} - {storage_of(t) for t in inputs}:
            self.writes[storage] = [Write(self.clock, line, op, "")]

    def _look(self, inputs: list[Tensor], op: str, line: Line | None) -> None:
        """Records uses of parameters, cuts of the graph, and tensors whose graph is older than the step."""
        recording = torch.is_grad_enabled()
        for t in inputs:
            if not t.requires_grad or t.is_nested:  # reading a jagged tensor's graph here does not return
                continue
            if id(t) in self.names:
                self.uses.setdefault((self.names[id(t)], recording), line)
            if line is not None and (op == "aten.detach" or not recording) and _is_direct():
                if sum(cut[0] == line for cut in self.cuts) < 8:
                    self.cuts.append((line, op if recording else "no_grad", t))
            elif recording and op not in _HARMLESS and t.grad_fn is not None and is_older(t.grad_fn, self.first):
                self.old_uses.setdefault(t.grad_fn, line)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor can be summed on every device; sparse, nested and 8-bit ones cannot."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.is_floating_point() and tensor.itemsize > 1 and tensor.device.type != "meta"


def digest(out: Any) -> tuple[float, ...]:
    """Sum and norm of the first tensor among an operation's results that has them, its size and whether it is on the CPU."""
    for t in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(t, Tensor) and _is_dense(t):
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


def _is_direct() -> bool:
    """Whether the operation was called by the user's own line, and not by a function of torch that it called."""
    files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))
    machinery = ("_python_dispatch", "_dynamo", "_compile.py", OWN)
    return not next((file for file in files if not any(part in file for part in machinery)), TORCH).startswith(TORCH)
