"""Which device and number format the user means, and how many CPU threads a model wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omni.errors import UserError
from omni.model.speech_model import SpeechModel


def find_device(name: str) -> torch.device:
    """The device of that name (`infer.checks` knows them); `auto` is a GPU where there is one. UserError where this machine
    does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here; use --device cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: there is no such device here; use --device cpu")
    return device


def find_dtype(name: str | None) -> torch.dtype | None:
    """The number format of that name (`infer.checks` knows them), None for None."""
    return None if name is None else getattr(torch, name)


SMALL_MODEL = 64 << 20
"""Bytes of weights below which one thread is as fast as several: each operation of a step then takes microseconds,
and threads that wait for each other cost more than they save (many times more where other programs want the cores
too)."""


def bytes_of(model: SpeechModel) -> int:
    """What the weights take."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@contextmanager
def cpu_threads(wanted: int | None, model: SpeechModel) -> Iterator[int]:
    """Compute with `wanted` CPU threads, or as many as suit the model; the number before is set again afterwards."""
    before = torch.get_num_threads()
    count = wanted or (1 if bytes_of(model) < SMALL_MODEL and model.device.type == "cpu" else before)
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
