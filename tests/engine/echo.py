"""A plug-in with codecs of the tests, for processes that load a model with one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecStream
from omni.codec.registry import register_codec
from tests.generate.conftest import LAYOUTS, EchoCodec, EchoStream


@register_codec("echo", sample_rate=100, frame_rate=25, codebook_sizes=LAYOUTS["pad"].codebook_sizes)
def load_echo(folder: Path | None, device: torch.device) -> AudioCodec:
    return EchoCodec(LAYOUTS["pad"].codebook_sizes)


class PortableCodec(EchoCodec):
    """One that listeners decode for themselves."""

    name = "portable"
    lookahead = 0
    portable = True

    def stream(self, seed: int = 0) -> CodecStream:
        return PortableStream(self)


class PortableStream(EchoStream):
    def _push(self, codes: Tensor) -> Tensor:
        return self._sound(codes, torch.zeros_like(codes))

    def _finish(self) -> Tensor:
        return torch.zeros(0)


@register_codec("portable", sample_rate=100, frame_rate=25, codebook_sizes=LAYOUTS["pad"].codebook_sizes)
def load_portable(folder: Path | None, device: torch.device) -> AudioCodec:
    return PortableCodec(LAYOUTS["pad"].codebook_sizes)
