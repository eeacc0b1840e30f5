"""Converts the `snac` package's decoder to the layers of `snac_stream`, and runs it over frames.

Weight normalisation is folded, and every weight brought into the order of its matrix product, once, when the
codec is loaded; the package does both at every call, which costs more than the arithmetic of a frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from omni.codec.snac_stream import Noise, Pointwise, SnacConv, SnacLayer, SnacResidual, SnacStep, SnacUpsample, Snake, Tanh
from omni.errors import UserError

# Numbers in one slice of a matrix: slices that fit a core's cache make products with few positions a third
# faster.
SLICE = 2**18


class SnacDecoder:
    """Streams latents `[T, C]` to sound. Built from a decoder of the package, whose weights it copies or shares.

    Raises UserError for a decoder with attention, which mixes windows of frames and has no exact stream.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._layers = [_layer(module, number) for number, module in enumerate(_flat(decoder.model))]

    def steps(self, seed: int) -> list[SnacStep]:
        """Starts the layers in a new stream; `seed` keys their noise."""
        return [layer.step(seed) for layer in self._layers]

    def ready(self, positions: int) -> int:
        """Number of samples that are exact after `positions` latents in all, without a flush."""
        for step in self.steps(seed=0):
            positions = step.ready(positions)
        return max(0, positions)


def run(steps: list[SnacStep], x: Tensor, last: bool = False) -> Tensor:
    """Passes latents `[T, C]` through the steps; returns the samples `[S]` that became exact."""
    for step in steps:
        x = step(x, last)
    return x[:, 0]


def _flat(model: Any) -> Iterator[nn.Module]:
    """The package's modules in order, with the blocks of the upsampling stages flattened."""
    from snac.layers import DecoderBlock

    for module in model:
        yield from module.block if isinstance(module, DecoderBlock) else [module]


def _layer(module: Any, number: int) -> SnacLayer:
    """Converts one of the package's modules to a layer with its weights."""
    from snac.layers import NoiseBlock, ResidualUnit, Snake1d

    if isinstance(module, Snake1d):
        alpha = module.alpha.detach().flatten()
        return Snake(alpha, (alpha + 1e-9).reciprocal())
    if isinstance(module, ResidualUnit):
        before, conv, after, out = (_layer(part, number) for part in module.block)
        return SnacResidual(before, conv, after, out)  # type: ignore[arg-type]
    if isinstance(module, NoiseBlock):
        return Noise(_layer(module.linear, number), number)  # type: ignore[arg-type]
    if isinstance(module, nn.ConvTranspose1d):
        return _upsample(module)
    if isinstance(module, nn.Conv1d):
        weight = module.weight.detach()
        bias = None if module.bias is None else module.bias.detach()
        if module.kernel_size == (1,):
            return Pointwise(weight[:, :, 0].t().contiguous(), bias)
        weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)
        return SnacConv(weight, bias, module.dilation[0], module.groups)
    if isinstance(module, nn.Tanh):
        return Tanh()
    raise UserError(
        f"SNAC with {type(module).__name__} (attn_window_size set) cannot be streamed exactly: "
        "use a model without attention, such as the 24 kHz one"
    )


def _upsample(module: nn.ConvTranspose1d) -> SnacUpsample:
    rate = module.stride[0]
    weight = module.weight.detach()  # [C, Cout, 2 * rate]
    this, previous = weight[..., :rate], weight[..., rate:]
    columns = torch.cat([this, previous]).transpose(1, 2).flatten(1)  # [2 * C, rate * Cout]
    assert module.bias is not None
    bias = module.bias.detach().repeat(rate)
    slices = 1
    while columns.numel() // slices > SLICE and columns.shape[1] % (2 * slices) == 0:
        slices *= 2
    sliced = columns.unflatten(1, (slices, -1)).transpose(0, 1).contiguous()
    return SnacUpsample(sliced, bias.view(slices, 1, -1), rate, cut=math.ceil(rate / 2))
