"""A stand-in for a codec whose weights are not available: it checks codes, and encodes and decodes nothing."""

from __future__ import annotations

from torch import Tensor

from omni.codec.base import AudioCodec, CodecStream
from omni.errors import UserError


class CodeChecks(AudioCodec):
    """A codec of which only name and codebook sizes are known."""

    sample_rate = frame_samples = 1

    def __init__(self, name: str, sizes: tuple[int, ...]) -> None:
        self.name, self.codebook_sizes = name, sizes

    def stream(self, seed: int = 0) -> CodecStream:
        raise UserError(f"codec {self.name} has no weights here: give them with --codec_folder")

    def _encode(self, audio: Tensor) -> Tensor:
        raise UserError(f"codec {self.name} has no weights here: give them with --codec_folder")
