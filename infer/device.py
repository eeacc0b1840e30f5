"""Chooses the number of CPU threads and the number format for a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from omni.checkpoint.folder import stored_dtype
from omni.checkpoint.places import WEIGHTS
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import find_dtype, multiplies_bf16

SMALL_MODEL = 64 << 20
"""Bytes of weights below which one thread is as fast as several: each operation of a step then takes microseconds,
and threads that wait for each other cost more than they save (many times more where other programs want the cores
too)."""


def bytes_of(model: SpeechModel) -> int:
    """Bytes of a model's weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def is_small(folder: str) -> bool:
    """Whether a model folder's weights are those of a small model."""
    weights = Path(folder) / WEIGHTS
    return weights.is_file() and weights.stat().st_size < SMALL_MODEL


def serving_dtype(given: str | None, device: torch.device, folder: str) -> torch.dtype | None:
    """The number format to answer in: what `--dtype` gives (None for `auto`, as stored).

    Without it, bf16 for weights that are stored in fp32, on a GPU that multiplies bf16: there fp32 takes twice the memory and
    no tensor cores. On a CPU, fp32 for a small model that is stored in bf16: many have no bf16, and only fp32 is compiled.
    """
    if given is not None or (device.type == "cuda" and not multiplies_bf16("cuda")):
        return find_dtype(given)
    stored = stored_dtype(folder)
    if device.type == "cuda":
        return torch.bfloat16 if stored == torch.float32 else None
    return torch.float32 if device.type == "cpu" and stored == torch.bfloat16 and is_small(folder) else None


@contextmanager
def cpu_threads(wanted: int | None, model: SpeechModel) -> Iterator[int]:
    """Compute with `wanted` CPU threads, or as many as suit the model; the number from before is restored afterwards."""
    before = torch.get_num_threads()
    count = wanted or (1 if bytes_of(model) < SMALL_MODEL and model.device.type == "cpu" else before)
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
