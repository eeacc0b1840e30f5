"""Findings: a mistake, the line of the user's code that made it, and the error that carries both."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

OWN = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)
LIBRARY = str(Path(inspect.__file__).parent)
"""Folders of this package, of torch and of Python's standard library, which contains the folder of installed packages."""

_ADVICE = re.compile(r"\s*Specify retain_graph=True if [^.]*\.")
"""Torch's own advice for a graph that backward walks twice: it hides the mistake, or turns it into another error."""


class Line(NamedTuple):
    """A line of source; its code is read when it is asked for."""

    path: str
    number: int
    function: str

    @property
    def code(self) -> str:
        return linecache.getline(self.path, self.number).strip()

    @property
    def file(self) -> str:
        """The path, relative below the working folder."""
        full, here = os.path.realpath(self.path), os.path.realpath(".") + os.sep
        return full.removeprefix(here).replace(os.sep, "/") if full.startswith(here) else self.path

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}: {self.code}"


@dataclass(frozen=True)
class Finding:
    """One mistake; docs/gradients.md has the kinds.

    Attributes:
        tensor: name and shape of the tensor, or names of the parameters.
        module: path of the module that holds it, empty where none does.
        line: the line that is to be changed, where it is known; `others` take part.
        remedy: what to write instead.
    """

    kind: str
    message: str
    remedy: str
    tensor: str = ""
    module: str = ""
    line: Line | None = None
    others: tuple[Line, ...] = ()

    def __str__(self) -> str:
        module = f" (of module {self.module!r})" if self.module else ""
        parts = [("tensor: ", self.tensor and self.tensor + module), ("line:   ", self.line)]
        parts += [*(("also:   ", line) for line in self.others[:3]), ("remedy: ", self.remedy)]
        return "\n".join([f"[{self.kind}] {self.message}", *(f"  {head}{part}" for head, part in parts if part)])

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two findings of one mistake."""
        return self.kind, self.module, self.tensor, self.line


class GraphError(RuntimeError):
    """An error of autograd with its diagnosis; `findings` holds it, `__cause__` is the original.

    Args:
        message: the original error's; its advice to keep the graph is left out.
        hint: how to get more information, where little is known.
    """

    def __init__(self, message: str, findings: Sequence[Finding], hint: str = "") -> None:
        self.findings = list(findings)
        message = _ADVICE.sub("", message)
        super().__init__("\n\n".join(part for part in (message, report(findings), hint) if part))


def report(findings: Iterable[Finding]) -> str:
    """All findings as text, one under the other."""
    return "\n".join(map(str, findings))


def shortlist(names: Sequence[str], most: int = 6) -> str:
    """The first `most` names as text, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


# --- lines ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def is_internal(file: str) -> bool:
    """Whether a file is of torch, of this package or of Python's library, so that no user wrote the line."""
    if file.startswith((OWN, TORCH, "<frozen")) or "/lightning_fabric/" in file:
        return True
    return file.startswith(LIBRARY) and "-packages" not in file


def user_frame() -> FrameType | None:
    """The innermost frame outside of libraries."""
    return next((frame for frame, _ in walk_stack(sys._getframe(1)) if not is_internal(frame.f_code.co_filename)), None)


def line_of(frame: FrameType | None) -> Line | None:
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def code_of(function: Any) -> CodeType | None:
    """The code of a function, a method, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


def definition(function: Any) -> Line | None:
    """Where a function is defined."""
    code = code_of(function)
    return None if code is None else Line(code.co_filename, code.co_firstlineno, code.co_name)


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
def attribute_writes(owner_type: type, name: str) -> tuple[Line, ...]:
    """Lines of a class, and of those it inherits from, that write `self.name`; those of `__init__` last."""
    written: list[Line] = []
    for method in [method for owner in owner_type.__mro__ for method in vars(owner).values() if inspect.isfunction(method)]:
        code = inspect.unwrap(method).__code__
        scopes = () if is_internal(code.co_filename) else _scopes(code)
        if len(scopes) > 1:
            lines = _writes(scopes[0], lambda node: isinstance(node, ast.Attribute) and node.attr == name)
            written += [Line(code.co_filename, n, code.co_name) for n in lines]
    return tuple(sorted(written, key=lambda line: line.function == "__init__"))


@functools.lru_cache(maxsize=256)
def name_writes(code: CodeType, name: str, at: int = 0) -> tuple[Line, ...]:
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
            return tuple(Line(code.co_filename, n, getattr(scope, "name", code.co_name)) for n in order)
    return ()


@functools.lru_cache(maxsize=256)
def _scopes(code: CodeType) -> tuple[ast.AST, ...]:
    """The functions that hold a piece of code, its own the first, from inside to outside; then the file."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return (ast.Module([], []),)
    first = 0 if code.co_name == "<module>" else code.co_firstlineno  # a decorator's line, where there is one
    functions = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))
    starts = [(n, min(m.lineno for m in (n, *getattr(n, "decorator_list", ())))) for n in functions]
    around = [n for n, start in starts if start <= first <= (n.end_lineno or 0)]
    return (*sorted(around, key=lambda n: -n.lineno), tree)
