"""Traces one step completely: writes to tensors, tensors saved for backward, uses of parameters, and cuts of the graph.

Costly, because every operation is recorded. A graph's tensors are saved through hooks, which switch torch's own version check
off; the trace makes that check itself, without stopping, so that one repetition shows every mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from omni.diagnostics.graph import Node, is_older, nodes_of
from omni.diagnostics.held import shape_of, storage_of, version_of
from omni.diagnostics.source import OWN, TORCH, Line, line_of, user_frame

SAMPLE = 1024
"""Number of values of a saved tensor that are compared, to find writes that bypass autograd."""

_HARMLESS = frozenset({"aten._local_scalar_dense", "aten.detach", "aten.alias"})
"""Operations that do not count as a use of a tensor with an older graph, because no gradient is asked for through them."""


class Write(NamedTuple):
    """One write to a storage, its creation included. `name`: the variable in the user's function, if there is one."""

    clock: int
    line: Line | None
    op: str
    name: str


@dataclass
class Saved:
    """A tensor saved for backward. `digest`: of its values then, compared where its version does not show a write."""

    tensor: Tensor
    version: int
    clock: int
    line: Line | None
    digest: tuple[float, ...] = ()
    reported: bool = False


class Changed(NamedTuple):
    """A saved tensor that was changed before backward used it, and the changes."""

    saved: Saved
    now: int
    writes: list[Write]


@dataclass
class Use:
    """Lines that use a parameter: with gradients recorded, and without."""

    recorded: Line | None = None
    silent: Line | None = None


class Cut(NamedTuple):
    """A line that leaves the graph (`detach`, or work under no_grad), and its input tensor."""

    line: Line
    op: str
    source: Tensor


class Backward(NamedTuple):
    """One call of backward: its line and the nodes it walks."""

    line: Line | None
    nodes: set[Node]


class Listener(Protocol):
    """Receives every operation inside a checkpointed part."""

    def note(self, op: str, args: list[Tensor], out: Any, line: Line | None, clock: int) -> None: ...


@dataclass
class _Schema:
    writes: list[tuple[int, str]]
    view: bool


@dataclass
class Trace:
    """Record of a traced step. `names`: path by id of each parameter; `first`: number of the step's first graph node."""

    names: dict[int, str]
    first: int
    clock: int = 0
    writes: dict[int, list[Write]] = field(default_factory=dict)
    changed: list[Changed] = field(default_factory=list)
    uses: dict[str, Use] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    old_uses: dict[Node, tuple[str, Line | None]] = field(default_factory=dict)
    listeners: list[Listener] = field(default_factory=list)
    busy: bool = False

    def since(self, storage: int, clock: int) -> list[Write]:
        """Writes to a storage after the time `clock`."""
        return [write for write in self.writes.get(storage, []) if write.clock > clock]

    def last(self, storage: int) -> Line | None:
        writes = self.writes.get(storage)
        return writes[-1].line if writes else None

    def forget(self) -> None:
        """Release all tensors: a graph that backward has not run through holds this trace, and must not be held by it."""
        for kept in (self.writes, self.changed, self.uses, self.cuts, self.backwards, self.old_uses):
            kept.clear()

    # --- what autograd saves ------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Saved:
        self.busy = True
        try:
            content = digest(_sample(tensor)) if type(tensor) in (Tensor, nn.Parameter) and _is_dense(tensor) else ()
            return Saved(tensor.detach(), version_of(tensor), self.clock, line_of(user_frame()), content)
        finally:
            self.busy = False

    def unpack(self, saved: Saved) -> Tensor:
        self.check(saved)
        return saved.tensor

    def check(self, saved: Saved) -> None:
        """Record a saved tensor if it has changed since it was saved."""
        if saved.reported:
            return
        now, writes = version_of(saved.tensor), self.since(storage_of(saved.tensor), saved.clock)
        if now != saved.version or (writes and saved.digest and self._differs(saved)):
            saved.reported = True
            self.changed.append(Changed(saved, now, writes))

    def _differs(self, saved: Saved) -> bool:
        """Whether a tensor was written through `data`, which no version counts, with other values than it held (FSDP2 writes
        the same ones when it gathers weights)."""
        self.busy = True
        try:
            return not same(saved.digest, digest(_sample(saved.tensor)), saved.tensor)
        finally:
            self.busy = False

    @contextmanager
    def running(self) -> Iterator[Trace]:
        """Trace the operations of a block; backward calls are recorded before they run."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = tuple(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor) else (tensors,)
            self.backwards.append(Backward(line_of(user_frame()), nodes_of(roots)))
            original(roots, *args, **kwargs)

        torch.autograd.backward = backward
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack),
                self._transforms(),
                _uncompiled(),
                _Mode(self),
            ):
                yield self
        finally:
            torch.autograd.backward = original

    @contextmanager
    def _transforms(self) -> Iterator[None]:
        """Remove the hooks while a function of `torch.func` runs, because it refuses any."""
        graph, hooks = torch.autograd.graph, torch._C._autograd
        original = graph.disable_saved_tensors_hooks

        @contextmanager
        def disable(error_message: str) -> Iterator[None]:
            top = hooks._top_saved_tensors_default_hooks(False)
            ours = top is not None and top[0] == self.pack
            if ours:
                hooks._pop_saved_tensors_default_hooks()
            try:
                with original(error_message):
                    yield
            finally:
                if ours:
                    hooks._push_saved_tensors_default_hooks(self.pack, self.unpack)

        graph.disable_saved_tensors_hooks = disable
        try:
            yield
        finally:
            graph.disable_saved_tensors_hooks = original


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly: compiled code shows no operations, and a compiler may refuse tracing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor can be summed on every device; sparse, nested and 8-bit ones cannot."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.is_floating_point() and tensor.itemsize > 1 and tensor.device.type != "meta"


def _sample(tensor: Tensor) -> Tensor:
    """Some of the values of a tensor, evenly spread; all where it is not contiguous."""
    tensor = tensor.detach()
    lying = tensor.mT if tensor.ndim > 1 and not tensor.is_contiguous() else tensor
    step = lying.numel() // SAMPLE
    return lying.view(-1)[::step] if step > 1 and lying.is_contiguous() else tensor


def digest(out: Any) -> tuple[float, ...]:
    """Sum and norm of the first tensor among an operation's results that has them."""
    for t in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(t, Tensor) and _is_dense(t):
            t, wide = t.detach(), torch.float64
            return float(t.sum(dtype=wide)), float(torch.linalg.vector_norm(t, dtype=wide)), float(t.numel())
    return ()


def same(old: tuple[float, ...], new: tuple[float, ...], out: Any) -> bool:
    """Whether two digests are equal: exactly on the CPU; within 1e-4 of the norm on a GPU, where sums may change order."""
    if len(old) != len(new) or not old or old[2] != new[2]:
        return len(old) == len(new) == 0
    first = out[0] if isinstance(out, (list, tuple)) else out
    if first.device.type == "cpu" or not all(x == x for x in (*old, *new)):
        return repr(old) == repr(new)
    return abs(old[1] - new[1]) <= 1e-4 * old[1] and abs(old[0] - new[0]) <= 1e-4 * old[1] * max(old[2], 1) ** 0.5


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.schemas: dict[Any, _Schema] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace, kwargs = self.trace, kwargs or {}
        if trace.busy or isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        trace.clock += 1
        frame = user_frame()
        line, op = line_of(frame), str(func).rsplit(".", 1)[0]
        inputs = list(_tensors([*args, *kwargs.values()]))
        with torch._C.DisableTorchFunctionSubclass():  # reading an attribute of a subclass may come here again
            self._look(inputs, op, line)
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            self._note(func, frame, inputs, args, kwargs, out)
        return out

    def _note(self, func: Any, frame: FrameType | None, inputs: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        """Record the tensors that an operation has written and created."""
        trace, line, op = self.trace, line_of(frame), str(func).rsplit(".", 1)[0]
        known = {storage_of(t) for t in inputs}
        schema = self._schema(func)
        for index, name in schema.writes:
            for t in _tensors([args[index] if index < len(args) else kwargs.get(name)]):
                storage = storage_of(t)
                trace.writes.setdefault(storage, []).append(Write(trace.clock, line, op, _variable(frame, storage)))
        for t in _tensors([out]):
            storage = storage_of(t)
            if storage not in known:
                trace.writes[storage] = [Write(trace.clock, line, op, "")]
        if trace.listeners and not schema.view:
            trace.busy = True
            try:
                trace.listeners[-1].note(op, inputs, out, line, trace.clock)
            finally:
                trace.busy = False

    def _look(self, inputs: list[Tensor], op: str, line: Line | None) -> None:
        """Record uses of parameters, cuts of the graph, and tensors whose graph is older than the step."""
        trace, recording = self.trace, torch.is_grad_enabled()
        if torch._C._current_graph_task_id() != -1:  # inside backward
            return
        for t in inputs:
            if not t.requires_grad or t.is_nested:  # reading a jagged tensor's graph here does not return
                continue
            name = trace.names.get(id(t))
            if name is not None:
                use = trace.uses.setdefault(name, Use())
                if recording:
                    use.recorded = use.recorded or line
                else:
                    use.silent = use.silent or line
            if line is not None and (op == "aten.detach" or not recording) and _is_direct():
                if sum(cut.line == line for cut in trace.cuts) < 8:
                    trace.cuts.append(Cut(line, op if recording else "no_grad", t))
            elif recording and op not in _HARMLESS and t.grad_fn is not None and is_older(t.grad_fn, trace.first):
                trace.old_uses.setdefault(t.grad_fn, (shape_of(t), line))

    def _schema(self, func: Any) -> _Schema:
        if func not in self.schemas:
            aliases = [(i, a.name, a.alias_info) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None]
            writes = [(i, name) for i, name, alias in aliases if alias.is_write]
            returns = any(r.alias_info is not None for r in func._schema.returns)
            self.schemas[func] = _Schema(writes, returns and not writes)
        return self.schemas[func]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _variable(frame: Any, storage: int) -> str:
    """Name of the local variable whose storage is written."""
    if frame is None or frame.f_code.co_name == "<module>":
        return ""
    names = [k for k, v in frame.f_locals.items() if isinstance(v, Tensor) and storage_of(v) == storage]
    return names[0] if names else ""


def _is_direct() -> bool:
    """Whether the operation was called by the user's own line, and not by a function of torch that it called."""

    frame: Any = sys._getframe(1)
    while frame is not None:
        file: str = frame.f_code.co_filename
        machinery = "_python_dispatch" in file or "_dynamo" in file or "_compile.py" in file or file.startswith(OWN)
        if not machinery:
            return not file.startswith(TORCH)
        frame = frame.f_back
    return False
