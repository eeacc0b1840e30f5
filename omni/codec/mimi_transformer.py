"""Streams Mimi's transformer, which keeps the keys and values of its sliding window: a frame takes the same work and memory
however long the stream is.

Network: Defossez and others, "Moshi: a speech-text foundation model for real-time dialogue" (2024), section 3.3, as
transformers' `MimiModel` builds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.codec.streaming import StreamStep
from omni.kv_cache import KVCache


class MimiBlock(NamedTuple):
    """Attention and a GELU MLP, each after a layer norm and with its layer scale folded into its last matrix.

    Matrices are [out, in]; `qkv` has the queries' rows first, then the keys', then the values'. A norm is (gain, offset).
    """

    attention_norm: tuple[Tensor, Tensor]
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: tuple[Tensor, Tensor]
    up: Tensor
    down: Tensor


class Transformer(NamedTuple):
    """Causal blocks with a sliding window and rotary positions (the two halves of a head are the coordinates).

    `chunk` is the largest number of positions of one call.
    """

    blocks: tuple[MimiBlock, ...]
    heads: int
    key_heads: int
    window: int
    chunk: int
    eps: float
    inverse_frequencies: Tensor

    def step(self, seed: int = 0) -> StreamStep:
        return _TransformerStep(self)

    def ready(self, positions: int) -> int:
        return positions


class _TransformerStep:
    """Streams a `Transformer`."""

    def __init__(self, layer: Transformer) -> None:
        self._layer = layer
        self._position = 0
        self._cache = KVCache(
            len(layer.blocks),
            rows=1,
            length=2**62,  # unbounded: the window makes the cache a ring
            heads=layer.key_heads,
            head_dim=2 * len(layer.inverse_frequencies),
            window=layer.window,
            chunk=layer.chunk,
            device=layer.inverse_frequencies.device,
        )

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        layer = self._layer
        positions = torch.arange(self._position, self._position + x.shape[0], device=x.device)
        self._position += x.shape[0]
        mask = self._cache.attend_to(positions[None])
        angles = (positions[:, None].float() * layer.inverse_frequencies).repeat(1, 2)
        turn = angles.cos(), angles.sin()
        for number, block in enumerate(layer.blocks):
            x = x + self._attend(number, F.layer_norm(x, x.shape[1:], *block.attention_norm, eps=layer.eps), turn, mask)
            y = F.layer_norm(x, x.shape[1:], *block.mlp_norm, eps=layer.eps)
            x = x + F.linear(F.gelu(F.linear(y, block.up)), block.down)
        return x

    def _attend(self, number: int, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        layer, block = self._layer, self._layer.blocks[number]
        parts = F.linear(x, block.qkv, block.qkv_bias).unflatten(1, (layer.heads + 2 * layer.key_heads, -1)).transpose(0, 1)
        q, k, v = parts.split([layer.heads, layer.key_heads, layer.key_heads])  # each [H, T, D]
        keys, values = self._cache.update(number, _turned(k, turn)[None], v[None])
        grouped = layer.heads != layer.key_heads
        y = F.scaled_dot_product_attention(_turned(q, turn)[None], keys, values, attn_mask=mask, enable_gqa=grouped)
        return F.linear(y[0].transpose(0, 1).flatten(1), block.out, block.out_bias)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
