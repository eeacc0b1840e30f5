"""A plug-in with the codec of the tests, for a process that loads a model with it."""

from __future__ import annotations

from pathlib import Path

import torch

from omni.codec.base import AudioCodec
from omni.codec.registry import register_codec
from tests.generate.conftest import LAYOUTS, EchoCodec


@register_codec("echo", sample_rate=100, frame_rate=25, codebook_sizes=LAYOUTS["pad"].codebook_sizes)
def load_echo(folder: Path | None, device: torch.device) -> AudioCodec:
    return EchoCodec(LAYOUTS["pad"].codebook_sizes)
