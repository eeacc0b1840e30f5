"""Laws of products that threads share: right, and the same whoever computes which part, in any company of rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni.cpu import compiled_int8
from omni.cpu.compiled import compiled_for_threads
from omni.cpu.compiled_int8 import multiply
from omni.utils import hardware


def product(x: Tensor, weight: Tensor, scale: Tensor, threads: int = 1) -> Tensor:
    out = torch.full((len(x), len(weight)), float("nan"))
    multiply(x, weight, scale, out, threads)
    return out


@pytest.fixture(params=[1, 3, "no runtime"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(compiled_int8, "SHARED", 1)
    if request.param == "no runtime":
        monkeypatch.setattr(hardware, "_libgomp", lambda: None)
        return 2
    return int(request.param)


@pytest.mark.parametrize("inputs", [1, 7, 16, 33, 4864])
def test_int8_is_exact(inputs: int, threads: int) -> None:
    """Of any number of rows and outputs, and of the largest numbers."""
    generator, scale = torch.Generator().manual_seed(0), torch.rand(41, generator=torch.Generator().manual_seed(1))
    rows = torch.randint(0, 256, (70, inputs), generator=generator, dtype=torch.uint8)
    weight = torch.randint(-127, 128, (41, inputs), generator=generator, dtype=torch.int8)
    rows[0], rows[1], weight[0], weight[1] = 0, 255, -127, 127
    wanted = ((rows.double() - 128) @ weight.double().T).float() * scale
    for count in (1, 2, 3, 4, 5, 7, 33, 70):
        for outputs in (1, 2, 3, 41):
            assert product(rows[:count], weight[:outputs], scale[:outputs], threads).equal(wanted[:count, :outputs])


def test_what_was_compiled_is_found_by_the_next_process() -> None:
    """Another object of the same function, as another process has it."""
    compiled_for_threads(compiled_int8.share_product)
    compiled_for_threads.cache_clear()
    assert compiled_for_threads(compiled_int8.share_product).cache_hits == 1


@pytest.mark.long
@pytest.mark.parametrize("damage", [b"", b"\0\0\0\0\0"])
def test_damaged_files_are_told_and_made_again(damage: bytes, tmp_path: Path) -> None:
    """Of functions that are called from Python, and of those that threads call."""
    code = (
        "import logging, torch; from omni.cpu import compiled, compiled_int8 as c; logging.basicConfig(); compiled.start(); "
        "out, one = torch.empty(1, 1), torch.ones(1); "
        "c.multiply(torch.full((1, 3), 129).byte(), torch.ones(1, 3).char(), one, out, 1); print(out.item())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    assert run() == ("3.0\n", "")
    kept = [path for path in tmp_path.rglob("*.nb?")]
    for path in kept:
        path.write_bytes(damage)
    out, told = run()
    assert out == "3.0\n" and "clear is compiled again: what is kept of it in" in told and "share_product is" in told
    assert run() == ("3.0\n", "") and {path for path in kept if path.suffix == ".nbi"} <= set(tmp_path.rglob("*.nb?"))
