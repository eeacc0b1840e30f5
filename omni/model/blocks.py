"""Transformer blocks of the decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Weights are laid out as in transformers' Llama, Qwen and Mistral (separate q, k and v, rotary halves side by side), so that
an external checkpoint is renamed, never permuted.

Dimensions: B batch, T time, S keys, W width, H heads, G key/value heads, D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.attention import attention
from omni.config import DecoderConfig
from omni.kernels import SMALL, Kernels, apply
from omni.kv_cache import Cache, KVCache
from omni.model.int8 import Int8Linear, Normed, normed, packed_of, product_of, rounded, rounded_norm, together


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


@lru_cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.tensor(value, dtype=torch.float32)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019): `torch.nn.RMSNorm` with half the kernels on a CPU.

    On a few time steps a kernel costs its launch, not its work, and a step of the decoder has two norms a layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and self.weight.dtype == torch.float32:
            x = x.float()  # as autocast has it on a GPU
        if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return super().forward(x)
        return _rms_norm(x, self.weight, self.eps or 0.0)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _unscaled(x, eps) * weight


def _unscaled(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without its weight."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt()


class Attention(nn.Module):
    """Causal grouped-query attention, without a cache or with one that is passed in."""

    kernels: Kernels | None = None

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
        self, x: Tensor | Normed, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, layer: int
    ) -> Tensor:
        whole, many = together(x, self.q, self.k, self.v), self.heads + self.kv_heads
        if whole is None:
            q, k, v = (apply(self.kernels, part, _whole(x)) for part in (self.q, self.k, self.v))
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
        if mask is not None and mask.dtype != q.dtype:
            mask = mask.to(q.dtype)
        group = self.heads // self.kv_heads
        if t == 1 and group > 1 and mask is not None:
            # One query per head: the heads of a group take the time dimension, so keys are read once and never copied.
            q = q.view(b, self.kv_heads, group, self.head_dim)
            y = attention(q, k, v, mask)
        else:
            y = attention(q.transpose(1, 2), k, v, mask, mask is None, group > 1).transpose(1, 2)
        y = y.reshape(b, t, -1)
        out = together(y, self.out)
        return apply(self.kernels, self.out, y) if out is None else out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    kernels: Kernels | None = None

    def __init__(self, width: int, hidden: int, out: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, out or width, bias=bias)

    def forward(self, x: Tensor | Normed) -> Tensor:
        whole = together(x, self.gate, self.up)
        if whole is None:
            gate, up = (apply(self.kernels, part, _whole(x)) for part in (self.gate, self.up))
            inner = F.silu(gate) * up
        else:
            gate, up = whole.chunk(2, -1)
            inner = F.silu(gate).mul_(up)  # nothing is differentiated in int8
        out = together(inner, self.down)
        return apply(self.kernels, self.down, inner) if out is None else out


def _whole(x: Tensor | Normed) -> Tensor:
    return x.whole() if isinstance(x, Normed) else x


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config.width, config.mlp_width)
        self._step = _FlatStep()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, layer: int) -> Tensor:
        if isinstance(cache, KVCache) and x.shape[1] == 1 and mask is not None and self._step.is_of(self, x, cache):
            return self._step(x, rope, mask, cache, layer)
        part, mlp = self.attention, self.mlp
        x = x + part(normed(x, self.attention_norm, part.q, part.k, part.v), rope, mask, cache, layer)
        return x + mlp(normed(x, self.mlp_norm, mlp.gate, mlp.up))


class _FlatStep:
    """One column of each row through a block on a CPU, as flat calls.

    A step of few rows, or of a small model, costs its calls, not its work: modules with their lookups and views make a tenth of
    one. In int8 the operations and their order are the modules', and so is every bit of the result. In float32 a small block
    that serves multiplies q, k and v in one product, and gate and up in another; their weights become views of one tensor, so
    that what changes them in place changes it.
    """

    def __init__(self) -> None:
        self._parts: tuple[nn.Module | None, ...] = ()
        self._hooks: list[Mapping[int, object]] = []
        self._kind: type[nn.Module] | None = None
        self._fused: tuple[Sequence[Tensor], Sequence[int]] | None = None  # [q, k, v] and [gate, up]; places of their parts

    def is_of(self, block: Block, x: Tensor, cache: KVCache) -> bool:
        """Whether a step can be taken so: the linears are of one kind, nothing acts beside a part, and all else is float32."""
        own = block._modules
        attention, mlp = own["attention"], own["mlp"]
        parts = (*own.values(), *attention._modules.values(), *mlp._modules.values())  # type: ignore[union-attr]
        if parts != self._parts:
            self._parts, self._kind, self._fused = parts, self._made_of(block), None
            there = [part for part in parts if part is not None]
            self._hooks = [hooks for part in there for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        if self._kind is None or any(self._hooks) or x.dtype != torch.float32 or cache.dtype != torch.float32:
            return False
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return False  # while autograd records, the cache's `update` refuses to be written
        return self._kind is Int8Linear or (attention.kernels is not None and self._fuses(x))  # type: ignore[union-attr]

    def _made_of(self, block: Block) -> type[nn.Module] | None:
        part, mlp = block.attention, block.mlp
        linears = part.q, part.k, part.v, part.out, mlp.gate, mlp.up, mlp.down
        kinds = {type(one) for one in linears}
        if type(part) is not Attention or type(mlp) is not SwiGLU or kinds not in ({Int8Linear}, {nn.Linear}):
            return None
        if {type(one) for one in (part.q_norm, part.k_norm)} not in ({RMSNorm}, {type(None)}):
            return None
        if kinds == {nn.Linear} and sum(one.weight.numel() for one in linears) > SMALL:
            return None
        self.qkv, self.out, self.gate_up, self.down = linears[:3], linears[3:4], linears[4:6], linears[6:]
        self.attention_norm, self.mlp_norm, self.attention = block.attention_norm, block.mlp_norm, part
        self.q_norm, self.k_norm, self.head_dim = part.q_norm, part.k_norm, part.head_dim
        self.heads, self.kv_heads, self.hidden = part.heads, part.kv_heads, mlp.gate.out_features
        self._sizes = {len(group): [one.out_features for one in group] for group in (self.qkv, self.gate_up)}
        return kinds.pop()

    def _fuses(self, x: Tensor) -> bool:
        """Whether the weights of one input are views of one tensor, or become it now."""
        groups = [[part._parameters["weight"] for part in parts] for parts in (self.qkv, self.gate_up)]
        weights = [weight for group in groups for weight in group if weight is not None]
        if self._fused is not None and [weight.data_ptr() for weight in weights] == self._fused[1]:
            return True
        if any(type(w) is not nn.Parameter or w.dtype != x.dtype or w.device != x.device for w in weights):
            return False
        with torch.inference_mode(False), torch.no_grad():
            fused = [torch.cat([w.detach() for w in group if w is not None]) for group in groups]
            views = [view for whole, n in zip(fused, (3, 2), strict=True) for view in whole.split(self._sizes[n])]
            for weight, view in zip(weights, views, strict=True):
                weight.data = view
        self._fused = fused, [view.data_ptr() for view in views]  # of this thread: another may do the same at once
        return True

    def _product(self, x: Tensor, norm: nn.RMSNorm | None, linears: Sequence[nn.Module], whole: Tensor | None) -> Tensor:
        """The product of rows, or of their norm, and the weights of linears."""
        scale = None if norm is None else norm._parameters["weight"]
        eps = 0.0 if norm is None else norm.eps or 0.0
        if self._kind is Int8Linear:
            rows = rounded(x) if scale is None else rounded_norm(x, scale, eps)
            return product_of(rows, packed_of(linears))  # type: ignore[arg-type]
        if scale is not None:
            x = _rms_norm(x, scale, eps)
        biases = [part._parameters["bias"] for part in linears]
        bias = biases[0] if len(biases) == 1 else None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
        return F.linear(x, linears[0]._parameters["weight"] if whole is None else whole, bias)  # type: ignore[arg-type]

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: KVCache, layer: int) -> Tensor:
        b, _, width = x.shape
        heads, kv_heads, d = self.heads, self.kv_heads, self.head_dim
        many, (qkv, gate_up) = heads + kv_heads, (None, None) if self._fused is None else self._fused[0]
        x = x.view(b, width)
        out = self._product(x, self.attention_norm, self.qkv, qkv)
        both = out.narrow(1, 0, many * d).view(b, 1, many, d)
        if self.q_norm is not None and self.k_norm is not None:
            both = _unscaled(both, self.q_norm.eps or 0.0)
            both.narrow(2, 0, heads).mul_(self.q_norm._parameters["weight"])  # type: ignore[arg-type]
            both.narrow(2, heads, kv_heads).mul_(self.k_norm._parameters["weight"])  # type: ignore[arg-type]
        both = rotate(both, *rope)
        k = both.narrow(2, heads, kv_heads).view(b, kv_heads, d)
        keys, values = cache.write(layer, k, out.narrow(1, many * d, kv_heads * d).view(b, kv_heads, d))
        q = both.narrow(2, 0, heads).view(b, kv_heads, heads // kv_heads, d)
        kernels = self.attention.kernels if self._kind is nn.Linear else None
        attend = kernels.attends(b, "float32", heads, kv_heads, d) if kernels is not None else attention
        y = attend(q, keys, values, mask).view(b, heads * d)
        x = self._product(y, None, self.out, None).add_(x)
        out = self._product(x, self.mlp_norm, self.gate_up, gate_up)
        inner = F.silu(out.narrow(1, 0, self.hidden)).mul_(out.narrow(1, self.hidden, self.hidden))
        return self._product(inner, None, self.down, None).add_(x).view(b, 1, width)
