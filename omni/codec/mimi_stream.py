"""Streams Mimi's layers: every layer is causal, keeps its left context, and computes no position twice.

A convolution of kernel k and stride r has k - r positions of context, zeros at the start: each r inputs give one output at
once. A transposed convolution of kernel 2 r keeps one input and gives r outputs for each. A transformer keeps the keys and
values of its sliding window. So a frame takes the same work and memory however long the stream is.

A *layer* holds weights, shared by all streams; `layer.step()` makes a *step*, which holds the contexts of one stream. Tensors
are `[T, C]`, T positions by C channels, T above 0 and a multiple of the strides. Matrices are stored [out, in]: products with
the two positions of one frame read them twice as fast as [in, out]. Network: Defossez and others, "Moshi: a speech-text
foundation model for real-time dialogue" (2024), section 3.3, as transformers' `MimiModel` builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.kv_cache import KVCache

Step = Callable[[Tensor], Tensor]
"""One layer within one stream: maps the next inputs to their outputs."""


class MimiLayer(Protocol):
    """The weights of one layer."""

    def step(self) -> Step:
        """Starts this layer in a new stream."""


def run(steps: Sequence[Step], x: Tensor) -> Tensor:
    """Passes the next inputs through the steps."""
    for step in steps:
        x = step(x)
    return x


class Elu(NamedTuple):
    """The activation between convolutions."""

    def step(self) -> Step:
        return F.elu


class MimiConv(NamedTuple):
    """A causal convolution as one matrix product: `weight` [Cout, k * C], `bias` [Cout] or None.

    With `replicate`, the context before the first input repeats it instead of being zero.
    """

    weight: Tensor
    bias: Tensor | None
    kernel: int
    stride: int
    dilation: int
    replicate: bool

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, stride: int = 1, dilation: int = 1, *, replicate: bool = False
    ) -> MimiConv:
        """Makes the layer from a stored weight [Cout, C, k]."""
        matrix = weight.transpose(1, 2).flatten(1).contiguous()
        return cls(matrix, bias, weight.shape[2], stride, dilation, replicate)

    @property
    def span(self) -> int:
        """Positions that one output sees."""
        return (self.kernel - 1) * self.dilation + 1

    def step(self) -> Step:
        return _ConvStep(self)


class _ConvStep:
    """Streams a `MimiConv`."""

    def __init__(self, layer: MimiConv) -> None:
        self._layer = layer
        self._context: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        padding = layer.span - layer.stride
        if self._context is None:
            self._context = x[:1].expand(padding, -1) if layer.replicate else x.new_zeros(padding, x.shape[1])
        if padding:
            x = torch.cat([self._context, x])
            self._context = x[x.shape[0] - padding :].clone()  # a copy: a view would keep all of x alive
        windows = x.unfold(0, layer.span, layer.stride)[:, :, :: layer.dilation]  # [T, C, k]
        return F.linear(windows.transpose(1, 2).flatten(1), layer.weight, layer.bias)


class MimiUpsample(NamedTuple):
    """A causal transposed convolution of kernel 2 r and stride r as one matrix product.

    Input t reaches two blocks of r outputs, t and t + 1; so block t is the product of inputs t and t - 1, side by side, with
    `weight` [r * Cout, 2 * C]; `bias` is [r * Cout] or None.
    """

    weight: Tensor
    bias: Tensor | None
    rate: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, groups: int = 1) -> MimiUpsample:
        """Makes the layer from a stored weight [C, Cout / groups, 2 r]; groups become the blocks of a block-diagonal matrix."""
        rate = weight.shape[2] // 2
        dense = weight.new_zeros(groups, weight.shape[0] // groups, groups, weight.shape[1], 2 * rate)
        every = torch.arange(groups, device=weight.device)
        dense[every, :, every] = weight.unflatten(0, (groups, -1))
        dense = dense.flatten(2, 3).flatten(0, 1)  # [C, Cout, 2 r]
        this, previous = dense[..., :rate], dense[..., rate:]
        matrix = torch.cat([this, previous]).permute(2, 1, 0).flatten(0, 1).contiguous()
        return cls(matrix, None if bias is None else bias.repeat(rate), rate)

    def step(self) -> Step:
        return _UpsampleStep(self)


class _UpsampleStep:
    """Streams an `MimiUpsample`."""

    def __init__(self, layer: MimiUpsample) -> None:
        self._layer = layer
        self._previous = layer.weight.new_zeros(1, layer.weight.shape[1] // 2)

    def __call__(self, x: Tensor) -> Tensor:
        joined = torch.cat([self._previous, x])
        self._previous = x[-1:].clone()
        pairs = torch.cat([joined[1:], joined[:-1]], dim=1)
        return F.linear(pairs, self._layer.weight, self._layer.bias).view(x.shape[0] * self._layer.rate, -1)


class MimiResidual(NamedTuple):
    """`shortcut(x) + inner(x)`; None as `shortcut` is the identity."""

    inner: tuple[MimiLayer, ...]
    shortcut: MimiConv | None

    def step(self) -> Step:
        return _ResidualStep(self)


class _ResidualStep:
    """Streams a `MimiResidual`."""

    def __init__(self, layer: MimiResidual) -> None:
        self._inner = [part.step() for part in layer.inner]
        self._shortcut = [] if layer.shortcut is None else [layer.shortcut.step()]

    def __call__(self, x: Tensor) -> Tensor:
        return run(self._shortcut, x) + run(self._inner, x)


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

    def step(self) -> Step:
        return _TransformerStep(self)


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

    def __call__(self, x: Tensor) -> Tensor:
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
