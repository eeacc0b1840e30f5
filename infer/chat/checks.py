"""Checks of the options of `chat`, before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from infer.checks import check_model, check_numbers
from infer.options import DEFAULT_MODEL, ChatOptions
from infer.portaudio import load_sounddevice
from omni.errors import UserError
from omni.generate.options import BOUNDS, Bound
from omni.utils.hardware import check_device, check_dtype, check_kernels, check_quantize
from omni.utils.remote import refuse_remote

CHAT = {
    "threshold": Bound(0, 1, "0.5 is the default", whole=False),
    "silence_duration_ms": Bound(0, 60_000, "500 is the default"),
    "padding_ms": Bound(0, 2000, "100 is the default", whole=False),
}
"""Bounds of the chat's own options: the server's."""

EAGERNESS = ("low", "medium", "high", "auto", "silence")

EXTRA = ("av", "onnxruntime", "pydantic", "silero_vad")
"""Modules that the extra `speaker` brings besides `sounddevice`."""


def check_chat(options: ChatOptions) -> None:
    """Checks the options of `chat`. UserError for the first bad option."""
    if not options.list_devices:
        _check_options(options)
    load_sounddevice("chat", " (libportaudio2 on Debian and Ubuntu)")
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'chat needs {", ".join(missing)}; install them: pip install "omni-speech[speaker]"')
    if not options.list_devices:
        check_model(DEFAULT_MODEL if options.model is None else options.model)


def _check_options(options: ChatOptions) -> None:
    check_numbers(options, {**BOUNDS, **CHAT})
    check_device(options.device)
    check_dtype(options.dtype)
    check_quantize(options.quantize, options.device)
    check_kernels(options.kernels)
    if options.push_to_talk and options.headphones:
        raise UserError("--push_to_talk and --headphones were given together, but a key begins questions then; leave one out")
    if options.eagerness not in EAGERNESS:
        raise UserError(f"--eagerness {options.eagerness!r} is unknown; use {', '.join(EAGERNESS)}")
    if options.save is not None:
        check_new_folder(options.save)


def check_new_folder(folder: str) -> None:
    """UserError for a folder that cannot be made, or has something in it."""
    refuse_remote(folder, "folder", write=True)
    place = Path(folder)
    if not folder or (place.exists() and not place.is_dir()):
        raise UserError(f"--save {folder!r} is no folder; name a new one")
    if place.is_dir() and any(place.iterdir()):
        raise UserError(f"--save {folder!r} has files in it; name a new folder")
    if not place.parent.is_dir():
        raise UserError(f"--save {folder!r}: there is no folder {str(place.parent)!r}; make it first")
    if not os.access(place if place.is_dir() else place.parent, os.W_OK):
        raise UserError(f"--save {folder!r} cannot be written; name a folder elsewhere")
