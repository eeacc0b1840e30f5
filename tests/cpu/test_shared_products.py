"""Laws of products that threads share: right, and the same whoever computes which part, in any company of rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni.cpu import shared_products
from omni.cpu.shared_products import multiply
from omni.utils import hardware


def product(numbers: str, x: Tensor, weight: Tensor, scale: Tensor | None = None, threads: int = 1) -> Tensor:
    out = torch.full((len(x), len(weight)), float("nan"))
    multiply(numbers, x, weight, scale, out, threads)
    return out


@pytest.fixture(params=[1, 3, "no runtime"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(shared_products, "LEAST", 1)
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
            assert product("int8", rows[:count], weight[:outputs], scale[:outputs], threads).equal(wanted[:count, :outputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 7, 300])
def test_a_row_is_the_same_in_any_company(inputs: int, dtype: torch.dtype, threads: int) -> None:
    """Also beside one that is not finite, which stays so."""
    x, weight = (torch.randn(n, inputs, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (7, 70))
    wanted, numbers, rows = x.double() @ weight.double().T, str(dtype).removeprefix("torch."), x.float()
    alone = torch.cat([product(numbers, row[None], weight) for row in rows])
    assert float((alone.double() - wanted).norm() / wanted.norm()) < 1e-6
    for count in (1, 2, 3, 7):
        assert torch.equal(product(numbers, rows[:count], weight, threads=threads), alone[:count])
    rows[2], rows[3, 0] = float("nan"), float("inf")
    broken = product(numbers, rows, weight, threads=threads)
    assert not broken[2:4].isfinite().any() and torch.equal(broken[4:], alone[4:]) and torch.equal(broken[:2], alone[:2])


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8"])
def test_what_was_compiled_is_found_by_the_next_process(numbers: str) -> None:
    """Another object of the same function, as another process has it."""
    shared_products.compile_for(numbers)
    shared_products.compile_for.cache_clear()
    assert shared_products.compile_for(numbers).cache_hits == 1


@pytest.mark.long
@pytest.mark.parametrize("damage", [b"", b"\0\0\0\0\0"])
def test_damaged_files_are_told_and_made_again(damage: bytes, tmp_path: Path) -> None:
    """Of functions that are called from Python, and of those that threads call."""
    code = (
        "import logging, torch; from omni.cpu import compiled, shared_products as s; logging.basicConfig(); compiled.start(); "
        "out = torch.empty(1, 1); s.multiply('float32', torch.ones(1, 3), torch.ones(1, 3), None, out, 1); print(out.item())"
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
    assert out == "3.0\n" and "_clear is compiled again: what is kept of it in" in told and "_share_float32 is" in told
    assert run() == ("3.0\n", "") and {path for path in kept if path.suffix == ".nbi"} <= set(tmp_path.rglob("*.nb?"))
