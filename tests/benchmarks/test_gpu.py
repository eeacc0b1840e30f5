"""`bench --gpu`: each check runs apart and stops no other, and runs through with CUDA's calls faked, at small sizes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import child as bench_child
from benchmarks import gpu as bench_gpu
from benchmarks import training as bench_command
from omni.config import preset
from tests.benchmarks import toys as bench_toys

CPU = torch.device("cpu")


def run_here(command: Sequence[str], limit: float) -> bench_child.ChildResult:
    """A check in this process."""
    with redirect_stdout(io.StringIO()) as out:
        try:
            code: Any = bench_child.run_check(*command[3:])
        except SystemExit as lost:
            code = lost.code
    return bench_child.ChildResult(code, 0.0, out.getvalue(), "")


def test_every_check_has_a_state_and_stops_no_other(monkeypatch):
    monkeypatch.delitem(bench_toys.CHECKS, "hold_for_a_minute")
    monkeypatch.setattr(bench_child, "run_limited", run_here)
    monkeypatch.setattr(os, "_exit", sys.exit)
    found = {one["check"]: one for one in bench_child.gpu_report("tests.benchmarks.toys", "cpu", real=False)}
    assert {name: one["state"] for name, one in found.items()} == {
        "lose_the_process": "red",
        "miss_a_package": "not run",
        "find_a_fault": "red",
        "find_none": "green",
    }
    assert found["lose_the_process"]["found"] == ["before", "WRONG: ended with 7: it said nothing"]
    assert "no_such_package" in found["miss_a_package"]["found"][0]
    assert found["find_a_fault"]["found"] == ["first", "WRONG: second", "on cpu, real False"]


@pytest.mark.long
def test_a_check_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(bench_toys, "CHECKS", {"hold_for_a_minute": bench_toys.CHECKS["hold_for_a_minute"]})
    (one,) = bench_child.gpu_report("tests.benchmarks.toys", "cpu", real=False)
    assert one["state"] == "red" and one["found"][-1] == "WRONG: not finished after 3 s"


def test_all_that_a_command_has_started_is_ended():
    """Also what has a session of its own: it holds the pipe, which is read to its end."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '40'], start_new_session=True); time.sleep(40)"
    ended = bench_child.run_limited([sys.executable, "-c", code], 2.0)
    assert ended.code is None and ended.seconds < 20


def test_no_check_begins_once_the_time_is_over(monkeypatch):
    monkeypatch.setattr(bench_child, "GPU_SECONDS", 0.5)
    assert [one["state"] for one in bench_child.gpu_report("tests.benchmarks.toys", "cpu", real=False)] == ["not run"] * 5


def test_the_limits_fit_into_the_time_of_all():
    assert sum(limit for _, limit in bench_gpu.CHECKS.values()) == bench_child.GPU_SECONDS == 420


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run(capsys):
    assert bench_command.main(["--gpu", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["check"] for line in lines] == list(bench_gpu.CHECKS)
    assert all(line["state"] == "not run" and "no GPU" in line["found"][0] for line in lines)


# --- the checks, with CUDA's calls faked ------------------------------------------------------------------------------


@pytest.fixture
def modes() -> list[str]:
    """What waits for the device were to do, in order."""
    return []


@pytest.fixture
def faked(monkeypatch, modes) -> None:
    """Few layers, and a device that says what memory it holds."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *device: 1 << 22)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    small = preset("nano")
    small = replace(
        small,
        decoder=replace(small.decoder, layers=2, width=32, heads=2, kv_heads=1, head_dim=0, mlp_width=32),
        encoder=replace(small.encoder, layers=1),
    )
    monkeypatch.setattr(bench_gpu, "preset", lambda name: small)


def lines(name: str) -> list[tuple[str, bool | None]]:
    return list(bench_gpu.CHECKS[name][0](CPU, False))


@pytest.mark.long
def test_gradients_that_are_not_finite_are_found(faked, monkeypatch):
    monkeypatch.setattr(bench_gpu, "timed", lambda work, device, repeat: 1.0)
    assert [good for _, good in lines("attention")] == [None, None, True, True, True]
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(bench_gpu.F, "scaled_dot_product_attention", lambda q, *a, **k: plain(q, *a, **k) * (q.max() / 0))
    assert [good for _, good in lines("attention")] == [None, None, False, False, False]


def test_figures_of_training(faked, modes, monkeypatch):
    (text, good), repeated = lines("training")
    assert good and "2 x 64, checkpointing True" in text and "4 MiB" in text
    assert repeated == ("deterministic gradients are the same twice", True) and modes == ["error", "default"]
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    assert not bench_gpu.repeats(CPU, 16)


@pytest.mark.long
def test_figures_of_the_loss(faked):
    found = lines("loss")
    assert len(found) == 6 and all(good for _, good in found[:4])
