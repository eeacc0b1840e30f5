"""Transformer blocks of the decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Weights are laid out as in transformers' Llama, Qwen and Mistral (separate q, k and v, rotary halves side by side), so that
an external checkpoint is renamed, never permuted.

Dimensions: B batch, T time, S keys, W width, H heads, G key/value heads, D size of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.config import DecoderConfig
from omni.cpu import Normed, constant, linear, normed, together
from omni.model.attention import PackedRows, attention
from omni.model.kv_cache import Cache
from omni.model.recompute import selectively


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Rotary frequencies [D / 2] in radians per position (Su et al. 2021), with Llama 3's scaling where configured."""
    half = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    freq = config.rope_base**-half
    scaling = config.rope_scaling
    if scaling is not None:
        wavelength = 2 * math.pi / freq
        low = scaling.original_context / scaling.low_freq_factor
        high = scaling.original_context / scaling.high_freq_factor
        blend = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        mixed = (1 - blend) * freq / scaling.factor + blend * freq
        freq = torch.where(wavelength > low, freq / scaling.factor, torch.where(wavelength < high, freq, mixed))
    return freq.float()


def rope_table(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin [B, T, 1, D] in fp32 for positions [B, T]; the sign is minus in the first half (see `rotate`)."""
    angle = positions[:, :, None, None].float() * frequencies
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [B, T, H, D]; the two halves of a head are the coordinates."""
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019): `torch.nn.RMSNorm` with half the kernels on a CPU.

    On a few time steps a kernel costs its launch, not its work, and a step of the decoder has two norms a layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if hasattr(weight, "to_local"):  # a DTensor: of heads that processes share, each of which has its own heads' gradient
            from torch.distributed.tensor import Partial

            weight = weight.to_local(grad_placements=[Partial()])
        if x.device.type == "cpu" and weight.dtype == torch.float32:
            x = x.float()  # as autocast has it on a GPU
        if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(constant(self.eps or 0.0), length, length, value=1 / x.shape[-1]).rsqrt() * weight


class Attention(nn.Module):
    """Causal grouped-query attention, without a cache or with one that is passed in."""

    fast = False
    TOGETHER = ("q", "k", "v")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        w, d = config.width, config.head_size
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, d
        self.q = nn.Linear(w, config.heads * d, bias=config.qkv_bias)
        self.k = nn.Linear(w, config.kv_heads * d, bias=config.qkv_bias)
        self.v = nn.Linear(w, config.kv_heads * d, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * d, w, bias=False)
        self.q_norm = RMSNorm(d, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(d, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor | Normed, rope: tuple[Tensor, Tensor], mask: Tensor | PackedRows | None, cache: Cache | None, layer: int
    ) -> Tensor:
        whole, many = together(x, self.q, self.k, self.v), self.heads + self.kv_heads
        if whole is None:
            q, k, v = (linear(self.fast, part, x) for part in (self.q, self.k, self.v))
            both = torch.cat([q, k], dim=2)
        else:
            both, v = whole.split([many * self.head_dim, self.kv_heads * self.head_dim], -1)
        b, t, _ = v.shape
        v = v.view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        both = both.view(b, t, many, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            both = torch.cat([self.q_norm(both[:, :, : self.heads]), self.k_norm(both[:, :, self.heads :])], dim=2)
        both = rotate(both, *rope)
        q, k = both[:, :, : self.heads], both[:, :, self.heads :].transpose(1, 2)
        if cache is not None:
            k, v = cache.update(layer, k.to(v.dtype), v)  # under autocast a norm's keys are fp32
        if q.dtype != v.dtype:
            q, k = q.to(v.dtype), k.to(v.dtype)
        if isinstance(mask, Tensor) and mask.dtype != q.dtype:
            mask = mask.to(q.dtype)
        group = self.heads // self.kv_heads
        if t == 1 and group > 1 and isinstance(mask, Tensor):
            # One query per head: the heads of a group take the time dimension, so keys are read once and never copied.
            q = q.view(b, self.kv_heads, group, self.head_dim)
            y = attention(q, k, v, mask)
        else:
            y = attention(q.transpose(1, 2), k, v, mask, mask is None, group > 1).transpose(1, 2)
        return linear(self.fast, self.out, y.reshape(b, t, -1))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    fast = False
    TOGETHER = ("gate", "up")

    def __init__(self, width: int, hidden: int, out: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, out or width, bias=bias)

    def forward(self, x: Tensor | Normed) -> Tensor:
        whole = together(x, self.gate, self.up)
        gate, up = (linear(self.fast, part, x) for part in (self.gate, self.up)) if whole is None else whole.chunk(2, -1)
        inner = F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate).mul_(up)
        return linear(self.fast, self.down, inner)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config.width, config.mlp_width)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | PackedRows | None,
        cache: Cache | None,
        layer: int,
        selective: bool = False,
    ) -> Tensor:
        """[B, T, W] to [B, T, W]; `selective`: see `omni.model.recompute`."""
        if selective:
            return selectively(self, self.forward, x, rope, mask, cache, layer)
        part, mlp = self.attention, self.mlp
        x = x + part(normed(x, self.attention_norm, part.q, part.k, part.v), rope, mask, cache, layer)
        return x + mlp(normed(x, self.mlp_norm, mlp.gate, mlp.up))
