"""The optional package `sounddevice`, through which PortAudio is reached."""

from __future__ import annotations

from typing import Any

from omni.errors import UserError


def load_sounddevice(what: str = "--speaker", otherwise: str = ", or use --out answer.wav") -> Any:
    """The `sounddevice` module.

    Args:
        what: what needs it, `otherwise`, what can be done without it: for the error.

    Raises:
        UserError: it or its library is missing; it names the way to get it.
    """
    try:
        import sounddevice
    except ImportError as error:
        raise UserError(f'{what} needs the package sounddevice: pip install "omni-speech[speaker]"') from error
    except OSError as error:
        raise UserError(f"{what} needs the PortAudio library ({error}): install it{otherwise}") from error
    return sounddevice
