"""Speaking time of a voice: seconds for each character of a text, by its class.

    letter   an alphabetic character          digit   a digit                       comma   a pause within a sentence
    wide     one of a script without spaces   zero    a 0 after a digit ("2000")    stop    a pause after one
    space    a space without a pause          other   anything else, punctuation itself too

A pause is the space after its punctuation mark, so that the mark at an answer's end brings none; the wide marks, which no space
follows, are pauses themselves. The estimate is kept in a model folder, under `extra` of `config.json`:

    "speech_time": {"version": 1, "seconds": {"letter": 0.0551, "wide": 0.2, ...}}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from omni.errors import UserError

EXTRA = "speech_time"
"""Name of the entry in a model folder's `extra`."""

VERSION = 1

DEFAULT = {
    **{"letter": 0.055, "wide": 0.2, "space": 0.05, "digit": 0.3, "zero": 0.12, "comma": 0.25, "stop": 0.35, "other": 0.04}
}
"""Seconds of each class where nothing was estimated: English at about 15 characters a second."""

PAUSES = ("comma", "stop")

_COMMAS, _STOPS = frozenset(",;:\u2013\u2014"), frozenset(".!?\u2026")
_WIDE_COMMAS, _WIDE_STOPS = frozenset("\uff0c\u3001\uff1b\uff1a"), frozenset("\u3002\uff01\uff1f")
_WIDE = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
_HOLD = 20.0  # ridge weight that pulls a class to its default, at the voice's own pace
_FAR = 5.0  # a row whose error is above this many medians is left out


def is_wide(character: str) -> bool:
    """Whether a character is of a script that is written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese)."""
    code = ord(character)
    return code >= 0x20000 or any(low <= code <= high for low, high in _WIDE)


class CharacterReader:
    """Classifies the characters of a text that is given in any pieces."""

    def __init__(self) -> None:
        self._last = self._mark = ""  # the character before, and the last one that was no space

    def classes(self, text: str) -> list[str]:
        """Classes of the next piece's characters."""
        out = []
        for character in text:
            out.append(self._class(character))
            self._last = character
            self._mark = self._mark if character.isspace() else character
        return out

    def _class(self, character: str) -> str:
        if character.isspace():
            if self._last.isspace():
                return "other"
            return "stop" if self._mark in _STOPS else "comma" if self._mark in _COMMAS else "space"
        if character in _WIDE_STOPS:
            return "stop"
        if character in _WIDE_COMMAS:
            return "comma"
        if character.isdigit():
            return "zero" if character == "0" and self._last.isdigit() else "digit"
        if is_wide(character):
            return "wide"
        return "letter" if character.isalpha() else "other"


@dataclass(frozen=True)
class SpeechTime:
    """Seconds per character of each class."""

    seconds: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT))

    def durations(self, text: str, reader: CharacterReader | None = None) -> list[float]:
        """Seconds of each character of a text, or of the next piece of a text that `reader` classifies."""
        return [self.seconds[kind] for kind in (reader or CharacterReader()).classes(text)]

    def plain(self) -> dict[str, Any]:
        """Plain data for the model folder, rounded to tenths of a millisecond."""
        return {"version": VERSION, "seconds": {name: round(value, 4) for name, value in self.seconds.items()}}

    @classmethod
    def read(cls, extra: Mapping[str, Any], place: str) -> SpeechTime:
        """Read the estimate in a model folder's `extra`, or the default where there is none.

        Raises:
            UserError: the entry is not what `plain` writes; `place` is named.
        """
        if EXTRA not in extra:
            return cls()
        stored = extra[EXTRA]
        try:
            seconds = {name: float(stored["seconds"][name]) for name in DEFAULT}
            good = stored["version"] == VERSION and all(0 <= value < math.inf for value in seconds.values())
        except (TypeError, ValueError, KeyError):
            good = False
        if not good:
            raise UserError(
                f"{place}: extra: {EXTRA} is {repr(stored)[:80]}; it must hold version {VERSION} and the seconds of "
                f"{', '.join(DEFAULT)}; fetch or save the folder again"
            )
        return cls(seconds)


# --- the estimate -----------------------------------------------------------------------------------------------------


def estimate(spoken: Iterable[tuple[str, float]]) -> SpeechTime | None:
    """Estimates speaking time by least squares over answers: texts and the lengths of their sound, in seconds.

    A class that is rare in the answers stays near its default, at the voice's own pace. The constant part of all sounds,
    silence at both ends, is estimated too and not counted as speaking time. Answers that fit much worse than most are left
    out: their text is not the one that is spoken. None where no answer has text and sound.
    """
    rows = [(text, seconds) for text, seconds in spoken if text.strip() and 0 < seconds < math.inf]
    if not rows:
        return None
    found = [Counter(CharacterReader().classes(text.strip())) for text, _ in rows]
    counts = torch.tensor([[1.0, *(one[name] for name in DEFAULT)] for one in found], dtype=torch.float64)
    seconds = torch.tensor([seconds for _, seconds in rows], dtype=torch.float64)
    default = torch.tensor([0.0, *DEFAULT.values()], dtype=torch.float64)
    default *= (seconds.sum() / (counts @ default).sum()).clamp(0.1, 10)
    value = _solve(counts, seconds, default)
    error = (counts @ value - seconds).abs() / seconds.sqrt()
    near = error <= _FAR * error.median().clamp(min=0.01)
    value = _solve(counts[near], seconds[near], default)
    return SpeechTime(dict(zip(DEFAULT, value[1:].clamp(min=0).tolist(), strict=True)))


def _solve(counts: Tensor, seconds: Tensor, default: Tensor) -> Tensor:
    """Ridge regression, weighted: a row's error grows with the root of its length."""
    weighted = counts / seconds[:, None]
    hold = _HOLD * torch.eye(len(default), dtype=torch.float64)
    return torch.linalg.solve(weighted.T @ counts + hold, weighted.T @ seconds + hold @ default)
