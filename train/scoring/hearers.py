"""Who hears the spoken answers: a Whisper from a file, or pocketsphinx under a small grammar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from omni.audio.io import resample
from omni.errors import UserError
from train.scoring.asr import Hearing
from train.scoring.similarity import Sphinx

RATE = 16000


class Ear(Protocol):
    """Writes down what it hears."""

    name: str

    def hear(self, audio: Tensor, sample_rate: int, language: str) -> str:
        """The words of a recording [S]; "" for silence."""


class WhisperEar:
    """A Whisper (`train.scoring.asr`): OpenAI's .pt file or a Hugging Face folder, greedily; UserError where it is
    none."""

    def __init__(self, weights: Path, device: str = "cpu") -> None:
        if not weights.exists():
            raise UserError(f"the ear {weights} does not exist: name a Whisper's .pt file or folder, or 'sphinx'")
        self._inner = Hearing(weights, device)
        self.name = f"whisper {weights.name}"

    def hear(self, audio: Tensor, sample_rate: int, language: str) -> str:
        """See `Ear`."""
        return self._inner.hear(resample(audio, sample_rate, RATE), language)


class SphinxEar:
    """pocketsphinx with a grammar of the given words (`similarity.Sphinx`); UserError for a word that it cannot pronounce."""

    def __init__(self, words: Sequence[str], longest: int) -> None:
        try:
            self._inner = Sphinx(words, longest)
        except RuntimeError as error:
            raise UserError(f"pocketsphinx refuses --ear_words ({error}): give English words of its dictionary") from error
        self.name = f"pocketsphinx, up to {longest} of {len(set(words))} words"

    def hear(self, audio: Tensor, sample_rate: int, language: str) -> str:
        """See `Ear`."""
        return self._inner.hear(audio, sample_rate)


def open_ear(name: str | None, words: Sequence[str], longest: int, device: str) -> Ear | None:
    """The ear of that name or file; None where nobody listens."""
    if name is None:
        return None
    return SphinxEar(words, longest) if name == "sphinx" else WhisperEar(Path(name), device)


def transcript(ear: Ear, audio: Tensor | None, sample_rate: int, language: str) -> str:
    """What an ear hears of an answer; "" where there is (next to) no sound."""
    if audio is None or audio.numel() < sample_rate // 50 or not bool(audio.abs().max() > 0):
        return ""
    with torch.no_grad():
        return ear.hear(audio.float().cpu(), sample_rate, language)
