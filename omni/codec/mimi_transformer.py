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

from omni.codec.streaming import product
from omni.codec.streams import LayerPlace, RowPlan, StreamCall, StreamStep
from omni.model.attention import attention
from omni.model.kv_cache import KVCache


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
    """Causal blocks with a sliding window and rotary positions (the two halves of a head are the coordinates)."""

    blocks: tuple[MimiBlock, ...]
    heads: int
    key_heads: int
    window: int
    eps: float
    inverse_frequencies: Tensor

    def after(self, place: LayerPlace) -> LayerPlace:
        return place

    def step(self, place: LayerPlace, plan: RowPlan) -> StreamStep:
        return _TransformerStep(self, place, plan)


class _TransformerStep:
    """Streams a `Transformer`; its cache has a row per stream."""

    def __init__(self, layer: Transformer, place: LayerPlace, plan: RowPlan) -> None:
        self._layer, self._place = layer, place
        self._chunk = plan.chunk * place.rate
        self._cache = self._make(1)
        plan.stores.append(self)

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        layer = self._layer
        if x.shape[1] == 0:
            return x
        cache = self._cache if len(call.rows) == self._cache.rows else self._cache.select(call.rows)
        positions = call.positions(self._place, x.shape[1])
        mask = cache.begin_forward(positions)
        angles = (positions[..., None].float() * layer.inverse_frequencies).repeat(1, 1, 2)[:, None]  # [N, 1, T, D]
        turn = angles.cos(), angles.sin()
        for number, block in enumerate(layer.blocks):
            y = F.layer_norm(x, x.shape[2:], *block.attention_norm, eps=layer.eps)
            x = x + self._attend(cache, number, y, turn, mask)
            y = F.layer_norm(x, x.shape[2:], *block.mlp_norm, eps=layer.eps)
            x = x + product(F.gelu(product(y, block.up)), block.down)
        return x

    def _attend(self, cache: KVCache, number: int, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        layer, block = self._layer, self._layer.blocks[number]
        heads = product(x, block.qkv, block.qkv_bias).unflatten(2, (layer.heads + 2 * layer.key_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([layer.heads, layer.key_heads, layer.key_heads], dim=1)  # each [N, H, T, D]
        keys, values = cache.update(number, _turned(k, turn), v)
        grouped = layer.heads != layer.key_heads
        y = attention(_turned(q, turn), keys, values, mask, grouped=grouped)
        return product(y.transpose(1, 2).flatten(2), block.out, block.out_bias)

    def resize(self, rows: int, used: int) -> None:
        old, self._cache = self._cache, self._make(rows)
        if used:
            self._cache.take(old, used)

    def clear(self, row: int) -> None:
        self._cache.reset([row])

    def move(self, source: int, target: int) -> None:
        self._cache.copy_row(source, target)

    def _make(self, rows: int) -> KVCache:
        layer = self._layer
        return KVCache(
            len(layer.blocks),
            rows=rows,
            length=2**62,  # unbounded: the window makes the cache a ring
            heads=layer.key_heads,
            head_dim=2 * len(layer.inverse_frequencies),
            window=layer.window,
            chunk=self._chunk,
            device=layer.inverse_frequencies.device,
        )


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
