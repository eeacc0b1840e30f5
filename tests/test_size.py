"""The budgets of `docs/size.md`: lines and files of each folder."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

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
