"""Finds tensors that a model holds between steps (buffers, attributes, contents of containers in them), and variables'."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from omni.diagnostics.findings import Line, attribute_writes, code_of, is_internal, name_writes
from omni.utils.private import forward_hooks, own_buffers, own_parameters, storage_key

MOST = 512  # entries of one container that are examined
VISITS = 500  # containers and objects of one value that are searched
DEPTH = 4  # levels of nested containers and objects that are searched

_PLAIN = (bool, int, float, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, types.CodeType)
_OPAQUE = ("torch", "lightning_fabric", "numpy", "omni.diagnostics")
MODULE_FIELDS = frozenset(vars(nn.Module())) - {"training"}


class HeldTensor(NamedTuple):
    """A tensor and the path to it: of its module or object, its attribute or variable, and the rest (`['k'][0]`).

    `owner` is the class whose attribute it is; `code` the function that names a variable, at its running line.
    """

    tensor: Tensor
    module: str
    name: str
    rest: str = ""
    owner: type | None = None
    code: types.CodeType | None = None
    at: int = 0

    @property
    def path(self) -> str:
        return join(self.module, self.name) + self.rest

    def written(self) -> tuple[Line, ...]:
        """Lines that write the attribute or the variable, the likeliest first."""
        if self.owner is not None:
            return attribute_writes(self.owner, self.name)
        return () if self.code is None else name_writes(self.code, self.name, self.at)

    def describe(self) -> str:
        return f"{self.path} {shape_of(self.tensor)}"


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def shape_of(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"


def storage_of(tensor: Tensor) -> int:
    """Identifier of a tensor's storage, equal for tensors in the same memory."""
    try:
        return storage_key(tensor)
    except RuntimeError:  # sparse and fake tensors have none
        return id(tensor)


def version_of(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; an inference tensor does not count them."""
    return -1 if tensor.is_inference() else tensor._version


def tensors_in(
    value: Any, seen: set[int] | None = None, depth: int = DEPTH, path: str = "", end: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors in a value of any kind, with the path to each; modules and torch's own objects are not searched.

    The values of a read-only mapping are not read either: it may load each of them from a file (accelerate's
    offloaded weights do).

    Args:
        seen: ids of objects that were searched before.
        end: the size of `seen` that ends the search; by default `VISITS` more.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    seen = set() if seen is None else seen
    end = len(seen) + VISITS if end is None else end
    if isinstance(value, (*_PLAIN, *_CODE, nn.Module)) or depth == 0 or id(value) in seen or len(seen) >= end:
        return
    seen.add(id(value))
    for step, inner in _entries(value):
        if not isinstance(inner, _PLAIN):
            yield from tensors_in(inner, seen, depth - 1, path + step, end)


def _entries(value: Any) -> Iterable[tuple[str, Any]]:
    """Members of a container or an object, each with its part of the path."""
    if isinstance(value, MutableMapping):
        return [(f"[{k!r}]", v) for k, v in islice(value.items(), MOST)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{k}", v) for k, v in zip(value._fields, value, strict=True)]
    if isinstance(value, Iterable) and hasattr(value, "__len__") and type(value).__module__ in ("builtins", "collections"):
        return [(f"[{i}]", v) for i, v in enumerate(islice(value, MOST))]
    return [(f".{k}", v) for k, v in _attributes(value)]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Attributes of an object that is not of a library."""
    opaque = type(value).__module__.startswith(_OPAQUE)
    return [] if opaque else list(islice(getattr(value, "__dict__", {}).items(), MOST))


def held_by(model: nn.Module | None, parameters: bool = False) -> Iterator[HeldTensor]:
    """Buffers and attributes of a model's modules, each tensor once; parameters on request.

    Weights that torch's old `weight_norm` and `spectral_norm` compute again before each forward are left out.
    """
    seen: set[int] = set()
    for path, module in () if model is None else model.named_modules():
        owner = type(module)
        for name, tensor in [*(own_parameters(module).items() if parameters else ()), *own_buffers(module).items()]:
            if tensor is not None and not is_lazy(tensor):
                yield HeldTensor(tensor, path, name, "", owner)
        computed = {getattr(hook, "name", None) for hook in forward_hooks(module)[1].values()}
        for name, value in vars(module).items():
            if name not in MODULE_FIELDS and name not in computed and not isinstance(value, _PLAIN):
                inside = tensors_in(value, seen)
                yield from (HeldTensor(t, path, name, rest, owner) for rest, t in inside if not isinstance(t, nn.Parameter))


def held_in(value: Any, name: str) -> list[HeldTensor]:
    """Tensors in a batch or in a variable called `name`."""
    return [HeldTensor(tensor, "", name, rest) for rest, tensor in tensors_in(value)]


def reached_from(function: Any) -> dict[str, tuple[Any, types.CodeType | None]]:
    """Values that a function reaches by closure, default, partial or `self`, and those globals it names: by name, each with the
    code that names it (None where it is an argument)."""
    values: dict[str, tuple[Any, types.CodeType | None]] = {}
    while isinstance(function, functools.partial):
        values.update({name: (value, None) for name, value in function.keywords.items()})
        values.update({f"argument {i}": (value, None) for i, value in enumerate(function.args)})
        function = function.func
    if isinstance(function, nn.Module):
        return {**values, "module": (function, None)}
    if getattr(function, "__self__", None) is not None:
        values["self"] = (function.__self__, None)
    function = getattr(function, "__func__", function)
    try:
        around = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # of C, or a variable is not filled yet
        return values
    for name, value in {**around.nonlocals, **around.globals}.items():
        if value is not None and not isinstance(value, (type, types.ModuleType)):
            values[name] = (value, function.__code__)
    values.update({f"default {i}": (value, None) for i, value in enumerate(function.__defaults__ or ())})
    return values


def reach(variable: HeldTensor, value: Any, seen: set[int], depth: int = 6) -> Iterator[HeldTensor]:
    """Tensors that a variable's value leads to, through containers, functions, objects and modules; objects of torch and of the
    guard are not searched."""
    if depth == 0 or id(value) in seen or isinstance(value, (*_PLAIN, types.ModuleType)) or len(seen) > 5000:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from (held._replace(module=join(variable.path, held.module)) for held in held_by(value))
    elif isinstance(value, Tensor) or type(value) in (list, tuple, dict, set):
        yield from (variable._replace(tensor=tensor, rest=rest) for rest, tensor in tensors_in(value, depth=2))
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        if not is_internal(getattr(code_of(value), "co_filename", "")):
            for name, (reached, code) in reached_from(value).items():
                yield from reach(HeldTensor(variable.tensor, "", name, code=code), reached, seen, depth - 1)
    else:
        for name, inner in _attributes(value):
            yield from reach(HeldTensor(variable.tensor, variable.path, name, "", type(value)), inner, seen, depth - 1)


def modules_of(function: Any, depth: int = 2) -> list[nn.Module]:
    """Modules that a function reaches, directly or through functions of its closure."""
    if isinstance(function, nn.Module):
        return [function]
    values = [value for value, _ in reached_from(function).values()]
    deeper = [value for value in values if isinstance(value, nn.Module) or (depth and callable(value))]
    return [module for value in deeper for module in modules_of(value, depth - 1)]
