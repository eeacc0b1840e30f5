"""A plugin for the engine's process: codecs with random weights, under the names of the real ones with `random-` before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from infer.bench.random_model import RANDOM
from omni.codec.registry import CODECS, CodecSpec

if TYPE_CHECKING:
    import torch

    from omni.codec.base import AudioCodec


def _register(spec: CodecSpec) -> None:
    name, random = RANDOM + spec.name, spec.random
    assert random is not None

    def load(folder: Path | None, device: torch.device) -> AudioCodec:
        codec = random(device)
        codec.name = name
        return codec

    CODECS.add(name, replace(spec, name=name, load=load, weights="", kind=""))


for _spec in [CODECS.find(name) for name in list(CODECS)]:
    if _spec.random is not None and not _spec.name.startswith(RANDOM):
        _register(_spec)
