"""Contract of a speech encoder, second part: its module, for whole sounds and for sound that is still coming.

    encoder(features, lengths, frames)    frames [sum T, D] of a batch of clips, one behind the other
    encoder.encode(sounds)                the same of whole sounds
    encoder.stream()                      of a sound that is still coming: `push` pieces, then `finish`

S samples of 16 kHz sound, N clips, M values of a feature frame, F feature frames, T encoder frames, D width.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from omni.encoder.config import ENCODERS, EncoderConfig, PreparedSound
from omni.errors import UserError
from omni.model.linears import crc_of
from omni.model.recompute import Recompute
from omni.plugins import named


class Encoder(nn.Module):
    """An encoder's module. `checkpointing`: what to compute again in the backward pass, where the encoder can
    (`omni.model.recompute`)."""

    config: EncoderConfig
    checkpointing: Recompute = False

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The equal blocks that are run one after another, as many as `config.layers`."""
        return ()

    def forward(self, features: Tensor, lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
        """Frames [sum(frames), D] of clips, one behind the other; a clip's frames do not depend on the other clips.

        Args:
            features: [N, M, F max], of which each clip has `lengths[n]`; what lies behind them is not read.
            frames: number T of each clip's frames, as `EncoderConfig.clip_frames` counts them.
        """
        raise NotImplementedError

    def run(self, features: Tensor, lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
        """As `forward`; UserError where frames are not of the sizes that the configuration says."""
        with named(f"encoder {self.config.kind!r}"):
            out: Tensor = self(features, lengths, frames)
        wanted, shape = [sum(frames), self.config.width], list(getattr(out, "shape", [type(out).__name__]))
        if shape != wanted:
            raise UserError(f"encoder {self.config.kind!r} made frames {shape}; its configuration counts {wanted}")
        return out

    def hear_whole(self, features: Tensor, lengths: Sequence[int], frames: Sequence[int], padded: bool = False) -> Tensor:
        """Frames [sum(frames), D] as of `forward`, each of which hears all of its clip, whatever the encoder's chunks are.
        UserError: the encoder has no such way to hear. `padded`: and the silence behind it, up to the encoder's window, as
        Whisper was trained."""
        raise UserError(f"encoder {self.config.kind!r} cannot be distilled: its module has no hear_whole")

    @torch.no_grad()
    def encode(self, sounds: Sequence[Tensor | PreparedSound]) -> tuple[Tensor, list[int]]:
        """Frames [sum T, D] of whole sounds [S], all clips in one batch, and the number T of each sound's. UserError: a
        sound is empty, or longer than the encoder takes."""
        every = [sound if isinstance(sound, PreparedSound) else self.config.prepare(sound) for sound in sounds]
        batch, lengths = collate([features for ready in every for features in ready.features])
        frames = [count for ready in every for count in ready.clip_frames]
        return self.run(batch.to(next(self.parameters()).device), lengths, frames), [ready.frames for ready in every]

    def fingerprint(self) -> int:
        """CRC-32 of configuration and weights in bfloat16: the same for an encoder in fp32 and in bfloat16."""
        value = zlib.crc32(repr(self.config).encode())
        for name, tensor in self.state_dict().items():
            value = crc_of(tensor.to(torch.bfloat16), zlib.crc32(name.encode(), value))
        return value

    def stream(self) -> EncoderStream:
        """An encoding of a sound that is still coming."""
        return EncoderStream(self)


class EncoderStream:
    """Encodes a sound piece by piece: the frames of `push` and `finish`, joined, are those of the whole sound.

    This one keeps the pieces and encodes at the end, for encoders whose every frame depends on the whole clip.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.pieces: list[Tensor] = []

    def copy(self) -> EncoderStream:
        """Another stream, which goes on from here by itself."""
        copied = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(copied, name, [*value])
        return copied

    def push(self, audio: Tensor) -> Tensor:
        """Takes the next samples [S]; returns the frames [T, D] that they complete (here none)."""
        self.pieces.append(audio)
        weight = next(self.encoder.parameters())
        return weight.new_zeros(0, self.encoder.config.width)

    def finish(self) -> Tensor:
        """Returns the frames [T, D] that are left when the sound has ended; UserError as of `Encoder.encode`."""
        pieces, self.pieces = self.pieces, []
        return self.encoder.encode([torch.cat(pieces) if pieces else torch.zeros(0)])[0]


E = TypeVar("E", bound=type[Encoder])

_modules: dict[type[EncoderConfig], Callable[[Any], Encoder]] = {}


def register_encoder(config: type[EncoderConfig]) -> Callable[[E], E]:
    """A decorator for an encoder's class, which is built of its configuration alone.

    @register_encoder(MyConfig)  # a frozen dataclass with `kind = "mine"`
    class MyEncoder(Encoder):
        def __init__(self, config: MyConfig) -> None: ...
    """

    def add(module: E) -> E:
        if ENCODERS.get(config.kind) is not config:
            ENCODERS.add(config.kind, config)
        _modules[config] = module
        return module

    return add


def build_encoder(config: EncoderConfig) -> Encoder:
    """The encoder of a configuration, with random weights; UserError where it cannot be made of it."""
    try:
        encoder = _modules[type(config)](config)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"encoder {config.kind!r} cannot be made of {config}: {type(error).__name__}: {error}") from error
    encoder.config = config
    return encoder


def collate(features: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Batches clips [M, F] as [N, M, F max], zeros behind the shorter ones; also returns their lengths F."""
    lengths = [clip.shape[1] for clip in features]
    batch = features[0].new_zeros(len(features), features[0].shape[0], max(lengths))
    for row, clip in zip(batch, features, strict=True):
        row[:, : clip.shape[1]] = clip
    return batch, lengths


def frame_distances(heard: Tensor, taught: Tensor) -> Tensor:
    """|heard - taught|^2 / |taught|^2 of each of T frames [T, D], in fp32: 0 where they are equal, 1 for zeros."""
    heard, taught = heard.float(), taught.float()
    return (heard - taught).square().sum(1) / taught.square().sum(1).clamp_min(1e-6)
