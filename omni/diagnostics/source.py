"""Finds lines of the user's code: the frame that called into torch, and lines that write a name."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from omni.diagnostics.findings import Place

OWN = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)
LIBRARY = str(Path(inspect.__file__).parent)
"""Folders of this package, of torch and of Python's standard library, which contains the folder of installed packages."""

OURS = tuple(str(Path(OWN).parent.parent / name) + os.sep for name in ("omni", "train", "infer"))
"""Folders of this repository's packages, whose lines are not the user's."""

Line = tuple[str, int, str]
"""File, line number and function; the code of the line is not read yet."""


@functools.lru_cache(maxsize=4096)
def is_internal(file: str) -> bool:
    """Whether a file is of torch, of this package or of Python's library, so that no user wrote the line."""
    if file.startswith((OWN, TORCH)) or "/lightning_fabric/" in file:
        return True
    return file.startswith("<frozen") or (file.startswith(LIBRARY) and "-packages" not in file)


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame outside of libraries."""
    frame = frame or sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def outer_lines() -> list[Line]:
    """Current lines of the running functions outside of libraries and of this repository's packages, innermost first."""
    found: list[Line] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, line_of(frame)
        if line is not None and not is_internal(file) and not is_ours(file) and "-packages" not in file:
            found.append(line)
        frame = frame.f_back
    return found


def is_ours(file: str) -> bool:
    return file.startswith(OURS) or str(Path(file).absolute()).startswith(OURS)


def left_block(then: list[Line], now: list[Line]) -> Line | None:
    """The `with` statement around a line of `then` and around none of `now`; of several the innermost, functions that run at
    both times first. Torch's own (autocast) are skipped: they hold nothing that is used later."""
    inside = {(file, name): number for file, number, name in now}
    both = [line for line in then if (line[0], line[2]) in inside]
    for file, number, name in [*both, *(line for line in then if line not in both)]:
        later = inside.get((file, name), 0)
        blocks = [b for b in _blocks(file) if b.lineno <= number <= (b.end_lineno or 0)]
        left = [b for b in blocks if not b.lineno <= later <= (b.end_lineno or 0)]
        if left:
            return file, max(b.lineno for b in left), name
    return None


@functools.lru_cache(maxsize=64)
def _blocks(file: str) -> tuple[ast.With, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(n for n in ast.walk(tree) if isinstance(n, ast.With) and not all(map(_is_torchs, n.items)))


def _is_torchs(item: ast.withitem) -> bool:
    text = ast.unparse(item.context_expr)
    return text.startswith("torch.") or "autocast(" in text


def line_of(frame: FrameType | None) -> Line | None:
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def place_of(line: Line | None) -> Place | None:
    return None if line is None else Place.at(*line)


def definition(function: Any) -> Place | None:
    """Place at which a function (a method, a partial, a callable object) is defined."""
    code = code_of(function)
    if code is None:
        return None
    line = code.co_firstlineno
    while linecache.getline(code.co_filename, line).lstrip().startswith("@"):
        line += 1
    return Place.at(code.co_filename, line, code.co_name)


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
    first: list[Place] = []
    for owner in kind.__mro__:
        if is_internal(getattr(inspect.getmodule(owner), "__file__", None) or "<frozen>"):
            continue
        for method in vars(owner).values():
            function = inspect.unwrap(method) if inspect.isfunction(method) else None
            tree = None if function is None else _tree(function.__code__)
            if tree is None or function is None:
                continue

            def wanted(node: ast.expr) -> bool:
                return isinstance(node, ast.Attribute) and node.attr == name

            begin = function.__code__.co_firstlineno - 1
            lines = [Place.at(function.__code__.co_filename, begin + n, method.__name__) for n in _writes(tree, wanted)]
            (first if method.__name__ == "__init__" else found).extend(lines)
    return (*found, *first)


def name_writes(code: CodeType, name: str, at: int) -> tuple[Place, ...]:
    """Lines of a function that write a local name, ordered by how likely line `at` read their value.

    First come lines below it in the same loop (written by the iteration before), then lines above, the nearest first.
    """
    tree = _tree(code)
    if tree is None:
        return ()
    begin = 0 if code.co_name == "<module>" else code.co_firstlineno - 1
    lines = {begin + n for n in _writes(tree, lambda node: isinstance(node, ast.Name) and node.id == name)}
    loops = [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))]
    ends = [begin + (n.end_lineno or n.lineno) for n in loops if begin + n.lineno <= at <= begin + (n.end_lineno or n.lineno)]
    below = [n for n in lines if at <= n <= max(ends, default=0)]
    order = sorted(below, reverse=True) + sorted((n for n in lines if n < at), reverse=True)
    order += sorted(lines.difference(order))
    return tuple(Place.at(code.co_filename, n, code.co_name) for n in order)


@functools.lru_cache(maxsize=256)
def outer_writes(code: CodeType, name: str) -> tuple[Place, ...]:
    """Lines that write a name which a function takes from outside: in the nearest function around it, or in the file."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    around = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.lineno < code.co_firstlineno <= (n.end_lineno or 0)]
    for scope in [*sorted(around, key=lambda n: -n.lineno), tree]:
        lines = sorted(set(_writes(scope, lambda node: isinstance(node, ast.Name) and node.id == name)))
        if lines:
            return tuple(Place.at(code.co_filename, n, getattr(scope, "name", "<module>")) for n in lines)
    return ()


@functools.lru_cache(maxsize=256)
def _tree(code: CodeType) -> ast.AST | None:
    try:
        lines = linecache.getlines(code.co_filename) if code.co_name == "<module>" else inspect.getsourcelines(code)[0]
        return ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError, IndexError):
        return None
