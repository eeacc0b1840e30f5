"""Checks of every step: tensors at its start, and parameters that received no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.graph import nodes_of
from omni.diagnostics.held import HeldTensor, held_by, shape_of, storage_of, version_of
from omni.diagnostics.scene import Scene
from omni.diagnostics.source import place_of

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
INFERENCE = (
    "evaluate under torch.no_grad(), not torch.inference_mode(), where what is made there is used in training again; clone() "
    "outside of inference mode turns one into a normal tensor"
)
_COPIES = ("CopySlices", "IndexCopy", "IndexPut", "Copy", "Scatter", "SliceScatter", "SelectScatter", "MaskedScatter")


def is_view_of_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a parameter: it shows the present values, and its graph keeps nothing alive."""
    base = tensor._base
    return base is not None and base.is_leaf and base.requires_grad


def is_copy(node: object) -> bool:
    """Whether a node comes from writing into a tensor by index or slice."""
    return type(node).__name__.removeprefix("torch::autograd::").startswith(_COPIES) or "CopySlices" in str(node)


def stale(scene: Scene, held: HeldTensor, node: object) -> Finding:
    """The finding for a held tensor that carries a graph from before the step."""
    if held.owner is None:
        trained = some(scene.trainable_of(held.tensor)) or "what made it"
        origin = scene.origin(held.tensor)
        what = f"{held.path} was computed before the step and carries a graph: it goes through {trained} only once"
        place = origin.places[0] if origin is not None else None
        return Finding("stale", what, OUTSIDE, held.describe(), place=place)
    place = scene.written(held)
    if is_copy(node):
        what = f"{held.path} is a cache that was written while gradients recorded, and keeps the graph of an earlier step"
        return Finding("cache", what, CACHE, held.describe(), held.module, place, _others(held, place))
    what = f"{held.path} keeps the graph of an earlier step: a backward that comes to it fails"
    remedy = STATISTIC.format(name="self." + held.name)
    return Finding("stale", what, remedy, held.describe(), held.module, place, _others(held, place))


def _others(held: HeldTensor, place: Place | None) -> tuple[Place, ...]:
    return tuple(p for p in held.written() if p != place and p.function != "__init__")[:2]


def at_start(scene: Scene) -> list[Finding]:
    """Findings about graphs from before the step, and about inference tensors.

    Checked when the step is over: a tensor that a module has computed again, not from its old value, is no finding.
    """
    found = []
    old = {node for held, node, _ in scene.held if node is not None and held.owner is not None}
    now = {held.path: held.tensor for held in held_by(scene.model)} if old else {}
    reached = nodes_of(now.values(), since=scene.first) if old else set()
    for held, node, _ in scene.held:
        if node is not None and not is_view_of_leaf(held.tensor):
            current = now.get(held.path)
            kept = current is not None and current.grad_fn is node
            if held.owner is None or kept or node in reached:
                found.append(stale(scene, held, node))
        elif held.tensor.is_inference():
            found.append(inference(scene, held))
    return found


def inference(scene: Scene, held: HeldTensor) -> Finding:
    places = [p for p in held.written() if p.function != "__init__"] or list(held.written())
    if held.owner is None:
        places = [p for v in scene.variables() if v.tensor is held.tensor for p in v.places]
    what = f"{held.path} was made under torch.inference_mode(): autograd cannot save it"
    return Finding("inference", what, INFERENCE, held.describe(), held.module, places[0] if places else None)


def written_caches(scene: Scene) -> list[Finding]:
    """Tensors that had no graph when the step started and have one now: written in place while gradients are recorded."""
    found = []
    for held, node, version in scene.held:
        tensor = held.tensor
        if node is None and version >= 0 and tensor.grad_fn is not None and tensor._version != version:
            what = f"{held.path} was written in place while gradients record: it now carries the graph of this step"
            place = None if scene.trace is None else place_of(scene.trace.last(storage_of(tensor)))
            places = [p for p in held.written() if p.function != "__init__"]
            place = place or (places[0] if places else None)
            remedy = CACHE if is_copy(tensor.grad_fn) else STATISTIC.format(name=held.path)
            found.append(Finding("cache", what, remedy, held.describe(), held.module, place))
    return found


def missing_gradients(
    scene: Scene, named: Iterable[tuple[str, nn.Parameter]], arrived: set[int], explained: set[str]
) -> list[Finding]:
    """Trainable parameters to which no gradient came, one finding for each cause."""
    lost = [(name, p) for name, p in named if p.requires_grad and id(p) not in arrived and name not in explained]
    if not lost:
        return []
    groups: dict[tuple[str, Place | None], list[tuple[str, nn.Parameter]]] = {}
    for name, p in lost:
        groups.setdefault(_cause(scene, name, p), []).append((name, p))
    found = []
    for (why, place), members in groups.items():
        names = [name for name, _ in members]
        what = f"{len(names)} trainable parameters received no gradient: {why}"
        module = names[0].rpartition(".")[0] if len(names) == 1 else ""
        tensor = some(names) if len(names) > 1 else f"{names[0]} {shape_of(members[0][1])}"
        remedy = _REMEDIES.get(why.split(" ")[0], _REMEDIES[""])
        found.append(Finding("no_gradient", what, remedy, tensor, module, place))
    return found


_REMEDIES = {
    "detached": "let the graph through: remove the detach (or no_grad) between this part and the loss, and add up all losses "
    "before one backward",
    "used": "run this part with gradients recorded; or freeze it with requires_grad_(False) if it is not to be trained",
    "unused": "use it in forward; if it is not to be trained, freeze it (requires_grad_(False)) or leave it out of the model",
    "": "look for a detach, .data, .item(), numpy() or a no_grad block between this part and the loss; freeze it with "
    "requires_grad_(False) if it is not to be trained",
}


def is_zeroed(p: nn.Parameter, arrived: set[int]) -> bool:
    """Whether a gradient is only the zeros of `zero_grad(set_to_none=False)`, while other parameters received theirs."""
    return bool(arrived) and p.grad is not None and type(p) is nn.Parameter and not bool(p.grad.any())


def _cause(scene: Scene, name: str, p: nn.Parameter) -> tuple[str, Place | None]:
    trace = scene.trace
    if trace is None:
        return "a full trace (guard.rerun) says where it was lost", None
    use = trace.uses.get(name)
    if use is None:
        return "unused in forward", None
    if use.recorded is None:
        return "used only where gradients are not recorded", place_of(use.silent)
    for cut in trace.cuts:
        if any(getattr(node, "variable", None) is p for node in nodes_of([cut.source])):
            return f"detached from the loss by {cut.op.removeprefix('aten.')}", place_of(cut.line)
    return "its results do not reach the loss", place_of(use.recorded)


def owned_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


class Unowned(NamedTuple):
    """A parameter that no optimizer owns, and its `_fingerprint` at the start of the step."""

    name: str
    p: nn.Parameter
    was: tuple[int, Tensor]


def loose(named: Iterable[tuple[str, nn.Parameter]], optimizers: list[torch.optim.Optimizer]) -> list[Unowned]:
    """Trainable parameters that no optimizer owns; none where there is no optimizer."""
    owned = owned_by(optimizers)
    return [Unowned(name, p, _fingerprint(p)) for name, p in named if optimizers and p.requires_grad and id(p) not in owned]


def _fingerprint(p: nn.Parameter) -> tuple[int, Tensor]:
    """Version of a parameter, and its first values, because writes through `data` are not counted in the version."""
    return version_of(p), getattr(p, "_local_tensor", p).detach().reshape(-1)[:64].clone()


def unowned(loose: Iterable[Unowned], arrived: set[int], stepped: bool) -> list[Finding]:
    """Parameters that receive a gradient but are not updated in a step in which optimizers step: no optimizer owns them, and
    they are not written by other means (as copies of weights that an optimizer has in a wider type)."""
    names = []
    for name, p, (version, values) in loose:
        if p.requires_grad and id(p) in arrived:
            now = _fingerprint(p)
            if not stepped or (now[0] == version and torch.equal(now[1], values)):
                names.append(name)
    if not names:
        return []
    what = f"{len(names)} parameters receive a gradient, but no optimizer owns them: they never change"
    remedy = (
        "give them to the optimizer (build it after the last change of the model: to(), added adapters, copies), or freeze "
        "them with requires_grad_(False)"
    )
    return [Finding("not_owned", what, remedy, some(names))]
