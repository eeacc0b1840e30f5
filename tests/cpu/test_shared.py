"""Laws of products and attentions that threads share: right, and a row the same, whoever computes it and beside whom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni.cpu import compiled, compiled_int8
from omni.cpu.compiled import compiled_for_threads
from omni.cpu.compiled_int8 import multiply
from omni.utils import hardware


@pytest.fixture(params=[1, 3, "no runtime"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(compiled_int8, "SHARED", 1)
    if request.param == "no runtime":
        monkeypatch.setattr(hardware, "_libgomp", lambda: None)
        return 2
    return int(request.param)


def product(x: Tensor, weight: Tensor, scale: Tensor, threads: int = 1) -> Tensor:
    out = torch.full((len(x), len(weight)), float("nan"))
    multiply(x, weight, scale, out, threads)
    return out


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
        "import logging, numpy, torch; from omni.cpu import compiled, compiled_int8 as c; logging.basicConfig(); "
        "compiled.clear(numpy.empty(1, numpy.float32)); "
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


ROWS, SLOTS = 5, 60


class Case:
    """A step of several rows: their slots, what they see, and what is cached."""

    def __init__(self, heads: int, kv_heads: int, size: int, ring: bool = False) -> None:
        g = torch.Generator().manual_seed(heads * size)
        self.heads, self.size, self.ring = heads, size, ring
        self.keys, self.values = (torch.randn(ROWS, SLOTS + 1, kv_heads, size, generator=g) for _ in "kv")
        self.row, self.slot = [0, 2, 3, 4], [SLOTS - 1, 33, 0, 18]
        self.wide = torch.randn(len(self.row), (heads + 2 * kv_heads) * size, generator=g)
        self.seen = torch.arange(SLOTS) <= torch.tensor(self.slot)[:, None]
        if ring:
            self.seen &= torch.rand(self.seen.shape, generator=g) < 0.6  # in no order
            self.seen[:, 0] = True

    def wanted(self) -> Tensor:
        """By PyTorch, in float64."""
        q = self.wide.double()[:, : self.heads * self.size].view(-1, self.heads, 1, self.size)
        k, v = (x[self.row, :SLOTS].transpose(1, 2).double() for x in (self.keys, self.values))
        found = F.scaled_dot_product_attention(q, k, v, self.seen[:, None, None], enable_gqa=True)
        return found.flatten(1)

    def attend(self, columns: list[int], threads: int = 1) -> Tensor:
        """Ours, of some of the columns; one more rests."""
        writes = np.array([self.row[c] * (SLOTS + 1) + self.slot[c] for c in columns] + [SLOTS], np.int64)
        active = compiled.active_of(writes, SLOTS + 1)
        assert active.tolist() == list(range(len(columns)))
        mask = torch.where(self.seen[[*columns, 0]], 0.0, float("-inf"))
        wide, out = self.wide[columns].contiguous(), torch.full((len(columns), self.heads * self.size), float("nan"))
        rows, slots, kv_heads, size = self.keys.shape
        task = compiled_int8.SharedAttention(
            0, len(active), len(writes), rows, slots, self.heads, kv_heads, size, SLOTS, self.ring, active.ctypes.data,
            writes.ctypes.data, *(held.data_ptr() for held in (mask, wide, self.keys, self.values, out)),
        )  # fmt: skip
        compiled_int8.attend(task, threads)
        return out


CASES = {
    "grouped": (14, 2, 64), "one head of keys": (3, 1, 32), "a head of keys each": (4, 4, 32), "wide": (2, 1, 128),
    "other sizes": (4, 2, 24), "many queries": (34, 1, 32),
}  # fmt: skip


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_is_attention(case: str, ring: bool, threads: int) -> None:
    held = Case(*CASES[case], ring)
    everything = held.attend(list(range(len(held.row))), threads)
    torch.testing.assert_close(everything, held.wanted().float(), rtol=1e-5, atol=2e-6)
    for rows in ([1], [0, 3], [2, 1]):  # others beside it, or none
        assert torch.equal(held.attend(rows, threads), everything[rows])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_queries(bad: float) -> None:
    held = Case(14, 2, 64)
    clean = held.attend(list(range(len(held.row))))
    held.wide[3, 64 + 5] = bad  # of the second query of a row
    found = held.attend(list(range(len(held.row))))
    odd = torch.zeros(found.shape, dtype=torch.bool)
    odd[3, 64:128] = True
    assert not found[odd].isfinite().any() and torch.equal(found[~odd], clean[~odd])
