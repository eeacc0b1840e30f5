"""Interface of voices."""

from __future__ import annotations

from typing import Protocol

from train.data.rows.row import Sound


class Voice(Protocol):
    """Turns text into sound: a pure function of its arguments, if the program or callable behind it is one."""

    def say(self, text: str, language: str, seed: int) -> Sound:
        """Speak the text in a language (BCP 47); `seed` chooses among voices. UserError where it cannot be spoken."""

    def speaker(self, language: str, seed: int) -> str:
        """Name of the voice that `say` speaks by for that seed; "" where it is not known."""
