"""The one door to attention: who goes through it, what it refuses to give to a kernel, and which kernels a GPU may choose."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from omni.config import preset
from omni.model.attention import _OLD, PackedRows, _ampere, _packed_attention, attention, choose_kernels, takes_packed
from omni.model.decoder import causal_mask
from omni.model.speech_model import SpeechModel


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What was asked of cuDNN, as in a process that has made no model yet."""
    asked: list[bool] = []
    choose_kernels.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    yield asked
    choose_kernels.cache_clear()


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


def varlen_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Tensor, longest: int, longest_k: int,
    window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn` on any device: each sequence alone, under its window's mask."""
    assert ends is ends_k and longest == longest_k >= int(ends.diff().max()) and ends.dtype == torch.int32
    groups = q.shape[1] != k.shape[1]
    assert _OLD or enable_gqa == groups
    assert window_size != (-1, -1)  # cuDNN's kernels would take it
    out = []
    for low, high in pairwise(ends.tolist()):
        one = [x[low:high].transpose(0, 1)[None] for x in (q, k, v)]
        index = torch.arange(high - low)
        before = index[:, None] - index
        seen = (before >= -window_size[1]) & ((before <= window_size[0]) if window_size[0] >= 0 else True)
        out.append(F.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=groups)[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (1, True), (5, True), (100, True), (None, False)])
@pytest.mark.parametrize("groups", [6, 2])
def test_packed_attention_is_that_under_a_mask(
    groups: int, window: int | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_reference)
    g = torch.Generator().manual_seed(0)
    segments = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5, [0] * 1 + [1] * 23])
    ends = torch.tensor([0, 7, 19, 24, 25, 48], dtype=torch.int32)
    mask = causal_mask(24, segments, window, torch.device("cpu"))
    if not causal:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    found = []
    packed = PackedRows(ends, 64, window, causal)
    for attend in (partial(attention, mask=mask), partial(_packed_attention, packed=packed), partial(attention, mask=packed)):
        g.manual_seed(0)
        q, k, v = (torch.randn(2, 24, n, 8, generator=g).requires_grad_() for n in (6, groups, groups))
        options = {} if attend.func is _packed_attention else {"grouped": groups < 6}
        out = attend(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        out.square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    if window is None:  # each sequence by itself, as on a CPU
        torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)


def test_packed_attention_is_for_half_precision_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device == 0 else (7, 5))
    _ampere.cache_clear()
    for device, dtype, size, wanted in (
        ("cuda:0", torch.bfloat16, 64, True),
        ("cuda", torch.float16, 256, True),
        ("cuda:1", torch.float16, 64, False),
        ("cuda:0", torch.float32, 64, False),
        ("cuda:0", torch.bfloat16, 20, False),
        ("cuda:0", torch.bfloat16, 264, False),
        ("cpu", torch.bfloat16, 64, False),
    ):
        assert takes_packed(torch.device(device), dtype, size) == wanted, (device, dtype, size)
    _ampere.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize(("window", "causal"), [(None, True), (100, True), (None, False)])
def test_packed_attention_on_a_gpu(window: int | None, causal: bool) -> None:
    segments = (torch.arange(512) // torch.tensor([[37], [200]])).cuda()
    starts = torch.cat([torch.arange(0, 512, 37), torch.arange(512, 1024, 200), torch.tensor([1024])])
    mask = causal_mask(512, segments, window, segments.device)
    if not causal:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    found, half = [], torch.bfloat16
    for how, dtype in ((mask, torch.float32), (PackedRows(starts.int().cuda(), 256, window, causal), half), (mask, half)):
        g = torch.Generator("cuda").manual_seed(0)
        drawn = (torch.randn(2, 512, n, 64, generator=g, device="cuda").to(half).to(dtype) for n in (14, 2, 2))
        q, k, v = (x.requires_grad_() for x in drawn)
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), how, grouped=True)
        out.float().square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    for exact, ours, masked in zip(*found, strict=True):
        far, allowed = (float((x.float() - exact).norm() / exact.norm()) for x in (ours, masked))
        assert far < max(0.01, 1.5 * allowed)


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
