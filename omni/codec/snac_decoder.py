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

from omni.codec.streaming import Activation, Conv, Layer, Residual, StreamStep, Upsample
from omni.errors import UserError


def decoder(model: Any) -> list[Layer]:
    """Layers from latents `[T, C]` to sound `[S, 1]` of a decoder of the package, whose weights they copy or share.

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
    """The activation x + sin(alpha x)^2 / alpha of x `[T, C]`; `alpha` and its `inverse` are [C]."""
    return torch.addcmul(x, (x * alpha).sin_().square_(), inverse)


class Noise(NamedTuple):
    """Adds noise in proportion to a projection of the signal; `number` keys the noise of the layer."""

    linear: Conv
    number: int

    def step(self, seed: int = 0) -> StreamStep:
        return _NoiseStep(self, seed)

    def ready(self, positions: int) -> int:
        return positions


class _NoiseStep:
    """Streams a `Noise`: the noise is keyed by absolute position."""

    def __init__(self, layer: Noise, seed: int) -> None:
        self._linear = layer.linear
        self._noise = KeyedNoise(seed, layer.number, layer.linear.weight.device)
        self._position = 0

    def __call__(self, x: Tensor, last: bool = False) -> Tensor:
        noise = self._noise(self._position, x.shape[0])
        self._position += x.shape[0]
        return torch.addcmul(x, noise[:, None], self._linear(x))


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
