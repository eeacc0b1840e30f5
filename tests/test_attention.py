"""The one door to attention: who goes through it, what it refuses to give to a kernel, and which kernels a GPU may choose."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from omni.attention import attention
from omni.config import preset
from omni.model.speech_model import SpeechModel

ROOT = Path(__file__).parent.parent
OTHER_DOORS = {
    "scaled_dot_product_attention",
    "MultiheadAttention",
    "multi_head_attention_forward",
    "flex_attention",
    "varlen_attn",
}
OPEN = {"omni/attention.py", "train/bench/gpu.py"}
"""The door, and the bench that compares kernels."""


def doors(source: str) -> set[str]:
    """Names of attention functions that a program mentions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found & OTHER_DOORS


def test_attention_has_one_door() -> None:
    files = [file for package in ("omni", "train", "infer") for file in sorted((ROOT / package).rglob("*.py"))]
    used = {str(file.relative_to(ROOT)): doors(file.read_text(encoding="utf-8")) for file in files}
    assert {name for name, found in used.items() if found} == OPEN
    assert doors("import torch.nn.functional as F\ny = F.scaled_dot_product_attention(q, k, v)")
    assert doors("from torch.nn import MultiheadAttention as M")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was asked of cuDNN, as in a process that has made no model yet."""
    asked: list[bool] = []
    monkeypatch.setattr("omni.attention._chosen", False)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    return asked


def test_a_model_turns_cudnn_off_once(asked: list[bool]) -> None:
    """Who turns it on again after that has it. What is compiled never passes the door's own check."""
    with torch.device("meta"):
        SpeechModel(preset("nano")), SpeechModel(preset("nano"))
    assert asked == [False]


def test_the_door_turns_cudnn_off_where_there_is_no_model(asked: list[bool]) -> None:
    """A codec's attention."""
    attention(*[torch.zeros(1, 2, 4, 8)] * 3)
    assert not asked
    with FakeTensorMode():
        x = torch.zeros(1, 2, 4, 8, device="cuda")
        assert attention(x, x, x).is_cuda and attention(x, x, x).is_cuda
    assert asked == [False]


def test_cudnn_is_off_here() -> None:
    SpeechModel(preset("nano"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_no_kernel_is_given_a_mask_of_another_format(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, given: torch.dtype
) -> None:
    real, seen = F.scaled_dot_product_attention, []

    def watched(q: torch.Tensor, *args: torch.Tensor, attn_mask: torch.Tensor, **more: bool) -> torch.Tensor:
        seen.append((q.dtype, attn_mask.dtype))
        return real(q, *args, attn_mask=attn_mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    shown = torch.ones(4, 4, dtype=torch.bool).tril()
    mask = shown if given == torch.bool else torch.zeros(4, 4, dtype=given).masked_fill(~shown, float("-inf"))
    torch.testing.assert_close(
        attention(x, x, x, mask).float(), real(x.float(), x.float(), x.float(), shown), rtol=0.02, atol=0.02
    )
    assert seen and all(mask in (torch.bool, query) for query, mask in seen)


@pytest.mark.parametrize("masked", [False, True])
def test_groups_with_a_mask_are_spread_over_the_heads_on_a_gpu(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(2, 6, 5, 8, generator=g), torch.randn(2, 2, 2, 5, 8, generator=g)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if masked else None
    plain, real, asked = attention(q, k, v, mask, not masked, True), F.scaled_dot_product_attention, []

    def watched(*args: torch.Tensor, **more: object) -> torch.Tensor:
        asked.append(more["enable_gqa"])
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.testing.assert_close(attention(q, k, v, mask, not masked, True), plain)
    assert asked == [not masked]


@pytest.mark.cuda
def test_a_gpu_s_kernels_are_right_and_not_cudnn_s() -> None:
    """Where cuDNN gave NaN: with a mask, at lengths of 64 more than a multiple of 128, and scores far below zero."""
    SpeechModel(preset("nano"))
    for length, masked in ((64, True), (192, True), (704, True), (2048, True), (2048, False)):
        q = torch.full((2, 14, length, 64), 4.0, device="cuda", dtype=torch.bfloat16).requires_grad_()
        mask = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda").tril() if masked else None
        chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, mask, 0.0, not masked))
        out = attention(q, -q.detach(), q, mask, not masked)
        out.sum().backward()
        assert chosen != SDPBackend.CUDNN_ATTENTION
        assert q.grad is not None and bool(q.grad.isfinite().all())
        torch.testing.assert_close(out, torch.full_like(out, 4.0))
