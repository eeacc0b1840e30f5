"""A plugin for an engine's process: codecs with random weights, under the names of the real ones with `random-` before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omni.codec.registry import CODECS, CodecSpec


def _random(spec: CodecSpec) -> CodecSpec:
    def load(folder: object, device: Any) -> Any:
        codec = spec.load(None, device)
        codec.name = f"random-{spec.name}"
        return codec

    return replace(spec, name=f"random-{spec.name}", load=load, weights="", kind="")


for _spec in [CODECS.find(name) for name in list(CODECS) if not name.startswith("random-")]:
    if _spec.random:
        CODECS.add(f"random-{_spec.name}", _random(_spec))
