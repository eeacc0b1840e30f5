"""Loads the model that `ask` and `chat` answer with, and what acts beside it."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple, Protocol

import torch

from infer.device import serving_dtype
from infer.options import DEFAULT_MODEL
from omni.checkpoint.folder import load_codec_of, read_config
from omni.edit.deltas import Edits
from omni.edit.storage import load_edits
from omni.errors import PackageError, UserError
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM


class ModelOptions(Protocol):
    """Options of a command that say which model answers; `infer.options` documents them."""

    @property
    def model(self) -> str | None: ...
    @property
    def codec_folder(self) -> str | None: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def edits(self) -> str | None: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def quantize(self) -> str | None: ...
    @property
    def kernels(self) -> str: ...
    @property
    def chunk_ms(self) -> int | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


class Loaded(NamedTuple):
    """A model, the name of the adapter that answers, and the corrections that act, where there are any."""

    lm: SpeechLM
    adapter: str | None
    edits: Edits | None


def load(options: ModelOptions, device: torch.device, speaks: bool, otherwise: str = "", insists: bool = True) -> Loaded:
    """Load the model of the options.

    Args:
        speaks: whether answers are to be heard.
        otherwise: what else can be done where they cannot be, for the error.
        insists: refuse a model whose codec's package is not installed, where answers are to be heard; else a line says so.

    Raises:
        UserError: no model, adapter or corrections that fit, or no weights of the codec where it is to be heard.
    """
    folder = DEFAULT_MODEL if options.model is None else options.model
    dtype = serving_dtype(options.dtype, device, folder)
    lm = SpeechLM.from_pretrained(
        folder,
        device,
        dtype,
        quantize=options.quantize,
        kernels=options.kernels,
        codec_folder=options.codec_folder,
        chunk_ms=options.chunk_ms,
    )
    missing = missing_package(folder, options.codec_folder) if speaks and lm.codec is None else None
    if missing is not None and insists:
        raise UserError(f"{missing}{otherwise}")
    if missing is not None:
        print(f"answers are text alone: {missing}", file=sys.stderr)
    elif speaks and lm.codec is None:
        raise UserError(
            f"{folder} has no weights of the codec {lm.config.codec!r}, so it cannot be heard; name their folder with "
            f"--codec_folder, {'or ' * (not otherwise)}put them into {folder}/codec{otherwise}"
        )
    adapter = lm.load_adapter(options.adapter) if options.adapter is not None else None
    edits = load_edits(options.edits, lm.model) if options.edits is not None else None
    if dtype == torch.bfloat16 and options.dtype is None:
        print("weights in bfloat16, as this GPU multiplies them; --dtype auto keeps them as stored", file=sys.stderr)
    return Loaded(lm, adapter, edits)


def missing_package(folder: str | os.PathLike[str], codec_folder: str | None) -> PackageError | None:
    """The error about a package that the codec of a model folder needs and that is not installed; None where there is none."""
    try:
        load_codec_of(folder, read_config(folder), codec_folder)
    except PackageError as error:
        return error
    return None


def audio_sampling(options: ModelOptions) -> Sampling:
    """How the audio streams are drawn."""
    return Sampling(options.temperature, options.top_k, options.top_p, options.repetition_penalty)
