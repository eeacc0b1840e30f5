"""The budgets of `docs/size.md`: lines and files of each folder."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from infer.cli import COMMANDS, command_parser
from train.config.run import FitConfig

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"\| `(\S+)` \| (\d+) \| (\d+) \| \S")
SUFFIXES = {".py", ".js", ".css", ".html"}
BUDGETS = {
    match[1]: (int(match[2]), int(match[3]))
    for match in map(ROW.match, (ROOT / "docs/size.md").read_text().splitlines())
    if match
}


def folder_of(path: str) -> str:
    """The innermost folder with a budget that holds `path`."""
    return max((folder for folder in BUDGETS if path.startswith(f"{folder}/")), key=len)


def sizes() -> dict[str, tuple[int, int]]:
    lines, files = Counter(), Counter()
    for package in {folder.split("/")[0] for folder in BUDGETS}:
        for file in (ROOT / package).rglob("*"):
            if file.suffix not in SUFFIXES or not file.is_file() or (ROOT / "train/recipes") in file.parents:
                continue
            folder, count = folder_of(file.relative_to(ROOT).as_posix()), len(file.read_bytes().splitlines())
            lines[folder] += count
            files[folder] += count > 0
    return {folder: (lines[folder], files[folder]) for folder in BUDGETS}


def test_folders_keep_their_budgets():
    over = [
        f"{folder} has {size}, its budget is {BUDGETS[folder]}"
        for folder, size in sizes().items()
        if exceeds(size, BUDGETS[folder])
    ]
    assert not over, "lines and files: " + "; ".join(over)


def exceeds(size: tuple[int, int], budget: tuple[int, int]) -> bool:
    return size[0] > budget[0] or size[1] > budget[1]


def test_every_package_has_a_budget():
    assert {"omni", "train", "infer", "configs", "benchmarks"} <= BUDGETS.keys()


def test_the_whole_keeps_its_budgets():
    product = [sum(column) for column in zip(*(BUDGETS[name] for name in BUDGETS if is_product(name)), strict=True)]
    assert product[0] <= 66_750 and product[1] <= 315
    assert sum(len(file.read_bytes().splitlines()) for file in (ROOT / "tests").rglob("*.py")) <= 59_000
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert sum(len(file.read_text(encoding="utf-8")) for file in documents) <= 250_000
    assert len([file for file in (ROOT / "omni").glob("*.py") if file.name != "__init__.py"]) <= 8


def is_product(folder: str) -> bool:
    return folder.split("/")[0] in ("omni", "train", "infer")


def keys(kind: type) -> int:
    """Keys of a configuration, those of its sections included."""
    count = 0
    for hint in get_type_hints(kind).values():
        section = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
        count += keys(section) if section else 1
    return count


def test_runs_and_commands_have_few_keys():
    assert keys(FitConfig) <= 153
    assert max(len(command_parser(name).options) for name in COMMANDS) <= 25
