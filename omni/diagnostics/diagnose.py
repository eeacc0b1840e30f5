"""Finds what a step tells of gradients and graphs, and the cause of errors of autograd with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.held import HeldTensor, held_by, held_in, reach, shape_of, storage_of, version_of
from omni.diagnostics.recompute import Region
from omni.diagnostics.source import is_internal
from omni.diagnostics.trace import Node, Saved, Trace, is_inner, is_older, nodes_of

FRAMES = 12
"""Number of the user's frames that are searched for variables."""

_ERRORS = {
    "inplace": ("modified by an inplace operation", "is being used in an in-place operation"),
    "freed": ("through the graph a second time", "second backward through one forward"),
    "inference": ("nference tensor",),
    "nothing": ("does not require grad and does not have a grad_fn",),
    "recompute": ("torch.utils.checkpoint",),
}
INPLACE = (
    "make a new tensor instead (x = x + 1 for x.add_(1), torch.where for a masked write), or change it once backward has run"
)
CACHE = (
    "train without the cache (a whole sequence through plain causal attention), or write it under torch.no_grad() while "
    "generating; to train through a cache, build a new tensor (torch.cat, index_copy) and pass it on"
)
STATISTIC = (
    "detach what feeds it ({name} = ... x.detach() ...), or compute it under torch.no_grad(): statistics need no gradient"
)
OUTSIDE = (
    "compute it inside the step, in the module's forward, so that every step has a graph of its own; detach it only if what "
    "made it is not to be trained"
)
CARRY = "cut it where a step starts: {name} = {name}.detach(); backward through several steps needs them in one loss"
ONE_BACKWARD = (
    "add the losses and call backward once; where two parts are to be trained apart, detach what passes between them on the "
    "side that is not to be trained"
)
INFERENCE = (
    "evaluate under torch.no_grad(), not torch.inference_mode(), where what is made there is used in training again; clone() "
    "outside of inference mode turns one into a normal tensor"
)
NO_GRAPH = "call the model with gradients recorded (no no_grad around it) and with trainable parameters; do not detach the loss"
_LOST = {
    "detached": "let the graph through: remove the detach (or no_grad) between this part and the loss, and add up all losses "
    "before one backward",
    "used": "run this part with gradients recorded; or freeze it with requires_grad_(False) if it is not to be trained",
    "unused": "use it in forward; if it is not to be trained, freeze it (requires_grad_(False)) or leave it out of the model",
    "": "look for a detach, .data, .item(), numpy() or a no_grad block between this part and the loss; freeze it with "
    "requires_grad_(False) if it is not to be trained",
}
_COPIES = ("CopySlices", "IndexCopy", "IndexPut", "Copy", "Scatter", "SliceScatter", "SelectScatter", "MaskedScatter")


@dataclass
class Scene:
    """One step: its start, and the holders of tensors (modules, the batch, variables of functions).

    Attributes:
        names: path by id of each parameter and module.
        first: number of the step's first graph node.
        held: buffers, attributes and tensors of the batch at its beginning, with the graph and version each had then.
        frame: frame in which the step was started; `function`: the step as a function, where there is one.
        later: the user's frames in an error's traceback.
    """

    model: nn.Module | None
    names: dict[int, str]
    first: int
    batch: Any = None
    frame: FrameType | None = None
    function: Callable[[], Any] | None = None
    held: list[tuple[HeldTensor, Node, int]] = field(default_factory=list)
    trace: Trace | None = None
    regions: list[Region] = field(default_factory=list)
    later: list[FrameType] = field(default_factory=list)

    def variables(self) -> Iterator[HeldTensor]:
        """Tensors in variables of the user's functions: running ones, failed ones, and those that the step reaches."""
        seen: set[int] = set()
        start = HeldTensor(torch.empty(0), "", "the step", "")
        for frame in [*self.later[::-1], *self._callers()]:
            for name, value in frame.f_locals.items():
                if not name.startswith("__"):
                    yield from reach(start._replace(name=name, code=frame.f_code, at=frame.f_lineno), value, seen)
        if self.function is not None:
            yield from reach(start, self.function, seen)

    def _callers(self) -> list[FrameType]:
        files = ((frame, frame.f_code.co_filename) for frame, _ in walk_stack(self.frame))
        return [frame for frame, file in files if not is_internal(file) and "-packages" not in file][:FRAMES]

    def remember(self, error: BaseException) -> None:
        """Stores the user's frames in an error's traceback."""
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        self.later += [frame for frame in frames if not is_internal(frame.f_code.co_filename)]

    def now(self, parameters: bool = False) -> Iterator[HeldTensor]:
        """Tensors that modules and batch hold at this moment."""
        yield from held_by(self.model, parameters)
        yield from held_in(self.batch, "batch")

    def last_write(self, tensor: Tensor) -> Place | None:
        """The line that last wrote a tensor in a traced step."""
        writes = [] if self.trace is None else self.trace.writes.get(storage_of(tensor), [])
        return writes[-1].place if writes else None

    def written(self, held: HeldTensor) -> Place | None:
        """The line that last wrote a held tensor: traced, or found in the source of its class."""
        present = [other.tensor for other in self.now() if other.path == held.path and other.tensor.grad_fn is not None]
        places = [place for place in map(self.last_write, present) if place is not None]
        return next(iter([*places, *held.written()]), None)

    def trainable_of(self, tensor: Tensor) -> str:
        """Names of the trainable parameters that a tensor's graph leads to."""
        leaves = [node.variable for node in nodes_of([tensor]) if not is_inner(node)]
        return some(sorted(self.names.get(id(leaf), "a parameter outside the model") for leaf in leaves)) or "what made it"


def _number(variable: HeldTensor) -> int:
    return variable.tensor.grad_fn._sequence_nr()  # type: ignore[union-attr]


def _is_view_of_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a parameter: it shows the present values, and its graph keeps nothing alive."""
    base = tensor._base
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
    kind = kind_of(error)
    nodes = nodes_of(_backward_roots(error))
    traced = traced_changes(scene) + [f for region in scene.regions for f in region.findings(failed=kind == "recompute")]
    if kind == "freed":
        return [*(_from_outside(scene, nodes) or [_twice(scene, nodes)]), *traced]
    if kind == "inference":
        holders = [scene.now(parameters=True), scene.variables()]
        ours, users = ([held for held in each if held.tensor.is_inference()] for each in holders)
        return [_inference(scene, held) for held in ours or users[:1]] + traced
    if kind == "nothing":
        what = "the loss has no graph: no parameter that requires a gradient took part in it, or no gradients were recorded"
        cuts = [] if scene.trace is None else scene.trace.cuts
        return [*traced, Finding("no_gradient", what, NO_GRAPH, place=cuts[-1].place if cuts else None)]
    if kind == "inplace":
        old, message = _from_outside(scene, nodes), str(error).strip().split("\n")[0]
        is_known = old or (traced and scene.trace is not None)
        return [*old, *traced, *([] if is_known else [Finding("inplace", message, INPLACE)])]
    what = "a checkpointed part is repeated in backward and does not do the same as in forward"
    remedy = "let its result depend on its arguments alone; guard.rerun(step) names what has changed"
    return traced or [Finding("recompute", what, remedy)]


def _backward_roots(error: BaseException) -> list[Tensor]:
    """Tensors on which `backward` or `grad` was called when this error was raised; empty where it was not raised there."""
    found: list[Tensor] = []
    for frame, _ in walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if frame.f_code.co_filename == torch.autograd.__file__ and name in ("backward", "grad"):
            value = frame.f_locals.get("tensors" if name == "backward" else "outputs", ())
            found = [value] if isinstance(value, Tensor) else [t for t in value if isinstance(t, Tensor)]
    return found


def traced_changes(scene: Scene) -> list[Finding]:
    """Saved tensors that a step changed in place (traced), one finding for each storage, old graphs that its backward reached
    (traced), and caches that it wrote."""
    found: dict[int, Finding] = {}
    older: list[Finding] = []
    if scene.trace is not None:
        held = {storage_of(h.tensor): h for h in scene.now(parameters=True)}
        for saved in scene.trace.changed:
            storage = storage_of(saved.tensor)
            if storage not in found:
                found[storage] = _changed(saved, held.get(storage), scene)
        for _, nodes in scene.trace.backwards:
            older += _from_outside(scene, nodes)
    caches = {finding.place for finding in found.values() if finding.kind == "cache"}
    return [*found.values(), *older, *(f for f in written_caches(scene) if f.place is None or f.place not in caches)]


def _changed(saved: Saved, held: HeldTensor | None, scene: Scene) -> Finding:
    writes = saved.writes
    places = [place for place in dict.fromkeys([*(write.place for write in writes), saved.place]) if place is not None]
    name = held.path if held is not None else next((w.name for w in writes if w.name), "a tensor")
    ops = some(list(dict.fromkeys(write.op.removeprefix("aten.") for write in writes)), 3)
    if saved.now != saved.version:
        how = f"changed in place: version {saved.now} instead of {saved.version} ({ops})"
    else:
        how = f"written past autograd, through .data or the like ({ops}); gradients are wrong"
    what = f"{name} was saved for backward and then {how}"
    module, remedy, kind = (held.module if held is not None else ""), INPLACE, "inplace"
    if held is not None and scene.names.get(id(held.tensor)):
        remedy = "step the optimizer (or write the weights) only after every backward that needs them has run"
    elif held is not None and _is_copy(held.tensor.grad_fn):
        remedy, kind = CACHE, "cache"
    tensor = f"{name} {shape_of(saved.tensor if held is None else held.tensor)}"
    known = any(write.place is not None for write in writes)
    return Finding(kind, what, remedy, tensor, module, places[0] if known else None, tuple(places[known:]))


def _from_outside(scene: Scene, nodes: set[Node]) -> list[Finding]:
    """Findings about holders of a part of a graph that is older than the step; none where there is no such part."""
    old = {node for node in nodes if is_older(node, scene.first)}
    if not old:
        return []
    found = [_stale(scene, held, node) for held, node, _ in scene.held if node is not None and node in old]
    if found:
        return found
    used = [] if scene.trace is None else [place for node, place in scene.trace.old_uses.items() if node in old]
    others = tuple(place for place in used if place is not None)
    variables = [v for v in scene.variables() if v.tensor.grad_fn is not None]
    variables.sort(key=lambda v: (not v.written(), _number(v)))
    for v in variables:
        if v.tensor.grad_fn in old:
            trained = scene.trainable_of(v.tensor)
            what = f"the variable {v.path} keeps a graph from before this step, which goes through {trained}"
            return [Finding("freed", what, OUTSIDE, v.describe(), "", next(iter(v.written()), None), others)]
    for v in variables:  # a state that was bound again; a recurrent layer's is no part of the loss, but depends on the old one
        if v.written() and nodes_of([v.tensor]) & old:
            what = f"the variable {v.path} carries the graph of one step into the next"
            line, remedy = v.written()[0], CARRY.format(name=v.path)
            return [Finding("freed", what, remedy, v.describe(), "", line, tuple(place for place in others if place != line))]
    what = f"backward reaches {len(old)} nodes of a graph from before this step; nothing that the guard can reach holds it"
    return [Finding("freed", what, OUTSIDE, "", "", next(iter(others), None), others[1:])]


def _twice(scene: Scene, nodes: set[Node]) -> Finding:
    """The finding for two backward calls of one step that share a graph, through a tensor that a module holds or one loss."""
    before = {(was.path, node) for was, node, _ in scene.held}
    for held in scene.now():
        node = held.tensor.grad_fn
        if held.owner is None or node is None or (held.path, node) in before or _is_view_of_leaf(held.tensor):
            continue
        if nodes_of([held.tensor]) & nodes:
            what = f"{held.path} carries the graph of one backward call of this step into the next, which the first one freed"
            remedy = CACHE if _is_copy(node) else STATISTIC.format(name="self." + held.name)
            return Finding("freed", what, remedy, held.describe(), held.module, scene.written(held))
    what = "two backward calls of this step walk through the same graph, which the first one freed"
    backwards = [] if scene.trace is None else scene.trace.backwards
    shared = [place for place, walked in backwards[:-1] if place and any(is_inner(node) for node in walked & nodes)]
    return Finding("freed", what, ONE_BACKWARD, place=backwards[-1][0] if backwards else None, others=tuple(shared[:1]))


# --- what a step holds ------------------------------------------------------------------------------------------------


def _stale(scene: Scene, held: HeldTensor, node: object) -> Finding:
    """The finding for a held tensor that carries a graph from before the step."""
    if held.owner is None:
        what = f"{held.path} was computed before the step and carries a graph: it goes through "
        nodes = nodes_of([held.tensor])
        origins = [v for v in scene.variables() if v.tensor.grad_fn in nodes and v.written()]
        place = min(origins, key=_number).written()[0] if origins else None  # the variable at which the graph starts
        return Finding("stale", f"{what}{scene.trainable_of(held.tensor)} only once", OUTSIDE, held.describe(), place=place)
    place = scene.written(held)
    others = tuple(p for p in held.written() if p != place and p.function != "__init__")[:2]
    if _is_copy(node):
        what = f"{held.path} is a cache that was written while gradients recorded, and keeps the graph of an earlier step"
        return Finding("cache", what, CACHE, held.describe(), held.module, place, others)
    what = f"{held.path} keeps the graph of an earlier step: a backward that comes to it fails"
    remedy = STATISTIC.format(name="self." + held.name)
    return Finding("stale", what, remedy, held.describe(), held.module, place, others)


def at_start(scene: Scene) -> list[Finding]:
    """Findings about graphs from before the step, and about inference tensors.

    Checked when the step is over: a tensor that a module has computed again, not from its old value, is no finding.
    """
    found = []
    old = any(node is not None and held.owner is not None for held, node, _ in scene.held)
    now = {held.path: held.tensor for held in held_by(scene.model)} if old else {}
    reached = nodes_of(now.values(), since=scene.first) if old else set()
    for held, node, _ in scene.held:
        if node is not None and not _is_view_of_leaf(held.tensor):
            current = now.get(held.path)
            kept = current is not None and current.grad_fn is node
            if held.owner is None or kept or node in reached:
                found.append(_stale(scene, held, node))
        elif held.tensor.is_inference():
            found.append(_inference(scene, held))
    return found


def _inference(scene: Scene, held: HeldTensor) -> Finding:
    same = [held] if held.owner is not None else [v for v in scene.variables() if v.tensor is held.tensor]
    what = f"{held.path} was made under torch.inference_mode(): autograd cannot save it"
    place = next((place for v in same for place in v.written()), None)
    return Finding("inference", what, INFERENCE, held.describe(), held.module, place)


def written_caches(scene: Scene) -> list[Finding]:
    """Tensors that had no graph when the step started and have one now: written in place while gradients are recorded."""
    found = []
    for held, node, version in scene.held:
        tensor = held.tensor
        if node is None and version >= 0 and tensor.grad_fn is not None and tensor._version != version:
            what = f"{held.path} was written in place while gradients record: it now carries the graph of this step"
            place = scene.last_write(tensor) or next((p for p in held.written() if p.function != "__init__"), None)
            remedy = CACHE if _is_copy(tensor.grad_fn) else STATISTIC.format(name=held.path)
            found.append(Finding("cache", what, remedy, held.describe(), held.module, place))
    return found


# --- gradients that do not arrive, or that nobody uses ----------------------------------------------------------------


def missing_gradients(
    scene: Scene, named: Iterable[tuple[str, nn.Parameter]], arrived: set[int], explained: set[str]
) -> list[Finding]:
    """Trainable parameters to which no gradient came, one finding for each cause."""
    groups: dict[tuple[str, Place | None], list[tuple[str, nn.Parameter]]] = {}
    for name, p in named:
        if p.requires_grad and id(p) not in arrived and name not in explained:
            groups.setdefault(_cause(scene, name, p), []).append((name, p))
    found = []
    for (why, place), members in groups.items():
        names = [name for name, _ in members]
        what = f"{len(names)} trainable parameters received no gradient: {why}"
        module = names[0].rpartition(".")[0] if len(names) == 1 else ""
        tensor = some(names) if len(names) > 1 else f"{names[0]} {shape_of(members[0][1])}"
        found.append(Finding("no_gradient", what, _LOST.get(why.split(" ")[0], _LOST[""]), tensor, module, place))
    return found


def _cause(scene: Scene, name: str, p: nn.Parameter) -> tuple[str, Place | None]:
    trace = scene.trace
    if trace is None:
        return "a full trace (guard.rerun) says where it was lost", None
    if isinstance(p, DTensor):
        return "FSDP2 gathers it, so that a trace does not see where it was lost", None
    if (name, True) not in trace.uses:
        why = "used only where gradients are not recorded" if (name, False) in trace.uses else "unused in forward"
        return why, trace.uses.get((name, False))
    for cut in trace.cuts:
        if any(getattr(node, "variable", None) is p for node in nodes_of([cut.source])):
            return f"detached from the loss by {cut.op.removeprefix('aten.')}", cut.place
    return "its results do not reach the loss", trace.uses[name, True]


def is_zeroed(p: nn.Parameter, arrived: set[int]) -> bool:
    """Whether a gradient is only the zeros of `zero_grad(set_to_none=False)`, while other parameters received theirs."""
    return bool(arrived) and p.grad is not None and type(p) is nn.Parameter and not bool(p.grad.any())


def owned_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def fingerprint(p: nn.Parameter) -> tuple[float, ...]:
    """Version and first values of a parameter: a write through `data` counts in no version."""
    local = p.to_local() if isinstance(p, DTensor) else p
    return version_of(p), *local.detach().flatten()[:64].tolist()


def unowned(starts: Iterable[tuple[str, nn.Parameter, tuple[float, ...]]], arrived: set[int], stepped: bool) -> list[Finding]:
    """Parameters that receive a gradient but are not updated in a step in which optimizers step.

    Args:
        starts: those that no optimizer owns, with their `fingerprint` when the step started: they may be written by other
            means (a copy in a wider type is an optimizer's).
    """
    names = [name for name, p, was in starts if id(p) in arrived and (not stepped or fingerprint(p) == was)]
    what = f"{len(names)} parameters receive a gradient, but no optimizer owns them: they never change"
    remedy = (
        "give them to the optimizer (build it after the last change of the model: to(), added adapters, copies), or freeze "
        "them with requires_grad_(False)"
    )
    return [Finding("not_owned", what, remedy, some(names))] if names else []
