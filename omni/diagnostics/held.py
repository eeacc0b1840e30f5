"""Finds tensors that a model holds between steps: parameters, buffers, plain attributes, and contents of containers in them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from omni.diagnostics.findings import Place
from omni.diagnostics.source import attribute_writes, code_of, is_internal

MOST = 512
"""Most entries of one container that are examined."""
VISITS = 500
"""Most containers and objects of one value that are searched."""
DEPTH = 4
"""Most levels of nested containers and objects that are searched."""

_PLAIN = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, types.CodeType)
MODULE_FIELDS = frozenset(vars(nn.Module())) - {"training"}


class HeldTensor(NamedTuple):
    """A tensor and the path to it: module path, attribute, rest of the path (`['k'][0]`), and the class of its owner."""

    tensor: Tensor
    module: str
    name: str
    rest: str
    owner: type | None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}{self.rest}" if self.module else f"{self.name}{self.rest}"

    def written(self) -> tuple[Place, ...]:
        """Lines of the owner's class that write the attribute."""
        return () if self.owner is None else attribute_writes(self.owner, self.name)

    def describe(self) -> str:
        return f"{self.path} {shape_of(self.tensor)}"


def shape_of(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"


def storage_of(tensor: Tensor) -> int:
    """Identifier of a tensor's storage, equal for tensors in the same memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and fake tensors have none
        return id(tensor)


def version_of(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; an inference tensor does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def tensors_in(
    value: Any, seen: set[int] | None = None, depth: int = DEPTH, rest: str = "", end: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors in a value of any kind, with the path to each; modules and torch's own objects are not searched.

    The values of a read-only mapping are not read either: it may load each of them from a file (accelerate's
    offloaded weights do).

    Args:
        seen: ids of objects that were searched before.
        end: stop when `seen` has this size; by default after `VISITS` objects of this value.
    """
    if isinstance(value, Tensor):
        yield rest, value
        return
    if isinstance(value, (*_PLAIN, *_CODE, nn.Module)) or depth == 0:
        return
    seen = set() if seen is None else seen
    end = len(seen) + VISITS if end is None else end
    if id(value) in seen or len(seen) >= end:
        return
    seen.add(id(value))
    entries: Iterable[tuple[str, Any]]
    if isinstance(value, MutableMapping):
        entries = [(f"[{k!r}]", v) for k, v in _first(value.items())]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        entries = [(f".{k}", v) for k, v in zip(value._fields, value, strict=True)]
    elif isinstance(value, Iterable) and hasattr(value, "__len__") and type(value).__module__ in ("builtins", "collections"):
        entries = [(f"[{i}]", v) for i, v in enumerate(_first(value))]
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "lightning_fabric", "numpy")):
        entries = [(f".{k}", v) for k, v in _first(vars(value).items())]
    else:
        return
    for step, inner in entries:
        if not isinstance(inner, _PLAIN):
            yield from tensors_in(inner, seen, depth - 1, rest + step, end)


def _first(values: Iterable[Any]) -> list[Any]:
    return [value for _, value in zip(range(MOST), values, strict=False)]


def plain_in(value: Any, most: int = 64) -> Iterator[tuple[str, Any]]:
    """Numbers, bools and strings in a container or an object, with the path to each; at most `most` of each container."""
    if isinstance(value, (list, tuple)):
        entries: Iterable[tuple[str, Any]] = ((f"[{i}]", v) for i, v in enumerate(value))
    elif isinstance(value, dict):
        entries = ((f"[{k!r}]", v) for k, v in value.items())
    elif hasattr(value, "__dict__") and not isinstance(value, (*_CODE, type, nn.Module, Tensor)):
        entries = ((f".{k}", v) for k, v in vars(value).items())
    else:
        return
    for _, (step, inner) in zip(range(most), entries, strict=False):
        if isinstance(inner, (bool, int, float, str)):
            yield step, inner


def held_by(model: nn.Module | None, parameters: bool = False) -> Iterator[HeldTensor]:
    """Buffers and attributes of a model's modules, each tensor once; parameters on request.

    Weights that torch's old `weight_norm` and `spectral_norm` compute again before each forward are left out.
    """
    if model is None:
        return
    seen: set[int] = set()
    for path, module in model.named_modules():
        kind = type(module)
        if parameters:
            for name, p in module._parameters.items():
                if p is not None and not is_lazy(p):
                    yield HeldTensor(p, path, name, "", kind)
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                yield HeldTensor(buffer, path, name, "", kind)
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for name, value in vars(module).items():
            if name in MODULE_FIELDS or isinstance(value, _PLAIN) or name in computed:
                continue
            for rest, tensor in tensors_in(value, seen):
                if not isinstance(tensor, nn.Parameter):
                    yield HeldTensor(tensor, path, name, rest, kind)


def held_in(value: Any, name: str) -> list[HeldTensor]:
    """Tensors in a batch or in a variable called `name`."""
    return [HeldTensor(tensor, "", name, rest, None) for rest, tensor in tensors_in(value)]


def reached_from(function: Any) -> dict[str, tuple[Any, Any]]:
    """Values that a function reaches by closure, default, partial or `self`, and those globals it names: by name, each with the
    code that names it (None where it is an argument)."""
    found: dict[str, tuple[Any, Any]] = {}
    while isinstance(function, functools.partial):
        found.update({name: (value, None) for name, value in function.keywords.items()})
        found.update({f"argument {i}": (value, None) for i, value in enumerate(function.args)})
        function = function.func
    if isinstance(function, nn.Module):
        return {**found, "module": (function, None)}
    if getattr(function, "__self__", None) is not None:
        found["self"] = (function.__self__, None)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return found
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = (cell.cell_contents, code)
        except ValueError:  # not filled yet
            continue
    for name in code.co_names:
        value = getattr(function, "__globals__", {}).get(name)
        if value is not None and not isinstance(value, (type, types.ModuleType)):
            found[name] = (value, code)
    for i, value in enumerate(getattr(function, "__defaults__", None) or ()):
        found[f"default {i}"] = (value, None)
    return found


def reach(name: str, value: Any, code: Any, seen: set[int], depth: int = 6) -> Iterator[tuple[str, HeldTensor, Any]]:
    """Tensors that a value leads to, through containers, functions, objects and modules, each with the variable's name and the
    code that names it. Objects of torch and of the guard are not searched."""
    if depth == 0 or id(value) in seen or isinstance(value, (*_PLAIN, types.ModuleType)) or len(seen) > 5000:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{held.path}", held, None) for held in held_by(value))
    elif isinstance(value, Tensor) or type(value) in (list, tuple, dict, set):
        yield from (
            (name + rest, HeldTensor(tensor, "", name, rest, None), code) for rest, tensor in tensors_in(value, depth=2)
        )
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        if not is_internal(getattr(code_of(value), "co_filename", "")):
            for inner, (reached, names) in reached_from(value).items():
                yield from reach(inner, reached, names, seen, depth - 1)
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(
        ("torch", "lightning_fabric", "omni.diagnostics")
    ):
        for inner, attribute in _first(vars(value).items()):
            for full, held, named in reach(f"{name}.{inner}", attribute, None, seen, depth - 1):
                if held.owner is None and named is None:  # a tensor of the object itself, not one that a function in it reaches
                    held = HeldTensor(held.tensor, "", inner, full.removeprefix(f"{name}.{inner}"), type(value))
                yield full, held, named


def modules_of(function: Any, depth: int = 2) -> list[nn.Module]:
    """Modules that a function reaches, directly or through functions of its closure."""
    if isinstance(function, nn.Module):
        return [function]
    found: list[nn.Module] = []
    for value, _ in reached_from(function).values():
        if isinstance(value, nn.Module):
            found.append(value)
        elif depth and callable(value):
            found += modules_of(value, depth - 1)
    return found
