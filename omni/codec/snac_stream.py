"""Streams the layers of SNAC's decoder: each keeps its left context, and no position is computed twice.

A convolution of kernel k and dilation d sees (k - 1) d / 2 positions on each side. As a stream, its outputs lag
by that much, and at the end it is fed the zeros with which the whole decoder pads:

    in:   0 0 0 | x0 x1 x2 x3 | x4 x5 x6 x7 | 0 0 0         k = 7, d = 1, two pushes of four
    out:        |          y0 | y1 y2 y3 y4 | y5 y6 y7

A *layer* holds weights, shared by all streams; `layer.step(seed)` makes a *step*, which holds the contexts of
one stream. Tensors are `[T, C]`, T positions by C channels; T may be 0 everywhere. (Positions first: contexts
are then contiguous, and neither transposed nor depthwise convolutions reorder memory.) Network: Siuzdak and
others, "SNAC: Multi-Scale Neural Audio Codec" (2024), as the package `snac` 1.2 builds it.

Noise is normal and a function of (seed, layer, position): the same for every split into pushes and on every device. It comes
from a counter-based generator: keys from (seed, layer) hash each position into two 32-bit words, which give one normal number
by the Box-Muller transform. The 32-bit mix is C. Wellons' `lowbias32` (https://nullprogram.com/blog/2018/07/31/). Positions
repeat after 2**32, two days of sound at 24 kHz.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class SnacStep(Protocol):
    """One layer within one stream."""

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        """Takes the next inputs `x`; returns the outputs that became exact. `last`: nothing follows, so flush."""

    def ready(self, positions: int) -> int:
        """Number of outputs in all that are exact after `positions` inputs, without a flush (below 0: none)."""


class SnacLayer(Protocol):
    """The weights of one layer."""

    def step(self, seed: int) -> SnacStep:
        """Starts this layer in a new stream; `seed` keys its noise."""


class Pointwise(NamedTuple):
    """A convolution of kernel 1 as a matrix product: `weight` [C, Cout], `bias` [Cout] or None."""

    weight: Tensor
    bias: Tensor | None

    def step(self, seed: int) -> SnacStep:
        return self

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def ready(self, positions: int) -> int:
        return positions


class Snake(NamedTuple):
    """The activation x + sin(alpha x)^2 / alpha; `alpha` and its `inverse` are [C]."""

    alpha: Tensor
    inverse: Tensor

    def step(self, seed: int) -> SnacStep:
        return self

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        return torch.addcmul(x, (x * self.alpha).sin_().square_(), self.inverse)

    def ready(self, positions: int) -> int:
        return positions


class Tanh(NamedTuple):
    """The last activation."""

    def step(self, seed: int) -> SnacStep:
        return self

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        return x.tanh()

    def ready(self, positions: int) -> int:
        return positions


class SnacConv(NamedTuple):
    """A convolution that keeps the length: `weight` [Cout, C / groups, 1, k] with k odd, `bias` [Cout]."""

    weight: Tensor
    bias: Tensor | None
    dilation: int
    groups: int

    @property
    def padding(self) -> int:
        """Zeros on each side, and so the positions by which a stream's output lags."""
        return (self.weight.shape[-1] - 1) * self.dilation // 2

    def step(self, seed: int) -> ConvStep:
        return ConvStep(self)


class ConvStep:
    """Streams a `SnacConv`: outputs lag by its padding."""

    def __init__(self, layer: SnacConv) -> None:
        self._layer = layer
        self._padding = layer.padding
        self._context = layer.weight.new_zeros(self._padding, layer.weight.shape[1] * layer.groups)

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        weight, bias, dilation, groups = self._layer
        x = torch.cat([self._context, x])
        if last:
            x = F.pad(x, (0, 0, 0, self._padding))
        count = x.shape[0] - 2 * self._padding
        if count <= 0:
            self._context = x
            return x.new_empty(0, weight.shape[0])
        self._context = x[count:]
        image = x[None, None].permute(0, 3, 1, 2)  # [1, C, 1, T] in channels-last order, as it is in memory
        return F.conv2d(image, weight, bias, dilation=(1, dilation), groups=groups)[0, :, 0].t()

    def ready(self, positions: int) -> int:
        return positions - self._padding


class SnacResidual(NamedTuple):
    """x + out(after(conv(before(x))))."""

    before: Snake
    conv: SnacConv
    after: Snake
    out: Pointwise

    def step(self, seed: int) -> SnacStep:
        return ResidualStep(self)


class ResidualStep:
    """Streams a `SnacResidual`: its input is delayed by the lag of the convolution."""

    def __init__(self, layer: SnacResidual) -> None:
        self._layer = layer
        self._conv = layer.conv.step(0)
        self._waiting = layer.conv.weight.new_empty(0, layer.conv.weight.shape[0])

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        layer = self._layer
        y = self._conv(layer.before(x), last)
        x = torch.cat([self._waiting, x])
        count = y.shape[0]
        self._waiting = x[count:]
        return layer.out(layer.after(y)).add_(x[:count])

    def ready(self, positions: int) -> int:
        return self._conv.ready(positions)


class SnacUpsample(NamedTuple):
    """A transposed convolution of kernel 2 r and stride r as one matrix product.

    Input t reaches two blocks of r outputs, t and t + 1; so block t is the product of inputs t and t - 1,
    side by side, with a matrix [2 C, r * Cout]. `weight` is that matrix in G slices of columns,
    [G, 2 C, r * Cout / G], and `bias` [G, 1, r * Cout / G]. The first `cut` outputs are left out.
    """

    weight: Tensor
    bias: Tensor
    rate: int
    cut: int

    def step(self, seed: int) -> SnacStep:
        return UpsampleStep(self)


class UpsampleStep:
    """Streams a `SnacUpsample`: r outputs an input, of which the last `cut` come with the flush."""

    def __init__(self, layer: SnacUpsample) -> None:
        self._layer = layer
        self._cut = layer.cut  # outputs that are still to be dropped
        self._previous = layer.weight.new_zeros(1, layer.weight.shape[1] // 2)

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        weight, bias, rate, cut = self._layer
        x = torch.cat([self._previous, x])
        if last:
            x = F.pad(x, (0, 0, 0, 1))
        self._previous = x[-1:]
        pairs = torch.cat([x[1:], x[:-1]], dim=1)
        y = torch.baddbmm(bias, pairs.expand(weight.shape[0], -1, -1), weight)  # [G, T, r * Cout / G]
        outputs = pairs.shape[0] * rate
        y = y.transpose(0, 1).reshape(outputs, weight.shape[0] * weight.shape[2] // rate)
        if last:
            y = y[: outputs - (rate - cut)]
        if outputs and self._cut:
            y, self._cut = y[self._cut :], 0
        return y

    def ready(self, positions: int) -> int:
        return positions * self._layer.rate - self._layer.cut


class Noise(NamedTuple):
    """Adds noise in proportion to a projection of the signal; `number` keys the noise of the layer."""

    linear: Pointwise
    number: int

    def step(self, seed: int) -> SnacStep:
        return NoiseStep(self, seed)


class NoiseStep:
    """Streams a `Noise`: the noise is keyed by absolute position."""

    def __init__(self, layer: Noise, seed: int) -> None:
        self._linear = layer.linear
        self._noise = KeyedNoise(seed, layer.number, layer.linear.weight.device)
        self._position = 0

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        noise = self._noise(self._position, x.shape[0])
        self._position += x.shape[0]
        return torch.addcmul(x, noise[:, None], self._linear(x))

    def ready(self, positions: int) -> int:
        return positions


_WORD = 0xFFFFFFFF


class KeyedNoise:
    """The standard normal noise of one layer."""

    def __init__(self, seed: int, layer: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=16).digest()
        words = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(4)]
        self._keys = torch.tensor(words, dtype=torch.long, device=device).reshape(2, 2, 1)  # [round, draw, 1]

    def __call__(self, start: int, count: int) -> Tensor:
        """Noise `[count]` (float32) of the positions `start` to `start + count - 1`."""
        positions = torch.arange(start, start + count, device=self._keys.device) & _WORD
        draws = mix32(mix32(positions ^ self._keys[0]) ^ self._keys[1])  # [2, count]
        # 24 bits, at the centres of their intervals: never 0, whose logarithm is infinite.
        first, second = ((draws >> 8).to(torch.float32) + 0.5) * 2.0**-24
        return (first.log() * -2).sqrt() * (second * (2 * math.pi)).cos()


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, in which every input bit affects every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
