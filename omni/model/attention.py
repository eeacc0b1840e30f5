"""The attention function that every part of the model calls, and the choice of its kernels on a GPU.

Dimensions: B batch, H heads, G key/value heads, T queries, S keys, D size of a head, N sequences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.utils.private import is_compiled

_OLD = torch.__version__.startswith("2.11.")
"""Its `varlen_attn` takes groups without being told."""


@lru_cache
def choose_kernels() -> None:
    """Keep cuDNN's attention out of use in this process; the first call decides, later ones change nothing.

    PyTorch prefers it on H100, H200 and B200. There it makes a plan of 20 to 40 ms, or up to 0.4 s, in each thread for every
    new shape (modelscope/FunASR#3704), and gives NaN gradients at some lengths with a mask (pytorch/pytorch#196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


class PackedRows(NamedTuple):
    """Where the sequences lie that rows of a batch are packed with, for attention inside each of them.

    Attributes:
        ends: int32 [N + 1], the first position of each sequence in the rows one after another, and the end of the last.
        longest: no sequence has more positions.
        window: keys that a query sees, itself included; None for all before it.
        causal: otherwise every query sees all of its sequence, and `window` is None.
    """

    ends: Tensor
    longest: int
    window: int | None = None
    causal: bool = True


def multiplied_in(x: Tensor) -> torch.dtype:
    """The number format of products of x with weights: autocast's, where it is on, or x's own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def takes_packed(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `attention` takes `PackedRows` in place of a mask: flash attention's sizes, half precision, Ampere or later."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 256
    return device.type == "cuda" and fits and _ampere(device.index or 0)


def takes_segments(device: torch.device, window: int | None, block: nn.Module) -> bool:
    """Whether blocks attend inside each of `PackedRows` on a CPU: without a window, and not compiled (again for every batch's
    lengths)."""
    return device.type == "cpu" and window is None and not is_compiled(block)


@lru_cache
def _ampere(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | PackedRows | None = None,
    causal: bool = False,
    grouped: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with `attn_mask`, `is_causal` and `enable_gqa`; [B, H, T, D].

    When bf16 is trained on a CPU, attention is computed in fp32 and rounded afterwards: the backward pass of torch's bf16
    kernel takes four times as long on short clips, and 1.6 times on 256 time steps (torch 2.14).

    Args:
        query: [B, H, T, D].
        key, value: [B, H, S, D], or [B, G, S, D] where `grouped`.
        mask: bool (True: is seen) or added to the scores, broadcastable to [B, H, T, S]. A floating one is converted to the
            queries' format: CUDA's kernels read another one as if it were theirs (pytorch/pytorch#191612). Or `PackedRows`,
            where `takes_packed` or `takes_segments`: costs what the sequences cost, not the square of the row.
    """
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and needs_grad:
        with torch.autocast("cpu", enabled=False):
            return attention(query.float(), key.float(), value.float(), mask, causal, grouped).to(torch.bfloat16)
    if isinstance(mask, PackedRows):
        packed = _segment_attention if query.device.type == "cpu" else _packed_attention
        return packed(query, key, value, mask)
    if mask is not None and mask.dtype != torch.bool and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if query.is_cuda:
        if not torch.compiler.is_compiling():
            choose_kernels()
        if grouped and mask is not None:
            # No fused CUDA kernel takes both groups and a mask: shared keys would go to the unfused one, which writes all of
            # the attention's weights to memory.
            group = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1), False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _segment_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
    """A call for each sequence: forward and backward of a row of 16 questions of 80 positions (9 heads of 64) take 21 ms of one
    core, 140 under a mask (Xeon with AMX)."""
    sizes = packed.ends.diff().tolist()
    parts = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None].split(sizes, dim=2) for x in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    each = [
        attention(q, k, v, causal=packed.causal, grouped=grouped)[0].transpose(0, 1)
        for q, k, v in zip(*parts, strict=True)
        if q.shape[2]
    ]
    return torch.cat(each).unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
    """Flash attention over sequences of different lengths.

    `varlen_attn` takes cuDNN's kernels where the window is (-1, -1), in the backward pass also where `num_splits` kept them
    from the forward one (torch 2.14). A window as wide as the longest sequence is none to flash, and keeps both from cuDNN.
    """
    from torch.nn.attention.varlen import varlen_attn  # takes a second

    b, _, t, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options: Any = {"enable_gqa": True} if not _OLD and q.shape[1] != k.shape[1] else {}
    ends, longest = packed.ends, packed.longest
    window = (-1 if packed.window is None else packed.window - 1, 0) if packed.causal else (longest, longest)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window, **options)
    return out.unflatten(0, (b, t)).transpose(1, 2)  # type: ignore[union-attr]
