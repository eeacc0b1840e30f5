"""Loads the model that answers and what acts beside it, in a number format and with as many CPU threads as suit it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infer.options import DEFAULT_MODEL, LocalOptions
from omni.audio.io import SAMPLE_RATE
from omni.checkpoint.folder import load_codec_of, read_config, stored_dtype
from omni.checkpoint.places import WEIGHTS
from omni.edit.storage import load_edits
from omni.errors import PackageError, UserError
from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import find_dtype, multiplies_bf16

if TYPE_CHECKING:
    from omni.engine.process import EngineProcess

SMALL_MODEL = 64 << 20
"""Bytes of weights below which one thread is as fast as several: each operation of a step then takes microseconds,
and threads that wait for each other cost more than they save (many times more where other programs want the cores
too)."""


def load(
    options: LocalOptions, device: torch.device, speaks: bool, otherwise: str = "", insists: bool = True
) -> tuple[SpeechLM, dict[str, Any]]:
    """Load the model of the options, and what acts beside it; returns it and keywords of its sessions.

    Args:
        speaks: whether answers are to be heard.
        otherwise: what else can be done where they cannot be, for the error.
        insists: refuse a model whose codec's package is not installed, where answers are to be heard; else a line says so.

    Raises:
        UserError: no model, adapter or corrections that fit, or no weights of the codec where it is to be heard.
    """
    folder = DEFAULT_MODEL if options.model is None else options.model
    dtype = serving_dtype(options.dtype, device, folder)
    lm = SpeechLM.from_pretrained(folder, device, dtype, quantize=options.quantize)
    mute = why_mute(folder) if speaks and lm.codec is None else ""
    if mute and insists:
        raise UserError(f"{mute}{otherwise}")
    if mute:
        print(f"answers are text alone: {mute}", file=sys.stderr)
    elif speaks and lm.codec is None:
        raise UserError(
            f"{folder} has no weights of the codec {lm.config.codec!r}, so it cannot be heard; put them into "
            f"{folder}/codec{otherwise}"
        )
    names = ("sampling", "seed", "max_seconds", "max_silence", "text_assist", "context", "system")
    keywords: dict[str, Any] = {name: getattr(options, name) for name in names}
    keywords["adapter"] = lm.load_adapter(options.adapter) if options.adapter is not None else None
    keywords["edits"] = load_edits(options.edits, lm.model) if options.edits is not None else None
    if dtype == torch.bfloat16 and options.dtype is None:
        print("weights in bfloat16, as this GPU multiplies them; --dtype auto keeps them as stored", file=sys.stderr)
    return lm, {**keywords, "overflow": "forget"}


def why_mute(folder: str | os.PathLike[str]) -> str:
    """Why a model folder answers without sound: it was not taught to speak, or a package of its codec is not installed."""
    config = read_config(folder)
    try:
        load_codec_of(folder, config)
    except PackageError as error:
        return str(error)
    return f"{folder} was not taught to speak" if config.codec == "none" else ""


def bytes_of(model: SpeechModel) -> int:
    """Bytes of a model's weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def is_small(folder: str) -> bool:
    """Whether a model folder's weights are those of a small model."""
    weights = Path(folder) / WEIGHTS
    return weights.is_file() and weights.stat().st_size < SMALL_MODEL


def serving_dtype(name: str | None, device: torch.device, folder: str) -> torch.dtype | None:
    """The number format to answer in: what `--dtype` gives (None for `auto`, as stored).

    Without it, bf16 for weights that are stored in fp32, on a GPU that multiplies bf16: there fp32 takes twice the memory and
    no tensor cores. On a CPU, fp32 for a small model that is stored in bf16: many have no bf16, and only fp32 is compiled.
    """
    if name is not None or (device.type == "cuda" and not multiplies_bf16("cuda")):
        return find_dtype(name)
    stored = stored_dtype(folder)
    if device.type == "cuda":
        return torch.bfloat16 if stored == torch.float32 else None
    return torch.float32 if device.type == "cpu" and stored == torch.bfloat16 and is_small(folder) else None


def warm_up(lm: SpeechLM | EngineProcess) -> None:
    """Answer once, so that the first person does not wait for what is compiled or packed with the first question."""
    noise = 0.1 * torch.randn(SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    with lm.session(max_seconds=0.5, max_tokens=8, pace="whole") as session:
        session.ask(noise, "A1T2" if lm.codec is None else "A1A2").answer()


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
