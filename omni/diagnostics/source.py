"""Finds lines of the user's code: the frame that called into torch, and lines that write a name."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import torch

from omni.diagnostics.findings import Place

OWN = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)
LIBRARY = str(Path(inspect.__file__).parent)
"""Folders of this package, of torch and of Python's standard library, which contains the folder of installed packages."""


@functools.lru_cache(maxsize=4096)
def is_internal(file: str) -> bool:
    """Whether a file is of torch, of this package or of Python's library, so that no user wrote the line."""
    if file.startswith((OWN, TORCH)) or "/lightning_fabric/" in file:
        return True
    return file.startswith("<frozen") or (file.startswith(LIBRARY) and "-packages" not in file)


def user_frame() -> FrameType | None:
    """The innermost frame outside of libraries."""
    return next((frame for frame, _ in walk_stack(sys._getframe(1)) if not is_internal(frame.f_code.co_filename)), None)


def place_of(frame: FrameType | None) -> Place | None:
    return None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def definition(function: Any) -> Place | None:
    """Place at which a function (a method, a partial, a callable object) is defined."""
    code = code_of(function)
    if code is None:
        return None
    line = code.co_firstlineno
    while linecache.getline(code.co_filename, line).lstrip().startswith("@"):
        line += 1
    return Place(code.co_filename, line, code.co_name)


def code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None and not isinstance(function, type):
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _writes(tree: ast.AST, wanted: Callable[[ast.expr], bool]) -> Iterator[int]:
    """Lines that assign what `wanted` accepts, write into it by an index, or call one of its methods in place (`name_`)."""

    def target(node: ast.expr) -> bool:
        if isinstance(node, (ast.Tuple, ast.List)):
            return any(map(target, node.elts))
        while isinstance(node, (ast.Subscript, ast.Starred)):
            node = node.value
        return wanted(node)

    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in ("append", "extend", "update") or (name.endswith("_") and not name.endswith("__")):
                targets = [node.func.value]
        if any(map(target, targets)):
            yield node.lineno  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def attribute_writes(kind: type, name: str) -> tuple[Place, ...]:
    """Lines of a class, and of those it inherits from, that write `self.name`; those of `__init__` last."""
    found: list[Place] = []
    for owner in kind.__mro__:
        for method in vars(owner).values():
            code = inspect.unwrap(method).__code__ if inspect.isfunction(method) else None
            scopes = () if code is None or is_internal(code.co_filename) else _scopes(code)
            if code is not None and len(scopes) > 1:
                lines = _writes(scopes[0], lambda node: isinstance(node, ast.Attribute) and node.attr == name)
                found += [Place(code.co_filename, n, code.co_name) for n in lines]
    return tuple(sorted(found, key=lambda place: place.function == "__init__"))


@functools.lru_cache(maxsize=256)
def name_writes(code: CodeType, name: str, at: int = 0) -> tuple[Place, ...]:
    """Lines that write a name in a function, or where it does not in the nearest one around it, or in the file.

    With the running line `at` they are ordered by how likely it read their value: first lines below it in the same loop
    (written by the iteration before), then lines above, the nearest first.
    """
    for scope in _scopes(code):
        lines = set(_writes(scope, lambda node: isinstance(node, ast.Name) and node.id == name))
        if lines:
            loops = [n for n in ast.walk(scope) if isinstance(n, (ast.For, ast.While))]
            end = max((n.end_lineno or 0 for n in loops if n.lineno <= at <= (n.end_lineno or 0)), default=0)
            order = sorted(lines, key=lambda n: (0, -n) if at <= n <= end else (1, -n) if n < at else (2, n))
            return tuple(Place(code.co_filename, n, getattr(scope, "name", code.co_name)) for n in order)
    return ()


@functools.lru_cache(maxsize=256)
def _scopes(code: CodeType) -> tuple[ast.AST, ...]:
    """The functions that hold a piece of code, its own the first, from inside to outside; then the file."""
    tree = _tree(code.co_filename)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    first = 0 if code.co_name == "<module>" else code.co_firstlineno  # a decorator's line, where there is one
    around = [n for n in ast.walk(tree) if isinstance(n, kinds) and _first_line(n) <= first <= (n.end_lineno or 0)]
    return (*sorted(around, key=lambda n: -n.lineno), tree)


def _first_line(node: Any) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
