"""Streams layers exactly, for several streams at once: each layer keeps what it needs of each, and computes nothing twice.

A convolution of span s (its kernel, dilated) and stride r keeps s - r positions. A causal one has all of them before its
input. One that looks `ahead` has outputs that lag by that much, and at the end is fed the zeros with which the whole network
pads:

    in:   0 0 0 | x0 x1 x2 x3 | x4 x5 x6 x7 | 0 0 0         s = 7, r = 1, ahead = 3, two calls of four
    out:        |          y0 | y1 y2 y3 y4 | y5 y6 y7

Lags are constant, so streams of any age pass through a layer in one call: in those that begin, the first outputs are of
positions below 0, y-3 to y-1 here. They are left out where all streams of the call have them, and are otherwise zeroed before
a layer that keeps positions, which must find there what the whole network pads with.

A *layer* holds weights; `layer.step(timing, plan)` makes a *step*, which knows its timing in a network, and which numbers of a
stream are its own (`omni/codec/streams.py` holds them). Tensors are `[N, T, C]`: N streams, T positions, C channels; T may be
0. Positions come before channels: what is kept is then contiguous, and neither transposed nor depthwise convolutions reorder
memory. Matrices are stored [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.codec.streams import LayerTiming, RowPlan, StreamCall, StreamStep

SLICE = 2**18
"""Numbers in one slice of a matrix: slices that fit a core's cache make products with few positions faster."""


class Layer(Protocol):
    """The weights of one layer."""

    def after(self, timing: LayerTiming) -> LayerTiming:
        """The timing of the next layer, if this one has `timing`."""

    def step(self, timing: LayerTiming, plan: RowPlan) -> StreamStep:
        """This layer within a network, with what it keeps reserved in `plan`."""


def run(steps: Sequence[StreamStep], x: Tensor, call: StreamCall) -> Tensor:
    """Passes the next inputs through the steps."""
    for step in steps:
        x = step(x, call)
    return x


def after(layers: Sequence[Layer], timing: LayerTiming) -> LayerTiming:
    """The timing behind the last layer, if the first has `timing`."""
    for layer in layers:
        timing = layer.after(timing)
    return timing


def steps_of(layers: Sequence[Layer], timing: LayerTiming, plan: RowPlan) -> list[StreamStep]:
    """The steps of layers that follow each other."""
    steps = []
    for layer in layers:
        steps.append(layer.step(timing, plan))
        timing = layer.after(timing)
    return steps


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


class Activation(NamedTuple):
    """A function of each position."""

    function: Callable[[Tensor], Tensor]

    def after(self, timing: LayerTiming) -> LayerTiming:
        return timing

    def step(self, timing: LayerTiming, plan: RowPlan) -> StreamStep:
        return self

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        return self.function(x)


class Conv(NamedTuple):
    """A convolution as one matrix product, `weight` [Cout, k * C]; with groups, `weight` [Cout, C / groups, 1, k].

    `bias` is [Cout] or None. With `replicate`, what is before the first input repeats it instead of being zero.
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

    @property
    def inputs(self) -> int:
        """Channels of the input."""
        return self.weight.shape[1] * self.groups if self.groups > 1 else self.weight.shape[1] // self.kernel

    def after(self, timing: LayerTiming) -> LayerTiming:
        return LayerTiming(timing.rate // self.stride, (timing.lag + self.ahead) // self.stride)

    def step(self, timing: LayerTiming, plan: RowPlan) -> StreamStep:
        return _ConvStep(self, timing, plan) if self.span > self.stride else Activation(self.__call__)

    def __call__(self, x: Tensor) -> Tensor:
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


class _ConvStep:
    """Streams a `Conv`."""

    def __init__(self, layer: Conv, timing: LayerTiming, plan: RowPlan) -> None:
        self._layer, self._timing, self._after = layer, timing, layer.after(timing)
        self._own = plan.keep(layer.span - layer.stride, layer.inputs)

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        layer = self._layer
        x = call.joined(self._own, x, self._timing, layer.ahead, layer.replicate)
        count = (x.shape[1] - (layer.span - layer.stride)) // layer.stride
        early = call.early(self._after, count)
        if early == count:
            return x.new_empty(x.shape[0], 0, layer.weight.shape[0])
        return layer(x[:, early * layer.stride :] if early else x)


class Upsample(NamedTuple):
    """A transposed convolution of kernel 2 r and stride r as one matrix product.

    Input t reaches two blocks of r outputs, t and t + 1; so block t is the product of inputs t and t - 1, side by side, with
    a matrix: `weight` [r * Cout, 2 * C] and `bias` [r * Cout]. The first `cut` outputs are left out: a stream lags by them.
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
        matrix = torch.cat([this, previous]).permute(2, 1, 0).flatten(0, 1).contiguous()
        bias = matrix.new_zeros(matrix.shape[0]) if bias is None else bias.repeat(rate)
        return cls(matrix, bias, rate, cut)

    @property
    def inputs(self) -> int:
        """Channels of the input."""
        return self.weight.shape[1] // 2

    def after(self, timing: LayerTiming) -> LayerTiming:
        return LayerTiming(timing.rate * self.rate, timing.lag * self.rate + self.cut)

    def step(self, timing: LayerTiming, plan: RowPlan) -> StreamStep:
        return _UpsampleStep(self, timing, plan)


class _UpsampleStep:
    """Streams an `Upsample`: r outputs an input, of which the last `cut` come with the end."""

    def __init__(self, layer: Upsample, timing: LayerTiming, plan: RowPlan) -> None:
        self._layer, self._timing, self._after = layer, timing, layer.after(timing)
        self._own = plan.keep(1, layer.inputs)

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        weight, bias, rate, cut = self._layer
        x = call.joined(self._own, x, self._timing, ahead=1)
        pairs = torch.cat([x[:, 1:], x[:, :-1]], dim=2)
        y = product(pairs, weight, bias).view(x.shape[0], pairs.shape[1] * rate, bias.numel() // rate)
        if call.last:
            y = y[:, : y.shape[1] - (rate - cut)]
        early = call.early(self._after, y.shape[1])
        return y[:, early:] if early else y


class Residual(NamedTuple):
    """`shortcut(x) + inner(x)`; None as `shortcut` is the identity."""

    inner: tuple[Layer, ...]
    shortcut: Conv | None = None

    def after(self, timing: LayerTiming) -> LayerTiming:
        return after(self.inner, timing)

    def step(self, timing: LayerTiming, plan: RowPlan) -> StreamStep:
        return _ResidualStep(self, timing, plan)


class _ResidualStep:
    """Streams a `Residual`: the shortcut is delayed by the lag of the inner layers."""

    def __init__(self, layer: Residual, timing: LayerTiming, plan: RowPlan) -> None:
        self._inner = steps_of(layer.inner, timing, plan)
        self._shortcut = [] if layer.shortcut is None else [layer.shortcut.step(timing, plan)]
        self._lag = layer.after(timing).lag - timing.lag
        if self._lag:
            channels = next(part.inputs for part in layer.inner if isinstance(part, Conv))
            self._own = plan.keep(self._lag, channels)

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        y = run(self._inner, x, call)
        x = run(self._shortcut, x, call)
        if self._lag:
            x = call.delayed(self._own, x)
        # Outputs that are not there are the first ones, in both.
        return y.add_(x[:, x.shape[1] - y.shape[1] :])
