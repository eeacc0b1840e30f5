"""SNAC, the neural codec of speech and music at several time scales, decoded as an exact stream.

A frame is one code of the coarsest level and the codes of the finer levels within it. The model sees them as
K parallel streams, each code followed by those within it (mini-omni's order). In the 24 kHz model:

    level 0, 12 Hz   c0                                    stream 0
    level 1, 23 Hz   c1a               c1b                 streams 1 and 4
    level 2, 47 Hz   c2a      c2b      c2c      c2d        streams 2, 3 and 5, 6

so a frame of 2,048 samples is [c0, c1a, c2a, c2b, c1b, c2c, c2d]. (Others store c0 c1a c1b c2a c2b c2c c2d.)

The decoder's convolutions have context on both sides. A stream of the 24 kHz model is exact up to 4,757 samples (198 ms)
before the end of its last frame: the last sample of a frame is known at the third frame after it (lookahead 3).

A pushed frame (85 ms of sound) takes 16.5 ms of both cores of an EPYC; in a batch 11.6 for each of 2 streams, 9.7 of 4, 8.5 of
8 or more. The finish takes about as long as two frames.

The package's decoder becomes layers that stream: weight normalisation is folded, and every weight brought into the order of its
matrix product, once; the package does both at every call, which costs more than the arithmetic of a frame. Network: Siuzdak and
others, "SNAC: Multi-Scale Neural Audio Codec" (2024), as the package `snac` 1.2 builds it.

Noise is normal and a function of (seed, layer, position): the same for every split into pushes and on every device. It comes
from a counter-based generator: keys from (seed, layer) hash each position into two 32-bit words, which give one normal number
by the Box-Muller transform. The 32-bit mix is C. Wellons' `lowbias32` (https://nullprogram.com/blog/2018/07/31/). Positions
repeat after 2**32, two days of sound at 24 kHz.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from omni.checkpoint.places import CONFIG
from omni.checkpoint.tensors import read_weights
from omni.codec.network import Layer, LayerTiming, Network, NetworkCodec, StreamCall
from omni.codec.streaming import Activation, Conv, Residual, Upsample
from omni.errors import PackageError, UserError
from omni.files import read_json

SNAC_24KHZ: dict[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
"""The configuration of hubertsiuzdak/snac_24khz."""


class SnacCodec(NetworkCodec):
    """SNAC behind the `AudioCodec` contract; the 24 kHz model: K = 7 streams of 4,096 codes, 11.7 frames/s.

    The decoder's noise is keyed by (seed, layer, position). Frames pass through the network one at a time,
    whatever the pushes, so that every split gives the same bits; the package's own decoder, given the same
    noise, agrees to 1e-5. Encoding is the package's.
    """

    name = "snac"

    def __init__(self, model: Any, device: str | torch.device = "cpu") -> None:
        """Takes over a `SNAC` model of the package: folds its weight norms and replaces its decoder by a streamed one."""
        from snac.layers import DecoderBlock

        for module in list(model.modules()):
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        self._model = model.eval().requires_grad_(False).to(device, torch.float32)
        groups = [stage.block if isinstance(stage, DecoderBlock) else [stage] for stage in self._model.decoder.model]
        layers = [_layer(module, number) for number, module in enumerate(itertools.chain(*groups))]
        self.strides: tuple[int, ...] = tuple(self._model.vq_strides)
        self._decoder = Network(layers, self.strides[0])
        del self._model.decoder
        self.device = torch.device(device)
        self.sample_rate = int(self._model.sampling_rate)
        self.frame_samples = int(self._model.hop_length) * self.strides[0]
        self.codebook_sizes = (int(self._model.codebook_size),) * len(stream_levels(self.strides))
        # The lag is constant, so the first frame gives it for all.
        self.lookahead = next(n for n in itertools.count() if self.exact_samples(1 + n) >= self.frame_samples)

    @classmethod
    def from_folder(cls, folder: str | Path, device: str | torch.device = "cpu") -> SnacCodec:
        """Reads `config.json` and `model.safetensors` or `pytorch_model.bin` (as tensors: nothing is run).

        Raises UserError for files that are missing, damaged, or do not fit each other.
        """
        folder = Path(folder)
        model = _build(read_json(folder / CONFIG, "give the codec's folder, fetched again"))
        weights = {name: tensor() for name, tensor in read_weights(folder).items()}
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UserError(f"the weights in {folder} do not fit its config.json: {reason}") from error
        return cls(model, device)

    @classmethod
    def random(cls, seed: int = 0, device: str | torch.device = "cpu", **config: Any) -> SnacCodec:
        """A codec with random weights: it sounds like noise, but takes the time and memory of a real one.

        `config` overrides entries of `SNAC_24KHZ`. The global random state is not changed.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(_build({**SNAC_24KHZ, **config}), device)

    def latents(self, codes: Tensor) -> Tensor:
        z = torch.zeros(1, dtype=torch.float32, device=self.device)
        for quantizer, level in zip(self._model.quantizer.quantizers, to_levels(codes, self.strides), strict=True):
            projection = quantizer.out_proj
            part = F.linear(quantizer.codebook(level), projection.weight[:, :, 0], projection.bias)
            z = z + part.repeat_interleave(quantizer.stride, dim=1)
        return z

    def _encode(self, audio: Tensor) -> Tensor:
        levels = self._model.encode(audio[None, None])
        return from_levels([level[0] for level in levels], self.strides)


def stream_levels(strides: Sequence[int]) -> tuple[int, ...]:
    """The level of each of the K streams, depth first: strides (4, 2, 1) give 0 1 2 2 1 2 2."""

    def walk(level: int) -> list[int]:
        inside = strides[level] // strides[level + 1] if level + 1 < len(strides) else 0
        return [level] + (inside * walk(level + 1) if inside else [])

    return tuple(walk(0))


def to_levels(codes: Tensor, strides: Sequence[int] = (4, 2, 1)) -> list[Tensor]:
    """Splits codes `[..., K, F]` into one sequence per level in order of time: `[..., F]`, `[..., 2 F]` and `[..., 4 F]` for
    (4, 2, 1). No indices go to the codes' device."""
    rows: list[list[Tensor]] = [[] for _ in strides]
    for level, stream in zip(stream_levels(strides), codes.unbind(-2), strict=True):
        rows[level].append(stream)
    return [torch.stack(row, dim=-1).flatten(-2) for row in rows]


def from_levels(levels: Sequence[Tensor], strides: Sequence[int] = (4, 2, 1)) -> Tensor:
    """The inverse of `to_levels`; UserError for sequences that do not make the same whole frames."""
    of_stream = stream_levels(strides)
    per_frame = [of_stream.count(level) for level in range(len(strides))]
    lengths = [level.shape[0] for level in levels]
    frames = lengths[0] if lengths else 0
    if lengths != [frames * count for count in per_frame]:
        raise UserError(f"SNAC levels of lengths {lengths} are not whole frames of {per_frame} codes: cut them to some")
    columns = [iter(level.reshape(frames, count).unbind(1)) for level, count in zip(levels, per_frame, strict=True)]
    return torch.stack([next(columns[level]) for level in of_stream])


def _build(config: dict[str, Any]) -> nn.Module:
    """Builds the package's model of `config`, randomly initialised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.jit.script, which the package uses
        try:
            from snac import SNAC
        except ImportError as error:
            raise PackageError('SNAC needs the package snac: pip install "omni-speech[snac]"') from error
    return SNAC(**config)


def _layer(module: Any, number: int) -> Layer:
    """Converts one of the package's modules to a layer with its weights."""
    from snac.layers import NoiseBlock, ResidualUnit, Snake1d

    if isinstance(module, Snake1d):
        alpha = module.alpha.detach().flatten()
        return Activation(functools.partial(snake, alpha, (alpha + 1e-9).reciprocal()))
    if isinstance(module, ResidualUnit):
        return Residual([_layer(part, number) for part in module.block])
    if isinstance(module, NoiseBlock):
        return Noise(_layer(module.linear, number), number)  # type: ignore[arg-type]
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
        if isinstance(module, nn.ConvTranspose1d):
            return Upsample(weight, bias, cut=math.ceil(module.stride[0] / 2))
        (dilation,), ahead = module.dilation, (module.kernel_size[0] - 1) * module.dilation[0] // 2
        return Conv(weight, bias, dilation=dilation, groups=module.groups, ahead=ahead)
    if isinstance(module, nn.Tanh):
        return Activation(torch.tanh)
    raise UserError(
        f"SNAC with {type(module).__name__} (attn_window_size set) cannot be streamed exactly: "
        "use a model without attention (null), such as the 24 kHz one"
    )


def snake(alpha: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
    """The activation x + sin(alpha x)^2 / alpha of x `[..., C]`; `alpha` and its `inverse` are [C]."""
    y = (x * alpha).sin_().square_()
    return torch.addcmul(x, y, inverse, out=y)


@dataclass(eq=False)
class Noise(Layer):
    """Adds noise in proportion to a projection of the signal, keyed by the layer's `number` and the absolute position."""

    linear: Conv
    number: int

    def place(self, timing: LayerTiming, network: Network) -> LayerTiming:
        self.timing, first = timing, 1 + 4 * len(network.words)
        self.words = slice(first, first + 4)  # of a call's
        network.words.append(functools.partial(noise_key, self.number))
        return timing

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        noise = keyed_noise(call.words[:, self.words], call.positions(self.timing, x.shape[1]))
        return torch.addcmul(x, noise[..., None], self.linear.outputs(x))


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
