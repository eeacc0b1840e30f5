"""Streams layers exactly, for several streams at once: each layer keeps what it needs of each, and computes nothing twice.

A convolution of span s (its kernel, dilated) and stride r keeps s - r positions. A causal one has all of them before its
input. One that looks `ahead` has outputs that lag by that much, and at the end is fed the zeros with which the whole network
pads:

    in:   0 0 0 | x0 x1 x2 x3 | x4 x5 x6 x7 | 0 0 0         s = 7, r = 1, ahead = 3, two calls of four
    out:        |          y0 | y1 y2 y3 y4 | y5 y6 y7

Lags are constant, so streams of any age pass through a layer in one call: in those that begin, the first outputs are of
positions below 0, y-3 to y-1 here. They are left out where all streams of the call have them, and are otherwise zeroed before
a layer that keeps positions, which must find there what the whole network pads with.

A layer has one place in one network: it knows its timing there, and which numbers of a stream's row are its own
(`omni/codec/network.py` holds them). Tensors are `[N, T, C]`: N streams, T positions, C channels; T may be 0. Positions come
before channels: what is kept is then contiguous, and neither transposed nor depthwise convolutions reorder memory. Matrices are
stored [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.codec.network import Layer, LayerTiming, Network, StreamCall

SLICE = 2**18
"""Numbers in one slice of a matrix: slices that fit a core's cache make products with few positions faster."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x `[..., C]`, in the form that is fastest on a CPU for its number of rows.

    Measured on an EPYC, 2 cores: with 2 rows and 512 x 2048, `F.linear` takes 0.58 ms, `mm(weight, x.T)` 0.21; with 32 rows and
    1024 x 2048, `F.linear` 1.5 and slices of the matrix 1.0.
    """
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or weight.numel() <= SLICE // 2 or rows > 512 or rows == 0:
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    if rows <= 4 and weight.numel() <= 2**21:
        y = torch.mm(weight, flat.t()).t()
        return (y.contiguous() if bias is None else y + bias).unflatten(0, x.shape[:-1])
    slices = 4 if weight.shape[0] % 4 == 0 else 1
    parts = weight.unflatten(0, (slices, -1)).transpose(1, 2)
    wide = flat.expand(slices, -1, -1)
    y = torch.bmm(wide, parts) if bias is None else torch.baddbmm(bias.view(slices, 1, -1), wide, parts)
    return y.transpose(0, 1).reshape(*x.shape[:-1], -1)


@dataclass(eq=False)
class Activation(Layer):
    """A function of each position."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        return self.function(x)


class Conv(Layer):
    """A convolution as one matrix product, `weight` [Cout, k * C]; with groups, `weight` [Cout, C / groups, 1, k].

    Args:
        weight: as it is stored, [Cout, C / groups, k].
        bias: [Cout] or None.
        groups: with more than one the stride is 1.
        replicate: what is before the first input repeats it instead of being zero.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        *,
        ahead: int = 0,
        replicate: bool = False,
    ) -> None:
        self.bias, self.stride, self.dilation, self.groups, self.ahead = bias, stride, dilation, groups, ahead
        self.replicate = replicate
        self.inputs, self.kernel = weight.shape[1] * groups, weight.shape[2]
        self.span = (self.kernel - 1) * dilation + 1  # positions that one output sees
        if groups == 1:
            self.weight = weight.transpose(1, 2).flatten(1).contiguous()
        else:
            self.weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)

    def place(self, timing: LayerTiming, network: Network) -> LayerTiming:
        self.timing = timing
        self.after = LayerTiming(timing.rate // self.stride, (timing.lag + self.ahead) // self.stride)
        if self.span > self.stride:
            self.own = network.keep(self.span - self.stride, self.inputs)
        return self.after

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        if self.span <= self.stride:
            return self.outputs(x)
        x = call.joined(self.own, x, self.timing, self.ahead, self.replicate)
        count = (x.shape[1] - (self.span - self.stride)) // self.stride
        early = call.early(self.after, count)
        if early == count:
            return x.new_empty(x.shape[0], 0, self.weight.shape[0])
        return self.outputs(x[:, early * self.stride :] if early else x)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs `[N, T, Cout]` of inputs `[N, span - stride + T * stride, C]`."""
        if self.groups > 1:
            image = x[:, None].permute(0, 3, 1, 2)  # [N, C, 1, T] in channels-last order, as it is in memory
            y = F.conv2d(image, self.weight, self.bias, dilation=(1, self.dilation), groups=self.groups)
            return y[:, :, 0].transpose(1, 2)
        if self.kernel > 1 and self.weight.shape[0] == 1 and self.stride == self.dilation == 1:
            # One channel: each tap of each position first, then the sum over the taps, which are one position apart.
            taps = F.linear(x, self.weight.view(self.kernel, -1))  # [N, T + k - 1, k]
            count, k = x.shape[1] - self.kernel + 1, self.kernel
            y = taps.as_strided((x.shape[0], count, k), (x.shape[1] * k, k, k + 1)).sum(2, keepdim=True)
            return y if self.bias is None else y.add_(self.bias)
        if self.kernel > 1:
            x = x.unfold(1, self.span, self.stride)[..., :: self.dilation].transpose(2, 3).flatten(2)  # [N, T, k * C]
        return product(x, self.weight, self.bias)


class Upsample(Layer):
    """A transposed convolution of kernel 2 r and stride r as one matrix product.

    Input t reaches two blocks of r outputs, t and t + 1; so block t is the product of inputs t and t - 1, side by side, with
    a matrix: `weight` [r * Cout, 2 * C] and `bias` [r * Cout].

    Args:
        weight: as it is stored, [C, Cout / groups, 2 r]; groups become the blocks of a block-diagonal matrix.
        bias: [Cout] or None.
        cut: how many of the first outputs are left out: a stream lags by them, and the last ones come with its end.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, groups: int = 1, cut: int = 0) -> None:
        self.rate, self.cut, self.inputs = weight.shape[2] // 2, cut, weight.shape[0]
        dense = weight.new_zeros(groups, weight.shape[0] // groups, groups, weight.shape[1], 2 * self.rate)
        every = torch.arange(groups, device=weight.device)
        dense[every, :, every] = weight.unflatten(0, (groups, -1))
        dense = dense.flatten(2, 3).flatten(0, 1)  # [C, Cout, 2 r]
        this, previous = dense[..., : self.rate], dense[..., self.rate :]
        self.weight = torch.cat([this, previous]).permute(2, 1, 0).flatten(0, 1).contiguous()
        self.bias = weight.new_zeros(self.weight.shape[0]) if bias is None else bias.repeat(self.rate)

    def place(self, timing: LayerTiming, network: Network) -> LayerTiming:
        self.timing, self.own = timing, network.keep(1, self.inputs)
        self.after = LayerTiming(timing.rate * self.rate, timing.lag * self.rate + self.cut)
        return self.after

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        x = call.joined(self.own, x, self.timing, ahead=1)
        pairs = torch.cat([x[:, 1:], x[:, :-1]], dim=2)
        y = product(pairs, self.weight, self.bias)
        y = y.reshape(x.shape[0], pairs.shape[1] * self.rate, self.bias.numel() // self.rate)
        if call.last:
            y = y[:, : y.shape[1] - (self.rate - self.cut)]
        early = call.early(self.after, y.shape[1])
        return y[:, early:] if early else y


@dataclass(eq=False)
class Residual(Layer):
    """`shortcut(x) + inner(x)`, the shortcut delayed by the lag of the inner layers; None as `shortcut` is the identity."""

    inner: Sequence[Layer]
    shortcut: Conv | None = None

    def place(self, timing: LayerTiming, network: Network) -> LayerTiming:
        after = network.place(self.inner, timing)
        if self.shortcut is not None:
            self.shortcut.place(timing, network)
        self.timing, self.lag = timing, after.lag - timing.lag
        if self.lag:
            self.own = network.keep(self.lag, next(part.inputs for part in self.inner if isinstance(part, Conv)))
        return after

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        y = x
        for layer in self.inner:
            y = layer(y, call)
        if self.shortcut is not None:
            x = self.shortcut(x, call)
        if self.lag:
            joined = call.joined(self.own, x, self.timing)
            x = joined if call.last else joined[:, : x.shape[1]]
        # Outputs that are not there are the first ones, in both.
        return y.add_(x[:, x.shape[1] - y.shape[1] :])
