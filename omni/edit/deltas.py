"""Edits of a model: changes of named linears that are added to activations, so that no weight is changed.

    out += lr * (x @ a.T) @ b          a [R, I], b [R, O]

A forward hook adds this to a linear's output. So it works wherever the linear's own forward does: on a dispatched model (whose
modules have an instance-level `forward`), on sharded or quantised weights, and in a block that is recomputed.

`edited` serves training. A block that is recomputed in backward calls its linears again. If the hooks were removed by then,
gradients would be those of another function. So every change is added in a node of the graph that refers to its block, and
fails after it. `attach_edits` serves generation, through the adapters' hook: rows of one batch may differ, and tensors that
captured graphs and other sessions use are not changed.

Dimensions: B rows of a batch, E edits, R rank, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from omni.cpu import is_int8
from omni.errors import UserError
from omni.lora import attach as lora
from omni.model.linears import checksum_of, crc_of, dense_weight, is_quantized
from omni.utils.private import saved_tensor_hooks

MLP = re.compile(r"(?P<stack>.*(?:blocks|layers|h))\.(?P<number>\d+)\.mlp\.(?:up|down|up_proj|down_proj|c_fc|c_proj)")
"""Names of a block's MLP linears in our decoder, in transformers' models of Llama's kind, and in GPT-2."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module can be edited."""
    weight = getattr(module, "weight", None)
    plain = isinstance(module, nn.Linear) or is_transposed(module)
    return is_quantized(module) or (plain and isinstance(weight, Tensor) and weight.ndim == 2)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [I, O] (`transformers.pytorch_utils.Conv1D`)."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def find_linears(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules by name. UserError: a name is no linear of the model (with the closest names), or two names are one module."""
    known = {name: part for name, part in model.named_modules(remove_duplicate=False) if is_linear(part)}
    linears: dict[str, nn.Module] = {}
    for name in names:
        if name not in known:
            close = ", ".join(get_close_matches(name, known, n=3, cutoff=0.3)) or "none"
            raise UserError(f"{name} is no linear of this model; the closest names are {close}")
        for other, part in linears.items():
            if part is known[name]:
                raise UserError(f"edit of {name}: it is the same linear as {other}; name it once")
        linears[name] = known[name]
    return linears


def mlp_linears(model: nn.Module, blocks: int = 3) -> list[str]:
    """Names of the MLPs' `up` and `down` in the last blocks of the decoder, which MEND edits by default.

    Source: `inner_params` in eric-mitchell/mend @ e04fdb9, `config/model/*.yaml`. UserError: the model has no blocks with an
    MLP of known names, or fewer than asked for."""
    stacks: dict[str, dict[int, list[str]]] = {}
    for name, part in model.named_modules():
        at = MLP.fullmatch(name)
        if at and is_linear(part):
            stacks.setdefault(at["stack"], {}).setdefault(int(at["number"]), []).append(name)
    own = [stack for stack in stacks if stack.split(".")[-2:] == ["decoder", "blocks"]]
    if not stacks:
        raise UserError("the model has no blocks with mlp.up and mlp.down; name the linears to edit")
    chosen = stacks[own[0] if own else next(iter(stacks))]
    if not 1 <= blocks <= len(chosen):
        raise UserError(f"edits of {blocks} blocks: the model has {len(chosen)}; choose from 1 to {len(chosen)}")
    return [name for number in sorted(chosen)[-blocks:] for name in chosen[number]]


def shape_of(module: Any) -> tuple[int, int]:
    """(I, O) of a linear."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    rows, columns = weight_of(module).shape
    return columns, rows


def weight_of(module: nn.Module) -> Tensor:
    """The weight [O, I], detached: dequantised where it is held in fewer bits, a view of it where it is plain."""
    weight = dense_weight(module)
    if weight.is_meta:  # offloaded (accelerate's hook holds the weights of modules that are not running)
        kept = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if kept is None:
            raise UserError("a linear's weights are on no device; load or make the edits before the model is offloaded")
        weight = kept["weight"].detach()
    return weight.T if is_transposed(module) else weight


@torch.no_grad()
def signature(name: str, module: nn.Module) -> int:
    """`omni.model.linears.checksum_of` a linear's weight: the same in fp32 and in bfloat16. In a sharded model all processes
    must call it."""
    return checksum_of(name, whole(weight_of(module)))


@torch.no_grad()
def checksum(module: nn.Module) -> int:
    """CRC-32 of every bit of a linear's own weight and bias, in their shapes and types; in a sharded model all processes must
    call it."""
    value = 0
    own: list[tuple[str, Any]] = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in sorted(own):
        data = whole(tensor.detach())
        value = crc_of(data, zlib.crc32(f"{name} {tuple(data.shape)} {data.dtype}".encode(), value))
    return value


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor; returns any other unchanged."""
    sharded_type: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # half a second to import
    return tensor.full_tensor() if sharded_type is not None and isinstance(tensor, sharded_type) else tensor


@dataclass(frozen=True)
class Delta:
    """Change of one linear.

    Attributes:
        b: [R, O].
        a: [R, I]; None for the identity (R = I): b.T is then the whole change of the weight.
        lr: factor, a number or a scalar tensor.
    """

    b: Tensor
    a: Tensor | None = None
    lr: Tensor | float = 1.0

    def __post_init__(self) -> None:
        if self.b.ndim != 2 or (self.a is not None and (self.a.ndim != 2 or len(self.a) != len(self.b))):
            shapes = f"a {None if self.a is None else list(self.a.shape)}, b {list(self.b.shape)}"
            raise ValueError(f"a delta has a [R, I] and b [R, O], not {shapes}")

    @property
    def shape(self) -> tuple[int, int]:
        """(I, O) of the linear."""
        return (self.b if self.a is None else self.a.T).shape[0], self.b.shape[1]

    def low(self, x: Tensor) -> Tensor:
        """lr * x @ a.T, [..., R]."""
        h = x if self.a is None else x @ _match(self.a, x).T
        return h * (self.lr.to(h.device) if isinstance(self.lr, Tensor) else self.lr)

    @property
    def up(self) -> Tensor:
        """[O, R]."""
        return self.b.T

    def __call__(self, x: Tensor) -> Tensor:
        """The change of the output [..., O] for the input x [..., I]."""
        h = self.low(x)
        return h @ _match(self.b, h)

    def weight(self) -> Tensor:
        """Change of the weight [O, I], in fp64 and without graph."""
        b = self.b.detach().double()
        full = b if self.a is None else self.a.detach().double().T @ b
        return (full * float(torch.as_tensor(self.lr).detach())).T

    def map(self, change: Callable[[Tensor], Tensor]) -> Delta:
        """Apply a function to every tensor."""
        lr = change(self.lr) if isinstance(self.lr, Tensor) else self.lr
        return Delta(change(self.b), None if self.a is None else change(self.a), lr)


def _match(factor: Tensor, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        return factor.to(x.device)
    return factor.to(device=x.device, dtype=x.dtype)


@dataclass(frozen=True)
class Edits:
    """One or several corrections of a model, as changes of its linears.

    Attributes:
        deltas: change of each linear, by name.
        base: checksum of each linear at the time when the edits were made (`signature`); None where none was computed.
    """

    deltas: Mapping[str, Delta]
    base: Mapping[str, int] | None = field(default=None, compare=False)

    def map(self, change: Callable[[Tensor], Tensor]) -> Edits:
        """Apply a function to every tensor."""
        return replace(self, deltas={name: delta.map(change) for name, delta in self.deltas.items()})

    def scaled(self, strength: float) -> Edits:
        """Multiply the edits by `strength`."""
        return replace(self, deltas={name: replace(delta, lr=delta.lr * strength) for name, delta in self.deltas.items()})

    def signed(self, model: nn.Module) -> Edits:
        """Add the checksums of the model's linears, so that any other base refuses the edits."""
        return replace(self, base={name: signature(name, part) for name, part in find_linears(model, self.deltas).items()})

    def check(self, model: nn.Module) -> dict[str, nn.Module]:
        """The linears the edits belong to. UserError: there is none of a name, or it has another shape."""
        linears = find_linears(model, self.deltas)
        for name, delta in self.deltas.items():
            wanted = shape_of(linears[name])
            if delta.shape != wanted:
                raise UserError(
                    f"edit of {name}: it goes from {delta.shape[0]} to {delta.shape[1]} features, the model's linear from "
                    f"{wanted[0]} to {wanted[1]}; it belongs to another model"
                )
        return linears

    def check_finite(self) -> None:
        """Refuse values that are not finite: they would spoil every answer, and the rows of others. UserError: there are
        such."""
        for name, delta in self.deltas.items():
            tensors = [torch.as_tensor(t).detach() for t in (delta.b, delta.a, delta.lr) if t is not None]
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                raise UserError(f"edit of {name} holds values that are not finite; make it again")

    def check_base(self, model: nn.Module) -> None:
        """Refuse a model whose linears are not those the edits were made for; the same in int8 are. UserError: another
        checksum, name or shape; or the edits have no checksums (see `signed`)."""
        linears = self.check(model)
        if self.base is None:
            raise UserError("the edits do not say for which weights they were made; sign them first (`Edits.signed`)")
        for name, part in linears.items():
            known = self.base[name]
            if signature(name, part) == known:
                continue
            if getattr(part, "plain_checksum", None) == known:
                if is_int8(part):  # within half a step of the weight that they were made for
                    continue
                why = "it was made for this weight before it was quantised; make the edits on the quantised model"
            elif weight_of(part).dtype == torch.float16:
                why = "the model is held in float16, which rounds otherwise than the checksum of the edit's base; load the "
                why += "model in bfloat16 or float32"
            else:
                why = "the model holds other weights than those the edit was made for; it is merged into them already, or they "
                why += "belong to another model"
            raise UserError(f"edit of {name}: {why}")


def stack(edits: Sequence[Edits]) -> Edits:
    """Joins several edits to one. UserError: two of them were made for different weights of one linear."""
    parts: dict[str, list[Delta]] = {}
    base: dict[str, int] = {}
    for edit in edits:
        for name, delta in edit.deltas.items():
            parts.setdefault(name, []).append(delta)
        for name, crc in (edit.base or {}).items():
            if base.setdefault(name, crc) != crc:
                raise UserError(f"edits of {name} were made for different weights; stack edits of one base only")
    joined: dict[str, Delta] = {}
    for name, deltas in parts.items():
        if len(deltas) == 1:
            joined[name] = deltas[0]
        elif any(d.a is None for d in deltas):
            joined[name] = Delta(torch.stack([d.b * d.lr if d.a is None else d.lr * (d.a.T @ d.b) for d in deltas]).sum(0))
        else:
            joined[name] = Delta(torch.cat([d.b * d.lr for d in deltas]), torch.cat([d.a for d in deltas if d.a is not None]))
    signed = bool(edits) and all(edit.base is not None for edit in edits)
    return Edits(joined, base if signed else None)


# --- active -----------------------------------------------------------------------------------------------------------


@contextmanager
def edited(model: nn.Module, edits: Edits | Sequence[Edits]) -> Iterator[None]:
    """Apply edits to every row while the block runs; blocks may be nested, and their edits add up. UserError: an edit does not
    fit the model.

    Gradients flow through the edits and past them. `backward` belongs inside the block, because recomputed activations need the
    edits too; elsewhere it raises ValueError, or CheckpointError where activations are recomputed (except under reentrant
    checkpointing, which records no graph, so that this cannot be detected).
    """
    both = edits if isinstance(edits, Edits) else stack(edits)
    running = threading.Event()  # the graphs that are made in the block refer to it
    running.set()

    def add(delta: Delta, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        change = delta(args[0] if args else next(iter(kwargs.values()))).to(out)
        if not torch.is_grad_enabled():
            return out + change
        anchor = None
        if saved_tensor_hooks(True) is not None:  # in a block that may be recomputed
            anchor = torch.zeros((), device=out.device, requires_grad=True)
        return _Added.apply(out, change, anchor, running)  # type: ignore[no-any-return]

    with ExitStack() as stop:
        stop.callback(running.clear)
        for name, part in both.check(model).items():
            hook = functools.partial(add, both.deltas[name])
            stop.callback(part.register_forward_hook(hook, with_kwargs=True).remove)
        yield


class _Added(torch.autograd.Function):
    """out + change, in a graph node that refers to its block.

    With an anchor the node is part of the graph even where neither needs a gradient, and it saves a tensor: recomputing without
    the hook then saves fewer, which torch refuses whatever gradients are asked for.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, change: Tensor, anchor: Tensor | None, running: threading.Event) -> Tensor:
        ctx.running = running
        if anchor is not None:
            ctx.save_for_backward(anchor)
        return out + change

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        if not ctx.running.is_set():
            raise ValueError(
                "backward runs after the block of `edited(...)` has ended: what is recomputed there would lack the edits; "
                "call backward inside the block"
            )
        return grad, grad, None, None


_NUMBERS = itertools.count(1)


def attach_edits(model: nn.Module, edits: Edits) -> str:
    """Attach edits to a model. Returns the name by which rows select them, and by which `omni.lora.attach.detach` removes
    them. UserError: an edit does not fit the model, or is not finite (it would spoil the rows of others)."""
    edits.check_finite()
    with lora.CHANGING:
        parts = edits.check(model)
    name = f"edits {next(_NUMBERS)}"
    pairs = {}
    for target, delta in edits.deltas.items():
        own = next(parts[target].parameters(recurse=False))
        device = None if own.is_meta else own.device  # offloaded weights have no device before they run
        convert = functools.partial(Tensor.to, device=device, dtype=own.dtype if own.is_floating_point() else None)
        pairs[target] = delta.map(Tensor.detach).map(convert)  # now, not at every step
    lora.attach_pairs(model, pairs, name)
    return name


class Bases:
    """Checks that edits were made for a model's weights, and caches the results: a checksum reads all of the weights."""

    def __init__(self) -> None:
        self._checked: weakref.WeakValueDictionary[tuple[Any, ...], Edits] = weakref.WeakValueDictionary()

    def check(self, model: nn.Module, edits: Edits | None) -> None:
        """Refuse edits of other weights (UserError); weights are read again only after they were written."""
        if edits is None:
            return
        modules = dict(model.named_modules())
        weights = [getattr(modules.get(name), "weight", None) for name in edits.deltas]
        now = (id(edits), *((id(weight), getattr(weight, "_version", 0)) for weight in weights))
        if edits.base is None or self._checked.get(now) is edits:
            return
        with lora.CHANGING:
            edits.check_base(model)
        self._checked[now] = edits


@contextmanager
def attached(model: nn.Module, several: Sequence[Edits | None]) -> Iterator[list[str | None]]:
    """Attach edits while a block runs; yields the name of each, None for None. The same edits are attached once."""
    names: dict[int, str] = {}
    with ExitStack() as stop:
        for edits in several:
            if edits is not None and id(edits) not in names:
                names[id(edits)] = attach_edits(model, edits)
                stop.callback(lora.detach, model, names[id(edits)])
        yield [None if edits is None else names[id(edits)] for edits in several]


@contextmanager
def edited_everywhere(model: nn.Module, edits: Edits) -> Iterator[None]:
    """Attach edits to every row while a block runs, besides the adapters and edits that are active there."""
    with attached(model, [edits]) as (name,):
        assert name is not None
        with lora.CHANGING:
            lora.active_of(model).edits += (name,)
        yield
