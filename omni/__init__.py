"""Speech language models that hear and talk. `from omni import SpeechLM` is the Python entry point.

The library logs to the logger `omni` (`logging.basicConfig(level="INFO")` shows it) and prints nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni.codec.registry import register_codec
    from omni.encoder.base import register_encoder
    from omni.errors import SoundWarning, UserError
    from omni.generate.history import Message
    from omni.generate.options import Sampling
    from omni.generate.results import Answer, AudioChunk, Ended, TextDelta, Timings
    from omni.generate.session import Session
    from omni.generate.speech_lm import SpeechLM
    from omni.tasks import register_task

_MODULES = {
    "Answer": "omni.generate.results",
    "AudioChunk": "omni.generate.results",
    "Ended": "omni.generate.results",
    "Message": "omni.generate.history",
    "Sampling": "omni.generate.options",
    "Session": "omni.generate.session",
    "SoundWarning": "omni.errors",
    "SpeechLM": "omni.generate.speech_lm",
    "TextDelta": "omni.generate.results",
    "Timings": "omni.generate.results",
    "UserError": "omni.errors",
    "register_codec": "omni.codec.registry",
    "register_encoder": "omni.encoder.base",
    "register_task": "omni.tasks",
}

__all__ = [
    "Answer", "AudioChunk", "Ended", "Message", "Sampling", "Session", "SoundWarning", "SpeechLM", "TextDelta", "Timings",
    "UserError", "register_codec", "register_encoder", "register_task",
]  # fmt: skip

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Imports a public name on first access, so that `import omni` alone stays quick."""
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'omni' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Only the public names, and the attributes that every module has."""
    return sorted([*__all__, "__version__", *(name for name in globals() if name.startswith("__"))])


def _version() -> str:
    """Version of the installed package; `0+unknown` where the code runs without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("omni-speech")
    except PackageNotFoundError:
        return "0+unknown"
