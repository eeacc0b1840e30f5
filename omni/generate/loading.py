"""Reads what a `SpeechLM` is made of: a model folder, and adapters beside it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch

from omni.checkpoint.folder import LoadedFolder, load_folder
from omni.checkpoint.places import find_adapter
from omni.cpu import compiled
from omni.cpu.kernels import serve_measured
from omni.errors import UserError
from omni.lora.attach import activate, active_names, attach
from omni.lora.peft import check_base, load_adapter
from omni.lora.weights import base_weight, has_weight
from omni.model.fused import fuse
from omni.model.int8 import prepare
from omni.model.int8_model import is_int8
from omni.model.linears import linears_of
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import check_kernels, check_quantize, find_device, find_dtype

LOG = logging.getLogger(__name__)


def load_model(
    folder: str | os.PathLike[str],
    device: str | int | torch.device,
    dtype: str | torch.dtype | None,
    quantize: str | None,
    codec_folder: str | os.PathLike[str] | None,
    kernels: str,
    chunk_ms: int | None = None,
) -> LoadedFolder:
    """The parts of a model folder, ready to answer; arguments and errors are those of `SpeechLM.from_pretrained`."""
    place, numbers = find_device(device, quantize), find_dtype(dtype)
    check_quantize(quantize, str(place))
    check_kernels(kernels)
    starting = threading.Thread(target=compiled.start)
    if kernels == "measured" and place.type == "cpu":
        starting.start()  # beside the reading, so that the first question does not wait for it
    loaded = load_folder(folder, device=place, dtype=numbers, quantize=quantize, codec_folder=codec_folder, mute=True)
    loaded.model.eval()
    if chunk_ms is not None:
        loaded.model.set_chunk(chunk_ms)
    if kernels == "measured" and place.type == "cpu":
        serve_measured(loaded.model, numbers is None)
        starting.join()
    elif kernels == "measured" and place.type == "cuda":
        fuse(loaded.model.decoder)
    if is_int8(loaded.model):
        prepare()
    return loaded


def load_beside(
    model: SpeechModel, folder: str | os.PathLike[str], name: str | None, own: str | os.PathLike[str] | None = None
) -> str:
    """Attaches an adapter to a model of the folder `own`, and leaves the selection as it was; see `SpeechLM.load_adapter`."""
    folder = find_adapter(folder, own)
    weights, name = load_adapter(folder), name or Path(folder).resolve().name.replace(".", "-")
    whole = [n for n in weights.whole if n not in weights.copies or not has_weight(model, n, weights.whole[n])]
    if whole:
        raise UserError(
            f"adapter {folder} brings {whole[0]} whole, which all sessions share; merge it into a model of its own: "
            "omni-train convert MODEL TARGET --lora ADAPTER"
        )
    linears, selection = linears_of(model), active_names(model)
    if weights.pairs.keys() <= linears.keys():
        check_base(weights, lambda target: base_weight(linears[target]), str(folder))
    pairs = weights.modules()
    for target, pair in pairs.items():
        if target in linears:
            pair.to(model.device, model.decoder.norm.weight.dtype)
    attach(model, pairs, name)
    activate(model, *selection)
    LOG.info("adapter %r of %s is there, for %d linears", name, folder, len(pairs))
    return name
