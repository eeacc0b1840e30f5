"""Streams convolutional layers exactly: each keeps its context, and computes no position twice.

A convolution of span s (its kernel, dilated) and stride r has s - r positions of context. A causal one has all of it before
its input. One that looks `ahead` has outputs that lag by that much, and at the end is fed the zeros with which the whole
network pads:

    in:   0 0 0 | x0 x1 x2 x3 | x4 x5 x6 x7 | 0 0 0         s = 7, r = 1, ahead = 3, two pushes of four
    out:        |          y0 | y1 y2 y3 y4 | y5 y6 y7

A *layer* holds weights, shared by all streams; `layer.step(seed)` makes a *step*, which holds the contexts of one stream.
Tensors are `[T, C]`, T positions by C channels; T may be 0, and is a multiple of the strides. Positions come first: contexts
are then contiguous, and neither transposed nor depthwise convolutions reorder memory. Matrices are stored [out, in]: products
with the few positions of one frame read them twice as fast as [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SLICE = 2**18
"""Numbers in one slice of a matrix: slices that fit a core's cache make products with few positions faster."""


class StreamStep(Protocol):
    """One layer within one stream."""

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        """Takes the next inputs `x`; returns the outputs that became exact. `last`: nothing follows, so flush."""


class Layer(Protocol):
    """The weights of one layer."""

    def step(self, seed: int = 0) -> StreamStep:
        """Starts this layer in a new stream; `seed` keys its noise, where it has some."""

    def ready(self, positions: int) -> int:
        """Number of outputs in all that are exact after `positions` inputs, without a flush (below 0: none)."""


def run(steps: Sequence[StreamStep], x: Tensor, last: bool = False) -> Tensor:
    """Passes the next inputs through the steps."""
    for step in steps:
        x = step(x, last)
    return x


def ready(layers: Sequence[Layer], positions: int) -> int:
    """Number of outputs of the last layer that are exact after `positions` inputs of the first, without a flush."""
    for layer in layers:
        positions = layer.ready(positions)
    return positions


class Activation(NamedTuple):
    """A function of each position."""

    function: Callable[[Tensor], Tensor]

    def step(self, seed: int = 0) -> StreamStep:
        return self

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        return self.function(x)

    def ready(self, positions: int) -> int:
        return positions


class Conv(NamedTuple):
    """A convolution as one matrix product, `weight` [Cout, k * C]; with groups, `weight` [Cout, C / groups, 1, k].

    `bias` is [Cout] or None. With `replicate`, the context before the first input repeats it instead of being zero.
    """

    weight: Tensor
    bias: Tensor | None
    kernel: int
    stride: int
    dilation: int
    groups: int
    ahead: int
    replicate: bool

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        *,
        ahead: int = 0,
        replicate: bool = False,
    ) -> Conv:
        """Makes the layer from a stored weight [Cout, C / groups, k]; with groups, its stride is 1."""
        kernel = weight.shape[2]
        if groups == 1:
            weight = weight.transpose(1, 2).flatten(1).contiguous()
        else:
            weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)
        return cls(weight, bias, kernel, stride, dilation, groups, ahead, replicate)

    @property
    def span(self) -> int:
        """Positions that one output sees."""
        return (self.kernel - 1) * self.dilation + 1

    def step(self, seed: int = 0) -> StreamStep:
        return _ConvStep(self) if self.span > self.stride else self

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        """Outputs of inputs with their context."""
        if self.groups > 1:
            image = x[None, None].permute(0, 3, 1, 2)  # [1, C, 1, T] in channels-last order, as it is in memory
            y = F.conv2d(image, self.weight, self.bias, dilation=(1, self.dilation), groups=self.groups)
            return y[0, :, 0].t()
        if self.kernel > 1:
            x = x.unfold(0, self.span, self.stride)[:, :, :: self.dilation].transpose(1, 2).flatten(1)  # [T, k * C]
        return F.linear(x, self.weight, self.bias)

    def ready(self, positions: int) -> int:
        return (positions - self.ahead) // self.stride


class _ConvStep:
    """Streams a `Conv`."""

    def __init__(self, layer: Conv) -> None:
        self._layer = layer
        self._context: Tensor | None = None

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        layer = self._layer
        if self._context is None:
            before = layer.span - layer.stride - layer.ahead
            self._context = x[:1].expand(before, -1) if layer.replicate else x.new_zeros(before, x.shape[1])
        x = torch.cat([self._context, x])
        if last:
            x = F.pad(x, (0, 0, 0, layer.ahead))
        done = max(0, x.shape[0] - (layer.span - layer.stride))
        self._context = x[done:].clone()  # a copy: a view would keep all of x alive
        return layer(x) if done else x.new_empty(0, layer.weight.shape[0])


class Upsample(NamedTuple):
    """A transposed convolution of kernel 2 r and stride r as one matrix product.

    Input t reaches two blocks of r outputs, t and t + 1; so block t is the product of inputs t and t - 1, side by side, with
    a matrix [r * Cout, 2 * C]. `weight` is that matrix in G slices, [G, r * Cout / G, 2 * C], and `bias` [G, 1, r * Cout / G].
    The first `cut` outputs are left out: a stream lags by them.
    """

    weight: Tensor
    bias: Tensor
    rate: int
    cut: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, groups: int = 1, cut: int = 0) -> Upsample:
        """Makes the layer from a stored weight [C, Cout / groups, 2 r]; groups become the blocks of a block-diagonal matrix."""
        rate = weight.shape[2] // 2
        dense = weight.new_zeros(groups, weight.shape[0] // groups, groups, weight.shape[1], 2 * rate)
        every = torch.arange(groups, device=weight.device)
        dense[every, :, every] = weight.unflatten(0, (groups, -1))
        dense = dense.flatten(2, 3).flatten(0, 1)  # [C, Cout, 2 r]
        this, previous = dense[..., :rate], dense[..., rate:]
        matrix = torch.cat([this, previous]).permute(2, 1, 0).flatten(0, 1)
        slices = 1
        while matrix.numel() // slices > SLICE and matrix.shape[0] % (2 * slices) == 0:
            slices *= 2
        bias = matrix.new_zeros(matrix.shape[0]) if bias is None else bias.repeat(rate)
        return cls(matrix.unflatten(0, (slices, -1)).contiguous(), bias.view(slices, 1, -1), rate, cut)

    def step(self, seed: int = 0) -> StreamStep:
        return _UpsampleStep(self)

    def ready(self, positions: int) -> int:
        return positions * self.rate - self.cut


class _UpsampleStep:
    """Streams an `Upsample`: r outputs an input, of which the last `cut` come with the flush."""

    def __init__(self, layer: Upsample) -> None:
        self._layer = layer
        self._cut = layer.cut  # outputs that are still to be dropped
        self._previous = layer.weight.new_zeros(1, layer.weight.shape[2] // 2)

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        weight, bias, rate, cut = self._layer
        x = torch.cat([self._previous, x])
        if last:
            x = F.pad(x, (0, 0, 0, 1))
        self._previous = x[-1:].clone()
        pairs = torch.cat([x[1:], x[:-1]], dim=1)
        y = torch.baddbmm(bias, pairs.expand(weight.shape[0], -1, -1), weight.transpose(1, 2))  # [G, T, r * Cout / G]
        y = y.transpose(0, 1).reshape(pairs.shape[0] * rate, bias.numel() // rate)
        if last:
            y = y[: y.shape[0] - (rate - cut)]
        if y.shape[0] and self._cut:
            y, self._cut = y[self._cut :], 0
        return y


class Residual(NamedTuple):
    """`shortcut(x) + inner(x)`; None as `shortcut` is the identity."""

    inner: tuple[Layer, ...]
    shortcut: Conv | None = None

    def step(self, seed: int = 0) -> StreamStep:
        return _ResidualStep(self, seed)

    def ready(self, positions: int) -> int:
        return ready(self.inner, positions)


class _ResidualStep:
    """Streams a `Residual`: the shortcut is delayed by the lag of the inner layers."""

    def __init__(self, layer: Residual, seed: int) -> None:
        self._inner = [part.step(seed) for part in layer.inner]
        self._shortcut = [] if layer.shortcut is None else [layer.shortcut.step(seed)]
        self._waiting: Tensor | None = None

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        y = run(self._inner, x, last)
        x = run(self._shortcut, x, last)
        if self._waiting is not None:
            x = torch.cat([self._waiting, x])
        count = y.shape[0]
        self._waiting = x[count:].clone() if count < x.shape[0] else None
        return y.add_(x[:count])
