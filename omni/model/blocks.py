"""Transformer blocks of the decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Weights are laid out as in transformers' Llama, Qwen and Mistral (separate q, k and v, rotary halves side by side), so that
an external checkpoint is renamed, never permuted.

Dimensions: B batch, T time, S keys, W width, H heads, G key/value heads, D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni import compiled
from omni.attention import attention
from omni.config import DecoderConfig
from omni.kernels import SMALL, Kernels, StepShape, apply
from omni.kv_cache import Cache, KVCache
from omni.model.int8 import Int8Linear, Normed, exact, few_rows, normed, packed_of, raw_product, together


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
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt() * weight


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
        self._step = _CompiledStep()

    def step_shape(self) -> StepShape | None:
        """What its step is called in measurements (`omni.kernels`); None where it cannot be compiled."""
        return _shape_of(self)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, layer: int) -> Tensor:
        if isinstance(cache, KVCache) and x.shape[1] == 1 and mask is not None and self._step.is_of(self, x, cache):
            return self._step(self, x, rope, mask, cache, layer)
        part, mlp = self.attention, self.mlp
        x = x + part(normed(x, self.attention_norm, part.q, part.k, part.v), rope, mask, cache, layer)
        return x + mlp(normed(x, self.mlp_norm, mlp.gate, mlp.up))


class _CompiledStep:
    """One column of each row through a block on a CPU, compiled (`omni.compiled`), where it measured faster.

    In int8 a block takes one call between two products, and a small one in float32 a single call; the latter's weights of one
    input become views of one tensor, so that what changes them in place changes it.
    """

    def __init__(self) -> None:
        self._parts: tuple[nn.Module | None, ...] = ()
        self._hooks: list[Mapping[int, object]] = []
        self._shape: StepShape | None = None  # None where it cannot be taken
        self._held: tuple[list[int], list[Array]] = [], []  # places of the weights that are read as arrays, and these

    def is_of(self, block: Block, x: Tensor, cache: KVCache) -> bool:
        """Whether a step is taken so: it measured faster, nothing acts beside a part, and all but int8 weights is float32."""
        own = block._modules
        attention, mlp = own["attention"], own["mlp"]
        if getattr(attention, "kernels", None) is None or torch.is_grad_enabled() or x.device.type != "cpu":
            return False  # while autograd records, the cache's `update` refuses to be written
        parts = (*own.values(), *attention._modules.values(), *mlp._modules.values())  # type: ignore[union-attr]
        if parts != self._parts:
            self._parts, self._shape, self._held = parts, _shape_of(block), ([], [])
            there = [part for part in parts if part is not None]
            self._hooks = [hooks for part in there for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        if self._shape is None or not attention.kernels.compiled(self._shape):  # type: ignore[union-attr, operator]
            return False
        if any(self._hooks) or x.dtype != torch.float32 or cache.dtype != torch.float32:
            return False
        return not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")) and self._reads(block)

    def _reads(self, block: Block) -> bool:
        """Whether the weights are read as arrays, as they are now; those of one input become parts of one."""
        part, mlp = block.attention, block.mlp
        norms = [norm for norm in (block.attention_norm, block.mlp_norm, part.q_norm, part.k_norm) if norm is not None]
        groups: list[list[Tensor]] = [[norm.weight] for norm in norms]
        if type(part.q) is nn.Linear:
            groups += [[part.q.weight, part.k.weight, part.v.weight], [part.out.weight]]
            groups += [[mlp.gate.weight, mlp.up.weight], [mlp.down.weight]]
            groups += [[one.bias for one in (part.q, part.k, part.v) if one.bias is not None]]
        places = [weight.data_ptr() for group in groups for weight in group]
        if places == self._held[0]:
            return True
        weights = [weight for group in groups for weight in group]
        if any(type(w) is not nn.Parameter or w.dtype != torch.float32 or w.device.type != "cpu" for w in weights):
            return False
        with torch.inference_mode(False), torch.no_grad():
            arrays = [_as_one(group).numpy() for group in groups if group]
        places = [weight.data_ptr() for weight in weights]
        if part.q_norm is None:
            arrays[2:2] = [_NONE, _NONE]
        self._held = places, arrays  # of this thread: another may do the same at once
        return True

    def __call__(
        self, block: Block, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: KVCache, layer: int
    ) -> Tensor:
        part, mlp, (b, _, width) = block.attention, block.mlp, x.shape
        attention_norm, mlp_norm, q_norm, k_norm, *weights = self._held[1]
        eps = np.float32(block.attention_norm.eps)
        writes, keys, values = (t.numpy() for t in (cache.writes, cache.keys[layer], cache.values[layer]))
        shown, cos, sin = (t.numpy().reshape(b, -1) for t in (mask, *rope))
        out = x.reshape(b, width).clone()
        held = out.numpy()
        if weights:
            qkv, to_width, gate_up, down, *bias = weights
            compiled.block(
                held, writes, cache.ring, shown, cos, sin, eps, attention_norm, qkv, bias[0] if bias else _NONE, q_norm, k_norm,
                to_width, mlp_norm, gate_up, down, keys, values,
            )  # fmt: skip
            return out.view(b, 1, width)
        groups = (part.q, part.k, part.v), (part.out,), (mlp.gate, mlp.up), (mlp.down,)
        packed = [packed_of(group) for group in groups]  # type: ignore[arg-type]
        biases = packed[0].bias
        rows, heads, inner = (few_rows(b, n) for n in (width, part.heads * part.head_dim, mlp.down.in_features))
        factor = np.empty(b, np.float32)
        compiled.add_and_round_norm(held, _NO_ROWS, attention_norm, eps, rows.numpy(), factor)
        qkv = raw_product(rows, packed[0]).numpy()
        compiled.attend_and_round(
            qkv, factor, _NONE if biases is None else biases.numpy(), writes, cache.ring, shown, cos, sin, eps, q_norm, k_norm,
            keys, values, heads.numpy(),
        )  # fmt: skip
        compiled.add_and_round_norm(held, raw_product(heads, packed[1]).numpy(), mlp_norm, eps, rows.numpy(), factor)
        compiled.gate_and_round(raw_product(rows, packed[2]).numpy(), factor, inner.numpy())
        compiled.add(held, raw_product(inner, packed[3]).numpy(), factor)
        return out.view(b, 1, width)


def _shape_of(block: Block) -> StepShape | None:
    """What a block's step is called in measurements; None where it cannot be compiled."""
    part, mlp = block.attention, block.mlp
    if type(part) is not Attention or type(mlp) is not SwiGLU:
        return None
    linears = part.q, part.k, part.v, part.out, mlp.gate, mlp.up, mlp.down
    kinds, norms = {type(one) for one in linears}, {type(one) for one in (part.q_norm, part.k_norm)}
    if norms not in ({RMSNorm}, {type(None)}) or any(one.bias is not None for one in linears[3:]):
        return None
    if len({(part.q.bias is None), (part.k.bias is None), (part.v.bias is None)}) > 1:
        return None
    if kinds == {Int8Linear} and exact():
        numbers = "int8"
    elif kinds == {nn.Linear} and sum(one.weight.numel() for one in linears) <= SMALL:
        numbers = "float32"
    else:
        return None
    return StepShape(numbers, part.q.in_features, part.heads, part.kv_heads, part.head_dim, mlp.down.in_features)


def _as_one(weights: Sequence[Tensor]) -> Tensor:
    """Weights one after another, of which they become views."""
    if len(weights) == 1 and weights[0].is_contiguous():
        return weights[0].detach()
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, view in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = view
    return whole


Array = np.ndarray[Any, Any]
_NONE, _NO_ROWS = np.empty(0, np.float32), np.empty((0, 0), np.float32)
