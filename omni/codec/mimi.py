"""Mimi, the causal speech codec of Moshi: 24 kHz, 12.5 frames/s, decoded as an exact stream without lookahead.

A frame of 1,920 samples (80 ms) is one code of each codebook in the file's order: stream 0 is the semantic codebook, streams
1 and up are the acoustic ones, coarse to fine. kyutai/mimi has 32 codebooks of 2,048 codes and may be used with fewer: the
first 8 are Moshi's (`load_codec("mimi")`), and `mimi-16` and `mimi-32` use more.

Decoding a frame takes 15 ms of both cores of an EPYC (kyutai/mimi's size), half of it for reading the transformer's weights
once; in a batch 10 ms for each of 2 streams, 5.5 of 8, 4.7 of 16. Keys, values and contexts of a stream take 8 MB. Encoding is
about six times faster than real time.

No other package is needed: the network is built from `config.json` and the tensors of `model.safetensors`, as Hugging
Face's `kyutai/mimi` has them, and its tests compare it with transformers' `MimiModel`.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.checkpoint.places import CONFIG, WEIGHTS
from omni.checkpoint.tensors import read_safetensors
from omni.codec.mimi_network import MimiConfig, Take, decoder, encoder, quantizer, read_config
from omni.codec.network import Network, NetworkCodec, Streams
from omni.errors import UserError

CODEBOOKS = 8
"""Number of codebooks of the codec named "mimi": Moshi's."""

ENCODE_FRAMES = 25
"""Frames that are encoded at once, 2 s of sound: memory stays flat, and larger pieces are hardly faster."""


class MimiCodec(NetworkCodec):
    """Mimi behind the `AudioCodec` contract.

    Frames are decoded one at a time, whatever the pushes, so that every split gives the same bits. transformers' `decode`
    agrees to 1e-5 where it stays in [-1, 1]; samples beyond are clipped. `encode` gives the codes of transformers' `encode`
    for sound whose last frame is filled up with silence.
    """

    _together = 16  # much of a frame's time goes to reading the transformer's weights, once for all

    def __init__(self, config: MimiConfig, take: Take, codebooks: int = CODEBOOKS) -> None:
        """Builds the codec, with its first `codebooks` codebooks, from the tensors that `take` gives, on their device.

        Raises UserError for a number of codebooks that the model does not have.
        """
        fewest, most = config.num_semantic_quantizers, config.num_quantizers
        if not fewest <= codebooks <= most:
            raise UserError(f"mimi with {codebooks} codebooks: this model has {most}; ask for {fewest} to {most}")
        self.name = "mimi" if codebooks == CODEBOOKS else f"mimi-{codebooks}"
        self.sample_rate = config.sampling_rate
        self.frame_samples = config.hop * config.latent_stride
        self.codebook_sizes = (config.codebook_size,) * codebooks
        self.config = config
        self._encoder = Network(encoder(config, take), self.frame_samples)
        self._decoder = Network(decoder(config, take), 1)
        self._quantizer = quantizer(config, take, codebooks)
        self.device = self._quantizer[0].tables[0].device

    @classmethod
    def from_folder(cls, folder: str | Path, device: str | torch.device = "cpu", codebooks: int = CODEBOOKS) -> MimiCodec:
        """Reads `config.json` and `model.safetensors`.

        Raises UserError for files that are missing, damaged, of another model, or that do not fit each other.
        """
        folder = Path(folder)
        config = read_config(folder / CONFIG)
        path = folder / WEIGHTS
        tensors = read_safetensors(path)

        def take(name: str, *shape: int) -> Tensor:
            tensor = tensors.pop(name, None)
            if tensor is None or tensor.shape != shape or not tensor.dtype.is_floating_point:
                held = "not there" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise UserError(f"{path}: {name} is {held}; config.json asks for floats {list(shape)}: fetch both again")
            return tensor().to(device, torch.float32)

        codec = cls(config, take, codebooks)
        rest = sorted(name for name in tensors if not name.startswith("quantizer."))  # codebooks may be left out
        if rest:
            raise UserError(f"{path} has a tensor {rest[0]} that its config.json does not ask for: fetch both again")
        return codec

    @classmethod
    def random(cls, seed: int = 0, device: str | torch.device = "cpu", codebooks: int = CODEBOOKS, **config: Any) -> MimiCodec:
        """A codec with random weights: it sounds like noise, but takes the time and memory of a real one.

        `config` are fields of `MimiConfig`. The global random state is not changed.
        """
        generator = torch.Generator().manual_seed(seed)
        return cls(MimiConfig(**config), functools.partial(_random, generator, torch.device(device)), codebooks)

    def latents(self, codes: Tensor) -> Tensor:
        rows = codes.transpose(0, 1).flatten(1).split([len(part.tables) for part in self._quantizer])  # [k, N * F] each
        latents = torch.stack([part.decode(own) for part, own in zip(self._quantizer, rows, strict=True)]).sum(0)
        return latents.unflatten(0, (codes.shape[0], -1))

    def _encode(self, audio: Tensor) -> Tensor:
        audio = F.pad(audio, (0, -audio.shape[0] % self.frame_samples))
        streams = Streams(self._encoder, self.device, ENCODE_FRAMES)
        rows = [streams.open()]
        pieces = audio[None, :, None].split(ENCODE_FRAMES * self.frame_samples, dim=1)
        latents = [streams.run(rows, piece, piece.shape[1] // self.frame_samples)[0] for piece in pieces]
        return torch.cat([torch.cat([part.encode(piece) for part in self._quantizer]) for piece in latents], dim=1)


def _random(generator: torch.Generator, device: torch.device, name: str, *shape: int) -> Tensor:
    """A random weight scaled so that signals roughly keep their size."""
    if name.endswith(("norm.weight", "cluster_usage")):
        return torch.ones(shape, dtype=torch.float32, device=device)
    inputs = 1 if name.endswith("embed_sum") else math.prod(shape[1:]) if len(shape) > 1 else 100
    return (torch.randn(shape, generator=generator, dtype=torch.float32) / math.sqrt(inputs)).to(device)
