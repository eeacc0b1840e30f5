"""Law 10: imports point one way: between the packages, and inside `train` from floor to floor; none go round."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "omni": {"train", "infer", "benchmarks", "lightning", "lightning_fabric", "fastapi", "tqdm"},
    "train": {"infer", "benchmarks"},
    "infer": {"train", "benchmarks", "lightning", "lightning_fabric"},
}


class Source(NamedTuple):
    """What a file says, of one walk through it."""

    imports: list[ast.Import | ast.ImportFrom]
    names: set[str]  # identifiers that it gives or asks for
    defined: set[str]  # functions, classes, variables and attributes
    read: set[str]  # attributes
    classes: list[str]  # at the top


@cache
def look(source: str) -> Source:
    tree = ast.parse(source)
    seen = Source([], set(), set(), set(), [node.name for node in tree.body if isinstance(node, ast.ClassDef)])
    for node in ast.walk(tree):
        seen.names.update(name for key in ("id", "arg", "name", "attr") if isinstance(name := getattr(node, key, None), str))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            seen.imports.append(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            seen.imports.append(ast.Import([ast.alias(name) for name in names]))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            seen.defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            seen.defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            (seen.defined if isinstance(node.ctx, ast.Store) else seen.read).add(node.attr)
    return seen


def imported(source: str) -> set[str]:
    packages = set()
    for node in look(source).imports:
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif node.module and node.level == 0:
            packages.add(node.module.split(".")[0])
    return packages


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        wrong = imported(file.read_text(encoding="utf-8")) & FORBIDDEN[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_importing_omni_brings_no_launcher_along():
    code = (
        "import sys, omni; from omni import SpeechLM; "
        "print([m for m in ('lightning_fabric', 'train', 'infer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


FLOORS = (
    {"console", "scoring"},
    {"data", "convert"},
    {"balance", "eval"},
    {"objective"},
    {"config"},
    {"optim", "distributed", "edit"},
    {"checkpoint"},
    {"trainer"},
    {"plan", "hub"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
"""Folders and modules of `train`, from the ground: each imports from those below it, and from itself."""


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(file): file for package in FORBIDDEN for file in (ROOT / package).rglob("*.py")}


def modules_imported(source: str, known: Iterable[str]) -> set[str]:
    """Modules of this repository that a source imports, wherever in it: in functions and under TYPE_CHECKING too."""
    known, modules = set(known), set()
    for node in look(source).imports:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif node.module and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= inner if inner <= known else (inner & known) | {node.module}
    return modules & known


def climbing(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports in `train` that do not lead to a lower floor."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    found = []
    for module, imports in graph.items():
        for other in imports:
            here, there = ([*name.split("."), ""][1] for name in (module, other))
            if module.startswith("train.") and other.startswith("train.") and here != there and floor[there] >= floor[here]:
                found.append(f"{module} imports {other}")
    return sorted(found)


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    sorter = graphlib.TopologicalSorter({module: imports - {module} for module, imports in graph.items()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@cache
def graph() -> dict[str, set[str]]:
    return {name: modules_imported(file.read_text(encoding="utf-8"), FILES) for name, file in FILES.items()}


def test_imports_inside_train_lead_down():
    assert {name.split(".")[1] for name in FILES if name.startswith("train.")} == set().union(*FLOORS)
    assert climbing(graph()) == []


def test_no_imports_go_round():
    assert circles(graph()) == []


def test_the_checks_of_floors_and_circles_can_fail():
    known = {"train.cli", "train.console.command", "train.data.rows", "train.data.rows.row"}
    source = "def f():\n    from train.data.rows import row\nif TYPE_CHECKING:\n    import_module('train.cli')"
    imports = modules_imported(source, known)
    assert imports == {"train.data.rows.row", "train.cli"}
    graph = {"train.console.command": imports, "train.cli": {"train.console.command"}}
    assert climbing(graph) == ["train.console.command imports train.cli", "train.console.command imports train.data.rows.row"]
    assert set(circles(graph)) == {"train.cli", "train.console.command"}
    assert climbing({"train.cli": {"train.console.command"}}) == []


def test_no_public_class_name_is_taken_twice():
    places: dict[str, list[str]] = {}
    for name, file in FILES.items():
        for public in look(file.read_text(encoding="utf-8")).classes:
            if not public.startswith("_"):
                places.setdefault(public, []).append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


STOPPED = {"company", "dice", "faces", "few", "found", "given", "heat", "how", "odd", "odds", "some", "those", "told"}
"""Identifiers that say less than a noun of the field."""


def identifiers(source: str) -> set[str]:
    return {name.strip("_") for name in look(source).names}


def test_names_are_nouns_of_the_field():
    assert identifiers("def told(few, *, odd=1): return few.how") >= {"told", "few", "odd", "how"}
    used = {name: identifiers(file.read_text(encoding="utf-8")) & STOPPED for name, file in FILES.items()}
    assert {name: words for name, words in used.items() if words} == {}


ATTENTION = {
    "scaled_dot_product_attention", "MultiheadAttention", "multi_head_attention_forward", "flex_attention", "varlen_attn",
}  # fmt: skip


def test_attention_has_one_door():
    assert {name for name, file in FILES.items() if identifiers(file.read_text(encoding="utf-8")) & ATTENTION} == {
        "omni.model.attention"
    }


KNOWN = {"_exit", "_getframe", "_handle", "_Pointer", "_asdict", "_fields", "_replace", "_dynamo"}
"""Documented by Python and PyTorch."""


def test_private_names_of_other_packages_are_in_one_file():
    sources = {name: look(file.read_text(encoding="utf-8")) for name, file in FILES.items() if name != "omni.utils.private"}
    ours = set().union(*(source.defined for source in sources.values()))
    used = set()
    for name, source in sources.items():
        used |= {(name, attr) for attr in source.read - ours - KNOWN if attr.startswith("_") and not attr.endswith("__")}
        for node in source.imports:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in FORBIDDEN:
                words = [*node.module.split("."), *(alias.name for alias in node.names)]
                used |= {(name, word) for word in words if word.startswith("_") and not word.startswith("__")}
    assert sorted(used) == []
