"""Diagnoses errors of autograd: finds the cause and its line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from omni.diagnostics.findings import Finding, Place, some
from omni.diagnostics.gradients import (
    CACHE,
    INFERENCE,
    OUTSIDE,
    STATISTIC,
    inference,
    is_copy,
    is_view_of_leaf,
    stale,
    written_caches,
)
from omni.diagnostics.graph import Node, backward_roots, is_inner, is_older, nodes_of
from omni.diagnostics.held import HeldTensor, held_by, shape_of, storage_of, version_of
from omni.diagnostics.scene import Scene
from omni.diagnostics.source import place_of
from omni.diagnostics.trace import Changed

_VERSION = re.compile(
    r"\[(?:torch\.)?(?:\w+\.)?(?:CPU|CUDA)?(\w+?)(?:Tensor|Type) \[([\d, ]*)\]\].*?is at version (\d+); expected version (\d+)",
    re.DOTALL,
)
"""Matches tensor types in messages: CPUBFloat16Type under autocast, torch.FloatTensor and the like otherwise."""
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
CARRY = "cut it where a step starts: {name} = {name}.detach(); backward through several steps needs them in one loss"
ONE_BACKWARD = (
    "add the losses and call backward once; where two parts are to be trained apart, detach what passes between them on the "
    "side that is not to be trained"
)


def kind_of(error: BaseException) -> str | None:
    """Kind of mistake that an error reports; None where it is not from autograd."""
    text = str(error)
    return next((kind for kind, parts in _ERRORS.items() if any(part in text for part in parts)), None)


def diagnose(scene: Scene, error: BaseException) -> list[Finding]:
    """Findings for an error of autograd."""
    kind = kind_of(error)
    traced = traced_changes(scene) + [f for region in scene.regions for f in region.findings(failed=kind == "recompute")]
    if kind == "inplace":
        old = from_outside(scene, nodes_of(backward_roots(error)))
        return [*old, *traced] or [*written_caches(scene), *_guess(scene, str(error))]
    if kind == "freed":
        nodes = nodes_of(backward_roots(error))
        return [*(from_outside(scene, nodes) or [_twice(scene, nodes)]), *traced]
    if kind == "inference":
        return _inference(scene) + traced
    if kind == "recompute" and not traced:
        return [_unknown_recompute()]
    if kind == "nothing":
        return [*traced, _nothing(scene)]
    return traced


def traced_changes(scene: Scene) -> list[Finding]:
    """Saved tensors that a traced step changed in place, one finding for each storage."""
    if scene.trace is None:
        return []
    found, seen = [], set[int]()
    held = {storage_of(h.tensor): h for h in _all_held(scene)}
    for changed in scene.trace.changed:
        storage = storage_of(changed.saved.tensor)
        if storage not in seen:
            seen.add(storage)
            found.append(_changed(changed, held.get(storage), scene))
    for backward in scene.trace.backwards:
        found += from_outside(scene, backward.nodes)
    caches = {finding.place for finding in found if finding.kind == "cache"}
    return found + [finding for finding in written_caches(scene) if finding.place not in caches]


def _all_held(scene: Scene) -> Iterable[HeldTensor]:
    yield from scene.now()
    yield from held_by(scene.model, parameters=True)


def _changed(changed: Changed, held: HeldTensor | None, scene: Scene) -> Finding:
    saved, writes = changed.saved, changed.writes
    lines = list(dict.fromkeys(write.line for write in writes if write.line is not None))
    places = [place for place in map(place_of, lines) if place is not None]
    name = held.path if held is not None else next((w.name for w in writes if w.name), "a tensor")
    tensor = held.describe() if held is not None else f"{name} {shape_of(saved.tensor)}"
    ops = some(list(dict.fromkeys(write.op.removeprefix("aten.") for write in writes)), 3)
    if changed.now != saved.version:
        how = f"changed in place: version {changed.now} instead of {saved.version} ({ops})"
    else:
        how = f"written past autograd, through .data or the like ({ops}); gradients are wrong"
    what = f"{name} was saved for backward and then {how}"
    at = place_of(saved.line)
    others = tuple(p for p in [*places[1:], *([at] if at is not None else [])] if p not in places[:1])
    module, remedy, kind = (held.module if held is not None else ""), INPLACE, "inplace"
    if held is not None and scene.names.get(id(held.tensor)):
        remedy = "step the optimizer (or write the weights) only after every backward that needs them has run"
    elif held is not None and held.tensor.grad_fn is not None and is_copy(held.tensor.grad_fn):
        remedy, kind = CACHE, "cache"
    return Finding(kind, what, remedy, tensor, module, places[0] if places else None, others)


def _guess(scene: Scene, message: str) -> list[Finding]:
    """Guesses without a trace: tensors of the shape and version in the message, and lines that write them."""
    match = _VERSION.search(message)
    if match is None:
        return [Finding("inplace", message.strip().split("\n")[0], INPLACE)]
    shape = tuple(int(n) for n in match[2].split(",") if n.strip())
    version = int(match[3])

    def fits(t: Tensor) -> bool:
        return tuple(t.shape) == shape and version_of(t) == version and t.type().endswith(f".{kind}")

    kind = f"{match[1]}Tensor"
    what = f"a {kind} {list(shape)} was saved for backward at version {match[4]} and is at version {version} now"
    for held in _all_held(scene):
        if fits(held.tensor):
            places = _in_place(p for p in held.written() if p.function != "__init__")
            return [Finding("inplace", what, INPLACE, held.describe(), held.module, places[0] if places else None)]
    for v in scene.variables():
        places = _in_place(v.places)
        if fits(v.tensor) and places:
            return [Finding("inplace", what, INPLACE, f"{v.name} {shape_of(v.tensor)}", "", places[0])]
    return [Finding("inplace", what, INPLACE, f"{kind} {list(shape)}")]


def _in_place(places: Iterable[Place]) -> list[Place]:
    """Lines that change a tensor in place, without those that bind a name to another one."""
    return [p for p in places if re.search(r"\w_\(|\] *[-+*/|&]?= |[-+*/|&]= ", p.code)]


def from_outside(scene: Scene, nodes: set[Node]) -> list[Finding]:
    """Findings about holders of a part of a graph that is older than the step; none where there is no such part."""
    old = {node for node in nodes if is_older(node, scene.first)}
    if not old:
        return []
    found = [stale(scene, held, node) for held, node, _ in scene.held if node is not None and node in old]
    if found:
        return found
    holders = [v for v in scene.variables() if v.tensor.grad_fn in old]
    holders.sort(key=lambda v: (not v.places, v.tensor.grad_fn._sequence_nr()))  # type: ignore[union-attr]
    used = [] if scene.trace is None else [use for node, use in scene.trace.old_uses.items() if node in old]
    others = tuple(place for place in (place_of(line) for _, line in used) if place is not None)
    if holders:
        v = holders[0]
        trained = some(scene.trainable_of(v.tensor)) or "what made it"
        what = f"the variable {v.name} keeps a graph from before this step, which goes through {trained}"
        return [
            Finding("freed", what, OUTSIDE, f"{v.name} {shape_of(v.tensor)}", "", v.places[0] if v.places else None, others)
        ]
    around = [(v, p) for v in scene.variables() if v.tensor.grad_fn is not None for p in v.places if _reads_itself(v.name, p)]
    carried = [pair for pair in around if pair[0].tensor.grad_fn in nodes]
    # A recurrent layer's state is no part of the loss, but depends on the same old state.
    carried = carried or [pair for pair in around if nodes_of([pair[0].tensor]) & old]
    if carried:
        v, line = min(carried, key=lambda pair: pair[0].tensor.grad_fn._sequence_nr())  # type: ignore[union-attr]
        what = f"the variable {v.name} carries the graph of one step into the next"
        remedy = CARRY.format(name=v.name)
        others = tuple(place for place in others if place != line)
        return [Finding("freed", what, remedy, f"{v.name} {shape_of(v.tensor)}", "", line, others)]
    place, shape = (others[0], used[0][0]) if others else (None, "")
    what = f"backward reaches {len(old)} nodes of a graph from before this step; nothing that the guard can reach holds it"
    return [Finding("freed", what, OUTSIDE, f"a tensor {shape}" if shape else "", "", place, others[1:])]


def _reads_itself(name: str, place: Place) -> bool:
    """Whether a line binds a name (an attribute: of any variable) to a value computed from it."""
    owner, _, last = name.partition("[")[0].rpartition(".")
    word = (r"\." if owner else r"(?<!\.)\b") + re.escape(last) + r"\b"
    for part in place.code.split(";"):
        left, _, right = part.partition("=")
        if re.search(word, left) and (re.search(word, right) or left.rstrip()[-1:] in tuple("+-*/@|&")):
            return True
    return False


def _twice(scene: Scene, nodes: set[Node]) -> Finding:
    """The finding for two backward calls of one step that share a graph, through a tensor that a module holds or one loss."""
    for held in scene.now():
        node = held.tensor.grad_fn
        if held.owner is None or node is None or is_view_of_leaf(held.tensor) or not nodes_of([held.tensor]) & nodes:
            continue
        if any(was.path == held.path and was.tensor.grad_fn is node for was, _, _ in scene.held):
            continue
        what = f"{held.path} carries the graph of one backward call of this step into the next, which the first one freed"
        remedy = CACHE if is_copy(node) else STATISTIC.format(name="self." + held.name)
        return Finding("freed", what, remedy, held.describe(), held.module, scene.written(held))
    what = "two backward calls of this step walk through the same graph, which the first one freed"
    if scene.trace is not None and scene.trace.backwards:
        *before, this = scene.trace.backwards
        shared = [b for b in before if any(is_inner(node) for node in b.nodes & nodes)]
        first = place_of(shared[0].line) if shared else None
        return Finding("freed", what, ONE_BACKWARD, place=place_of(this.line), others=(first,) if first is not None else ())
    return Finding("freed", what, ONE_BACKWARD)


def _inference(scene: Scene) -> list[Finding]:
    found = [inference(scene, held) for held in _all_held(scene) if held.tensor.is_inference()]
    if found:
        return found
    for v in scene.variables():
        if v.tensor.is_inference():
            what = f"the variable {v.name} was made under torch.inference_mode(): autograd cannot save it"
            place = v.places[0] if v.places else None
            return [Finding("inference", what, INFERENCE, f"{v.name} {shape_of(v.tensor)}", "", place)]
    return [Finding("inference", "a tensor made under torch.inference_mode() takes part in training", INFERENCE)]


def _nothing(scene: Scene) -> Finding:
    what = "the loss has no graph: no parameter that requires a gradient took part in it, or no gradients were recorded"
    cut = None if scene.trace is None or not scene.trace.cuts else scene.trace.cuts[-1]
    remedy = (
        "call the model with gradients recorded (no no_grad around it) and with trainable parameters; do not detach the loss"
    )
    return Finding("no_gradient", what, remedy, place=None if cut is None else place_of(cut.line))


def _unknown_recompute() -> Finding:
    what = "a checkpointed part is repeated in backward and does not do the same as in forward"
    return Finding("recompute", what, "let its result depend on its arguments alone; guard.rerun(step) names what has changed")
