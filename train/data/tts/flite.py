"""Speech by flite (Black and Lenzo 2001), a program that is started for every text. English only.

Its voices and the program are free (a BSD-like licence of Carnegie Mellon University): `apt install flite`.
"""

from __future__ import annotations

import shutil

from omni.errors import UserError, closest

VOICES = ("kal", "kal16", "awb", "rms", "slt")
"""Voices of flite 2.2 that read any text: `kal` is of 8 kHz, and rms keeps its pitch whatever is asked."""

_RATE = 175
"""Words per minute that count as a voice's own, as for espeak-ng."""


def check_voice(voice: str) -> None:
    """Refuse a voice that flite does not have: it would speak by another one, without a word."""
    if voice not in VOICES:
        raise UserError(f"voice flite:{voice}: flite has no such voice; {closest(voice, VOICES)}")


def check_program() -> None:
    """Refuse to go on without the program (UserError)."""
    if shutil.which("flite") is None:
        raise UserError("voice flite: there is no program flite on the PATH: apt install flite, or take another voice")


def command(voice: str, rate: int = _RATE, pitch: int = 50) -> str:
    """The command line that speaks `{text}` to `{out}`.

    Args:
        rate: words per minute, by stretching all durations.
        pitch: 0 to 100: half an octave down to half an octave up, 50 is the voice's own.
    """
    features = (("duration_stretch", _RATE / rate), ("f0_shift", 2 ** ((pitch - 50) / 100)))
    return " ".join(["flite -voice", voice, *(f"--setf {name}={value:.4f}" for name, value in features), "-t {text} -o {out}"])
