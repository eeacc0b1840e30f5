"""Law 10: imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "omni": {"train", "infer", "lightning", "lightning_fabric", "jsonargparse", "argparse", "fastapi", "tqdm"},
    "train": {"infer"},
    "infer": {"train", "lightning", "lightning_fabric"},
}


def imported(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        wrong = imported(file.read_text(encoding="utf-8")) & FORBIDDEN[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_the_check_can_fail():
    assert imported("def f():\n    from train.trainer.loop import x\nimport argparse as a") == {"train", "argparse"}


def test_importing_omni_brings_no_launcher_along():
    code = (
        "import sys, omni; from omni import SpeechLM; "
        "print([m for m in ('lightning_fabric', 'jsonargparse', 'train', 'infer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
