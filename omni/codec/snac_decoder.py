"""Converts the `snac` package's decoder to layers that stream, and adds its noise.

Weight normalisation is folded, and every weight brought into the order of its matrix product, once, when the
codec is loaded; the package does both at every call, which costs more than the arithmetic of a frame. Network: Siuzdak and
others, "SNAC: Multi-Scale Neural Audio Codec" (2024), as the package `snac` 1.2 builds it.

Noise is normal and a function of (seed, layer, position): the same for every split into pushes and on every device. It comes
from a counter-based generator: keys from (seed, layer) hash each position into two 32-bit words, which give one normal number
by the Box-Muller transform. The 32-bit mix is C. Wellons' `lowbias32` (https://nullprogram.com/blog/2018/07/31/). Positions
repeat after 2**32, two days of sound at 24 kHz.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omni.codec.streaming import Activation, Conv, Layer, Residual, Upsample
from omni.codec.streams import LayerPlace, RowPlan, StreamCall, StreamStep
from omni.errors import UserError


def decoder(model: Any) -> list[Layer]:
    """Layers from latents `[N, T, C]` to sound `[N, S, 1]` of a decoder of the package, whose weights they copy or share.

    Raises UserError for a decoder with attention, which mixes windows of frames and has no exact stream.
    """
    return [_layer(module, number) for number, module in enumerate(_flat(model))]


def _flat(model: Any) -> Iterator[nn.Module]:
    """The package's modules in order, with the blocks of the upsampling stages flattened."""
    from snac.layers import DecoderBlock

    for module in model:
        yield from module.block if isinstance(module, DecoderBlock) else [module]


def _layer(module: Any, number: int) -> Layer:
    """Converts one of the package's modules to a layer with its weights."""
    from snac.layers import NoiseBlock, ResidualUnit, Snake1d

    if isinstance(module, Snake1d):
        alpha = module.alpha.detach().flatten()
        return Activation(functools.partial(snake, alpha, (alpha + 1e-9).reciprocal()))
    if isinstance(module, ResidualUnit):
        return Residual(tuple(_layer(part, number) for part in module.block))
    if isinstance(module, NoiseBlock):
        return Noise(_layer(module.linear, number), number)  # type: ignore[arg-type]
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
        if isinstance(module, nn.ConvTranspose1d):
            return Upsample.of(weight, bias, cut=math.ceil(module.stride[0] / 2))
        (dilation,), ahead = module.dilation, (module.kernel_size[0] - 1) * module.dilation[0] // 2
        return Conv.of(weight, bias, dilation=dilation, groups=module.groups, ahead=ahead)
    if isinstance(module, nn.Tanh):
        return Activation(torch.tanh)
    raise UserError(
        f"SNAC with {type(module).__name__} (attn_window_size set) cannot be streamed exactly: "
        "use a model without attention, such as the 24 kHz one"
    )


def snake(alpha: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
    """The activation x + sin(alpha x)^2 / alpha of x `[..., C]`; `alpha` and its `inverse` are [C]."""
    y = (x * alpha).sin_().square_()
    return torch.addcmul(x, y, inverse, out=y)


class Noise(NamedTuple):
    """Adds noise in proportion to a projection of the signal; `number` keys the noise of the layer."""

    linear: Conv
    number: int

    def after(self, place: LayerPlace) -> LayerPlace:
        return place

    def step(self, place: LayerPlace, plan: RowPlan) -> StreamStep:
        return _NoiseStep(self, place, plan)


class _NoiseStep:
    """Streams a `Noise`: the noise is keyed by absolute position."""

    def __init__(self, layer: Noise, place: LayerPlace, plan: RowPlan) -> None:
        self._linear, self._place = layer.linear, place
        self._key = plan.key(functools.partial(noise_key, layer.number))

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        noise = keyed_noise(call.key(self._key), call.positions(self._place, x.shape[1]))
        return torch.addcmul(x, noise[..., None], self._linear(x))


_WORD = 0xFFFFFFFF


def noise_key(layer: int, seed: int) -> list[int]:
    """Four words that key the noise of a layer."""
    digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=16).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(4)]


def keyed_noise(keys: Tensor, positions: Tensor) -> Tensor:
    """Standard normal noise `[N, T]` (float32) of `positions` `[N, T]` under `keys` `[N, 4]`, both int64."""
    rounds = keys.unflatten(1, (2, 2, 1)).unbind(1)  # two of [N, draw, 1]
    draws = mix32(mix32((positions & _WORD)[:, None] ^ rounds[0]) ^ rounds[1])  # [N, 2, T]
    # 24 bits, at the centres of their intervals: never 0, whose logarithm is infinite.
    first, second = ((draws >> 8).to(torch.float32).add_(0.5).mul_(2.0**-24)).unbind(1)
    return (first.log() * -2).sqrt() * (second * (2 * math.pi)).cos()


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, in which every input bit affects every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
