"""Finds mistakes with gradients and graphs in a step, and the cause of errors of autograd with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.diagnostics.findings import Finding, Line, is_internal, shortlist
from omni.diagnostics.held import HeldTensor, held_by, held_in, reach, storage_of, version_of
from omni.diagnostics.trace import WEIGHT, Node, Region, Saved, Trace, is_inner, is_older, nodes_of
from omni.utils.private import base_of, sequence_nr

FRAMES = 12  # of the user's functions, that are searched for variables

_ERRORS = {
    "inplace": ("modified by an inplace operation", "is being used in an in-place operation"),
    "freed": ("through the graph a second time", "second backward through one forward"),
    "inference": ("nference tensor",),
    "nothing": ("does not require grad and does not have a grad_fn",),
    "recompute": ("torch.utils.checkpoint",),
}
INPLACE = "make a new tensor instead (x = x + 1 for x.add_(1), torch.where for a masked write), or change it after backward"
CACHE = "train without the cache, or write it under torch.no_grad() while generating; to train through it, pass on a new tensor"
STATISTIC = "detach what feeds it ({name} = ... x.detach() ...), or compute it under torch.no_grad(): it needs no gradient"
OUTSIDE = "compute it inside the step, in the module's forward; detach it only if what made it is not to be trained"
CARRY = "cut it where a step starts: {name} = {name}.detach(); backward through several steps needs them in one loss"
ONE_BACKWARD = "add the losses and call backward once; or detach what passes between two parts, on the side that is not trained"
INFERENCE = "evaluate under torch.no_grad(), not torch.inference_mode(); clone() outside of that makes a normal tensor of it"
NO_GRAPH = "call the model with gradients recorded (no no_grad around it) and with trainable parameters; do not detach the loss"
UNOWNED = "give them to the optimizer (build it after to(), added adapters, copies), or freeze them with requires_grad_(False)"
_LOST = {
    "detached": "remove the detach (or no_grad) between this part and the loss, and add up all losses before one backward",
    "used": "run this part with gradients recorded; or freeze it with requires_grad_(False) if it is not to be trained",
    "unused": "use it in forward; if it is not to be trained, freeze it (requires_grad_(False)) or leave it out of the model",
    "": "look for a detach, .data, .item(), numpy() or no_grad between this part and the loss, or freeze it",
}
_COPIES = ("CopySlices", "IndexCopy", "IndexPut", "Copy", "Scatter", "SliceScatter", "SelectScatter", "MaskedScatter")


@dataclass(eq=False)
class Scene:
    """One step: its start, and the holders of tensors (modules, the batch, variables of functions).

    Attributes:
        frame: frame in which the step was started; `function`: the step as a function, where there is one.
        names: path by id of each parameter and module; `first`: number of the step's first graph node.
        held: buffers, attributes and tensors of the batch at its beginning, with the graph and version each had then.
        parts: checkpointed parts, without a trace each as None; `later`: the user's frames in an error's traceback.
    """

    model: nn.Module | None
    batch: Any
    frame: FrameType | None
    function: Callable[[], Any] | None = None
    names: dict[int, str] = field(default_factory=dict)
    first: int = 0
    held: list[tuple[HeldTensor, Node, int]] = field(default_factory=list)
    trace: Trace | None = None
    parts: list[Region | None] = field(default_factory=list)
    later: list[FrameType] = field(default_factory=list)

    def variables(self) -> Iterator[HeldTensor]:
        """Tensors in variables of the user's functions: failed ones, running ones, and those that the step reaches."""
        seen: set[int] = set()
        start = HeldTensor(torch.empty(0), "", "the step")
        files = ((frame, frame.f_code.co_filename) for frame, _ in walk_stack(self.frame))
        running = [frame for frame, file in files if not is_internal(file) and "-packages" not in file]
        for frame in [*self.later[::-1], *running[:FRAMES]]:
            for name, value in frame.f_locals.items():
                if not name.startswith("__"):
                    yield from reach(start._replace(name=name, code=frame.f_code, at=frame.f_lineno), value, seen)
        if self.function is not None:
            yield from reach(start, self.function, seen)

    def now(self, parameters: bool = False) -> Iterator[HeldTensor]:
        """Tensors that modules and batch hold at this moment."""
        yield from held_by(self.model, parameters)
        yield from held_in(self.batch, "batch")

    def written(self, held: HeldTensor) -> Line | None:
        """The line that last wrote a held tensor: traced, or found in the source of its class."""
        present = [other.tensor for other in self.now() if other.path == held.path and other.tensor.grad_fn is not None]
        writes = [] if self.trace is None else [self.trace.last_write(t) for t in present]
        source = (line for line in held.written() if line.function != "__init__")
        return next((write.line for write in writes if write is not None), None) or next(source, None)

    def trainable_of(self, tensor: Tensor) -> str:
        """Names of the trainable parameters that a tensor's graph leads to."""
        leaves = [node.variable for node in nodes_of([tensor]) if not is_inner(node)]
        return shortlist(sorted(self.names.get(id(leaf), "a parameter outside the model") for leaf in leaves)) or "what made it"


def _is_view_of_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a parameter: it shows the present values, and its graph keeps nothing alive."""
    base = base_of(tensor)
    return base is not None and base.is_leaf and base.requires_grad


def _is_copy(node: object) -> bool:
    """Whether a node comes from writing into a tensor by index or slice."""
    return type(node).__name__.removeprefix("torch::autograd::").startswith(_COPIES) or "CopySlices" in str(node)


# --- errors -----------------------------------------------------------------------------------------------------------


def kind_of(error: BaseException) -> str | None:
    """Kind of mistake that an error reports; None where it is not from autograd."""
    text = str(error)
    return next((kind for kind, parts in _ERRORS.items() if any(part in text for part in parts)), None)


def diagnose(scene: Scene, error: BaseException) -> list[Finding]:
    """Findings for an error of autograd."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    scene.later = [frame for frame in frames if not is_internal(frame.f_code.co_filename)]
    kind, nodes, traced = kind_of(error), nodes_of(_backward_roots(frames)), traced_changes(scene)
    if kind == "freed":
        return [*(_from_outside(scene, nodes) or [_twice(scene, nodes)]), *traced]
    if kind == "inference":
        holders = [scene.now(parameters=True), scene.variables()]
        ours, users = ([held for held in each if held.tensor.is_inference()] for each in holders)
        return [_inference(scene, held) for held in ours or users[:1]] + traced
    if kind == "nothing":
        message = "the loss has no graph: no parameter that requires a gradient took part in it, or no gradients were recorded"
        line = scene.trace.cuts[-1][0] if scene.trace is not None and scene.trace.cuts else None
        return [*traced, Finding("no_gradient", message, NO_GRAPH, line=line)]
    if kind == "inplace":
        old, error_line = _from_outside(scene, nodes), str(error).strip().split("\n")[0]
        is_known = old or (traced and scene.trace is not None)
        return [*old, *traced, *([] if is_known else [Finding("inplace", error_line, INPLACE)])]
    message = "a checkpointed part is repeated in backward and does not do the same as in forward"
    remedy = "let its result depend on its arguments alone; guard.rerun(step) names what has changed"
    return traced or [Finding("recompute", message, remedy)]


def _backward_roots(frames: list[FrameType]) -> list[Tensor]:
    """Tensors on which `backward` or `grad` was called, in the frames of an error; empty where it was not raised there."""
    roots: list[Tensor] = []
    for frame in frames:
        name = frame.f_code.co_name
        if frame.f_code.co_filename == torch.autograd.__file__ and name in ("backward", "grad"):
            value = frame.f_locals.get("tensors" if name == "backward" else "outputs", ())
            roots = [value] if isinstance(value, Tensor) else [t for t in value if isinstance(t, Tensor)]
    return roots


def traced_changes(scene: Scene) -> list[Finding]:
    """Saved tensors that a step changed in place (traced), one finding for each storage, old graphs that its backward reached
    and checkpointed parts that it repeated differently (traced), and caches that it wrote."""
    changed: dict[int, Finding] = {}
    parts = [part for part in scene.parts if part is not None and all(saved.now is None for saved in part.saved)]
    others = [part.difference for part in parts if part.difference is not None]
    if scene.trace is not None:
        held = {storage_of(h.tensor): h for h in scene.now(parameters=True)}
        for saved in scene.trace.changed:
            storage = storage_of(saved.tensor)
            if storage not in changed:
                changed[storage] = _changed(saved, held.get(storage), scene)
        others += [finding for _, nodes in scene.trace.backwards for finding in _from_outside(scene, nodes)]
    caches = {finding.line for finding in changed.values() if finding.kind == "cache"}
    return [*changed.values(), *others, *(f for f in written_caches(scene) if f.line is None or f.line not in caches)]


def _changed(saved: Saved, held: HeldTensor | None, scene: Scene) -> Finding:
    writes, kind, remedy = saved.writes, "inplace", INPLACE
    source = held or HeldTensor(saved.tensor, "", next((write.name for write in writes if write.name), "a tensor"))
    if scene.names.get(id(source.tensor)):
        remedy = WEIGHT
    elif _is_copy(source.tensor.grad_fn):
        kind, remedy = "cache", CACHE
    lines = [line for line in dict.fromkeys([*(write.line for write in writes), saved.line]) if line is not None]
    known = any(write.line is not None for write in writes)
    change = f"version {saved.now} instead of {saved.version}"
    ops = shortlist(list(dict.fromkeys(write.op.removeprefix("aten.") for write in writes)), 3)
    text = f"{source.path} was saved for backward and then changed in place: {change} ({ops})"
    return Finding(kind, text, remedy, source.describe(), source.module, lines[0] if known else None, tuple(lines[known:]))


def _from_outside(scene: Scene, nodes: set[Node]) -> list[Finding]:
    """Findings about holders of a part of a graph that is older than the step; none where there is no such part."""
    old = {node for node in nodes if is_older(node, scene.first)}
    stale = [_stale(scene, held, node) for held, node, _ in scene.held if node is not None and node in old]
    if stale or not old:
        return stale
    used = {} if scene.trace is None else scene.trace.old_uses
    others = tuple(line for node, line in used.items() if node in old and line is not None)
    variables = [v for v in scene.variables() if v.tensor.grad_fn is not None]
    variables.sort(key=lambda v: (not v.written(), sequence_nr(v.tensor.grad_fn)))
    # A state that was bound again is younger; a recurrent layer's is no part of the loss, but depends on the old one.
    bound = (v for v in variables if v.written() and nodes_of([v.tensor]) & old)
    v = next((v for v in variables if v.tensor.grad_fn in old), None) or next(bound, None)
    if v is None:
        text = f"backward reaches {len(old)} nodes of a graph from before this step; nothing that the guard can reach holds it"
        return [Finding("freed", text, OUTSIDE, "", "", next(iter(others), None), others[1:])]
    text = f"the variable {v.path} carries the graph of one step into the next"
    remedy, line = CARRY.format(name=v.path), next(iter(v.written()), None)
    if v.tensor.grad_fn in old:
        text = f"the variable {v.path} keeps a graph from before this step, which goes through {scene.trainable_of(v.tensor)}"
        remedy = OUTSIDE
    return [Finding("freed", text, remedy, v.describe(), "", line, tuple(other for other in others if other != line))]


def _twice(scene: Scene, nodes: set[Node]) -> Finding:
    """The finding for two backward calls of one step that share a graph, through a tensor that a module holds or one loss."""
    before = {(held.path, node) for held, node, _ in scene.held}
    for held in scene.now():
        node = held.tensor.grad_fn
        if held.owner is None or node is None or (held.path, node) in before or _is_view_of_leaf(held.tensor):
            continue
        if nodes_of([held.tensor]) & nodes:
            text = f"{held.path} carries the graph of one backward call of this step into the next, which the first one freed"
            remedy = CACHE if _is_copy(node) else STATISTIC.format(name="self." + held.name)
            return Finding("freed", text, remedy, held.describe(), held.module, scene.written(held))
    text = "two backward calls of this step walk through the same graph, which the first one freed"
    backwards = [] if scene.trace is None else scene.trace.backwards
    shared = [line for line, walked in backwards[:-1] if line and any(is_inner(node) for node in walked & nodes)]
    return Finding("freed", text, ONE_BACKWARD, line=backwards[-1][0] if backwards else None, others=tuple(shared[:1]))


# --- what a step holds ------------------------------------------------------------------------------------------------


def _stale(scene: Scene, held: HeldTensor, node: object) -> Finding:
    """The finding for a held tensor that carries a graph from before the step."""
    if held.owner is None:
        nodes = nodes_of([held.tensor])
        origins = [v for v in scene.variables() if v.tensor.grad_fn in nodes and v.written()]
        # the variable at which the graph starts
        first = min(origins, key=lambda v: sequence_nr(v.tensor.grad_fn), default=None)
        line = None if first is None else first.written()[0]
        text = f"{held.path} was computed before the step and carries a graph: it goes through "
        return Finding("stale", f"{text}{scene.trainable_of(held.tensor)} only once", OUTSIDE, held.describe(), line=line)
    line = scene.written(held)
    others = tuple(p for p in held.written() if p != line and p.function != "__init__")[:2]
    kind, remedy = "stale", STATISTIC.format(name="self." + held.name)
    text = f"{held.path} keeps the graph of an earlier step: a backward that comes to it fails"
    if _is_copy(node):
        text = f"{held.path} is a cache that was written while gradients recorded, and keeps the graph of an earlier step"
        kind, remedy = "cache", CACHE
    return Finding(kind, text, remedy, held.describe(), held.module, line, others)


def at_start(scene: Scene) -> list[Finding]:
    """Findings about graphs from before the step, and about inference tensors.

    Checked when the step is over: a tensor that a module has computed again, not from its old value, is no finding.
    """
    findings = []
    old = any(node is not None and held.owner is not None for held, node, _ in scene.held)
    now = {held.path: held.tensor for held in held_by(scene.model)} if old else {}
    reached = nodes_of(now.values(), since=scene.first) if old else set()
    for held, node, _ in scene.held:
        if node is not None and not _is_view_of_leaf(held.tensor):
            current = now.get(held.path)
            if held.owner is None or node in reached or (current is not None and current.grad_fn is node):
                findings.append(_stale(scene, held, node))
        elif held.tensor.is_inference():
            findings.append(_inference(scene, held))
    return findings


def _inference(scene: Scene, held: HeldTensor) -> Finding:
    same = [held] if held.owner is not None else [v for v in scene.variables() if v.tensor is held.tensor]
    text = f"{held.path} was made under torch.inference_mode(): autograd cannot save it"
    line = next((line for v in same for line in v.written()), None)
    return Finding("inference", text, INFERENCE, held.describe(), held.module, line)


def written_caches(scene: Scene) -> list[Finding]:
    """Tensors that had no graph when the step started and have one now: written in place while gradients are recorded."""
    findings = []
    for held, node, version in scene.held:
        tensor = held.tensor
        if node is None and version >= 0 and tensor.grad_fn is not None and tensor._version != version:
            text = f"{held.path} was written in place while gradients record: it now carries the graph of this step"
            remedy = CACHE if _is_copy(tensor.grad_fn) else STATISTIC.format(name=held.path)
            findings.append(Finding("cache", text, remedy, held.describe(), held.module, scene.written(held)))
    return findings


# --- gradients that do not arrive, or that nobody uses ----------------------------------------------------------------


def missing_gradients(scene: Scene, named: Iterable[tuple[str, nn.Parameter]]) -> list[Finding]:
    """Findings about trainable parameters to which no gradient came, one for each cause."""
    groups: dict[tuple[str, Line | None], list[str]] = {}
    for name, p in named:
        groups.setdefault(_cause(scene, name, p), []).append(name)
    findings = []
    for (why, line), names in groups.items():
        text = f"{len(names)} trainable parameters received no gradient: {why}"
        module = names[0].rpartition(".")[0] if len(names) == 1 else ""
        findings.append(Finding("no_gradient", text, _LOST.get(why.split(" ")[0], _LOST[""]), shortlist(names), module, line))
    return findings


def _cause(scene: Scene, name: str, p: nn.Parameter) -> tuple[str, Line | None]:
    trace = scene.trace
    if trace is None:
        return "a full trace (guard.rerun) says where it was lost", None
    if isinstance(p, DTensor):
        return "FSDP2 gathers it, so that a trace does not see where it was lost", None
    if (name, True) not in trace.uses:
        why = "used only where gradients are not recorded" if (name, False) in trace.uses else "unused in forward"
        return why, trace.uses.get((name, False))
    for line, op, source in trace.cuts:
        if any(getattr(node, "variable", None) is p for node in nodes_of([source])):
            return f"detached from the loss by {op.removeprefix('aten.')}", line
    return "its results do not reach the loss", trace.uses[name, True]


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, nn.Parameter]:
    """The parameters that optimizers own, by id."""
    return {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def fingerprint(p: nn.Parameter) -> tuple[float, ...]:
    """Version and first values of a parameter: a write through `data` counts in no version."""
    local = p.to_local() if isinstance(p, DTensor) else p
    return version_of(p), *local.detach().flatten()[:64].tolist()
