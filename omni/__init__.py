"""Speech language models that hear and talk. `from omni import SpeechLM` is the Python door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni.errors import SoundWarning, UserError
    from omni.generate.results import Answer, AudioChunk, Ended, TextDelta, Timings
    from omni.generate.sampling import Sampling
    from omni.generate.session import Session
    from omni.generate.speech_lm import SpeechLM

_PLACES = {
    "Answer": "omni.generate.results",
    "AudioChunk": "omni.generate.results",
    "Ended": "omni.generate.results",
    "Sampling": "omni.generate.sampling",
    "Session": "omni.generate.session",
    "SoundWarning": "omni.errors",
    "SpeechLM": "omni.generate.speech_lm",
    "TextDelta": "omni.generate.results",
    "Timings": "omni.generate.results",
    "UserError": "omni.errors",
}

__all__ = [
    "Answer", "AudioChunk", "Ended", "Sampling", "Session", "SoundWarning", "SpeechLM", "TextDelta", "Timings", "UserError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `import omni` alone stays quick."""
    if name not in _PLACES:
        raise AttributeError(f"module 'omni' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
