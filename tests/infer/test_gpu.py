"""`omni-infer bench --gpu`: its checks run through with CUDA's calls faked, and find what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from infer.bench import gpu
from omni.codec.snac import SnacCodec
from omni.config import preset
from omni.generate.runner import Runner
from omni.lora.attach import activate

CPU = torch.device("cpu")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What waits for the device were to do, in order; models are small."""
    seen: list[str] = ["default"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "a fake")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: seen[-1])
    small = preset("nano")
    decoder = dataclasses.replace(small.decoder, layers=2, width=32, heads=2, kv_heads=1, head_dim=0, mlp_width=32)
    small = dataclasses.replace(small, decoder=decoder, encoder=dataclasses.replace(small.encoder, layers=1))  # type: ignore[type-var]
    monkeypatch.setattr(gpu, "preset", lambda name: small)
    return seen


def found(name: str) -> list[bool | None]:
    return [right for _, right in gpu.CHECKS[name](CPU, False)]


def test_all_checks_run_through_and_are_right(modes: list[str]) -> None:
    shown: list[str] = []
    assert gpu.check_gpu(CPU, real=False, show=shown.append), shown
    assert list(dict.fromkeys(line.partition(":")[0] for line in shown)) == list(gpu.CHECKS)
    assert set(modes) == {"default", "error"} and modes[-1] == "default"


def test_the_first_failure_ends_it(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *of: 3)  # cuDNN
    shown: list[str] = []
    assert not gpu.check_gpu(CPU, real=False, show=shown.append)
    assert len(shown) == 2 and "CUDNN" in shown[1] and shown[1].endswith("WRONG")


def test_an_error_is_a_failure_and_time_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device, real: bool, dtype: torch.dtype) -> gpu.Lines:
        assert dtype == torch.float16
        yield "before", None
        raise RuntimeError("capture invalidated")

    shown: list[str] = []
    monkeypatch.setattr(gpu, "CHECKS", {"lost": lost})
    half = torch.float16
    assert not gpu.check_gpu(CPU, show=shown.append, dtype=half)
    assert shown[-1] == "lost: WRONG: RuntimeError: capture invalidated"
    monkeypatch.setattr(gpu, "SECONDS", 0.0)
    assert gpu.check_gpu(CPU, show=shown.append, dtype=half) and "was not run" in shown[-1]


def test_steps_that_lost_what_they_were_given_are_found(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    init, forward = Runner.__init__, Runner._forward

    def watched(self: Runner, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.captured = options.get("graph") is None  # type: ignore[attr-defined]

    def stale(self: Runner, plan: Any) -> None:
        if self.captured:  # type: ignore[attr-defined]
            self.state.column.fill_(1)
        forward(self, plan)

    monkeypatch.setattr(Runner, "__init__", watched)
    monkeypatch.setattr(Runner, "_forward", stale)
    assert False in found("graphs")


@pytest.mark.long
def test_a_change_that_one_model_missed_is_found(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def once(model: Any, *names: str) -> None:
        calls.append(names)
        if len(calls) != 1:  # the first model goes on with its adapter
            activate(model, *names)

    monkeypatch.setattr(gpu, "activate", once)
    lines = gpu.changes(CPU, False)
    assert [right for _, right in (next(lines) for _ in range(6))] == [True] * 5 + [False]


def test_a_codec_that_differs_from_the_host_s_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    small: Any = {"encoder_dim": 4, "encoder_rates": [2, 4], "decoder_dim": 32, "decoder_rates": [4, 2]}
    seeds = iter((0, 0, 1, 0))
    monkeypatch.setattr(gpu, "random_codec", lambda name, device: SnacCodec.random(seed=next(seeds), **small))
    assert found("codecs") == [True]
    assert found("codecs") == [False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run(run: Any) -> None:
    done = run("bench", "--gpu")
    assert done.code == 0 and "there is no GPU" in done.text


@pytest.mark.cuda
def test_the_checks_on_a_gpu() -> None:
    shown: list[str] = []
    assert gpu.check_gpu(torch.device("cuda", 0), real=False, show=shown.append), shown
