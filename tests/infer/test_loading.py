"""The number format that a command answers in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.loading import serving_dtype
from omni.checkpoint.folder import stored_dtype
from omni.generate.speech_lm import SpeechLM

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)


def stored(folder: Path, place: Path, dtype: torch.dtype) -> Path:
    """The model with its weights in a number format, in a folder of its own."""
    shutil.copytree(folder, place)
    save_file({n: t.to(dtype) for n, t in load_file(folder / "model.safetensors").items()}, place / "model.safetensors")
    return place


def test_a_small_model_stored_in_bf16_is_answered_in_fp32_on_a_cpu(folder: Path, tmp_path: Path) -> None:
    bf16 = str(stored(folder, tmp_path / "bf16", torch.bfloat16))
    assert serving_dtype(None, CPU, bf16) == torch.float32 and serving_dtype("auto", CPU, bf16) is None


def test_fp32_is_answered_in_bf16_on_a_gpu_that_multiplies_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = stored(folder, tmp_path / "half", torch.float16)
    assert (stored_dtype(folder), stored_dtype(half), stored_dtype(half / "nothing")) == (torch.float32, torch.float16, None)
    pretend(monkeypatch, native=True)
    assert serving_dtype(None, CUDA, str(folder)) == torch.bfloat16
    assert serving_dtype(None, CUDA, str(half)) is None
    assert serving_dtype("auto", CUDA, str(folder)) is None
    assert serving_dtype("float32", CUDA, str(folder)) == torch.float32
    assert serving_dtype(None, CPU, str(folder)) is None
    pretend(monkeypatch, native=False)
    assert serving_dtype(None, CUDA, str(folder)) is None


@pytest.mark.long
def test_the_line_says_so_and_python_keeps_what_is_stored(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.loading.serving_dtype", lambda given, device, folder: torch.bfloat16 if given is None else None)
    said = run("ask", "--text", "hello", "--task", "T1T2", "--model", str(folder))
    assert "bfloat16" in said.err and "--dtype auto" in said.err
    assert "bfloat16" not in run("ask", "--text", "hello", "--task", "T1T2", "--model", str(folder), "--dtype", "auto").err
    assert SpeechLM.from_pretrained(folder).model.decoder.norm.weight.dtype == torch.float32


@pytest.mark.cuda
def test_a_gpu_answers_in_bf16(run, folder: Path) -> None:
    assert "bfloat16" in run("ask", "--text", "hello", "--task", "T1T2", "--model", str(folder), "--device", "cuda").err
