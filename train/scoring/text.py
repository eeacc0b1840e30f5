"""Texts as they are compared: normalisers, and errors by words or by characters."""

from __future__ import annotations

import functools
from collections.abc import Callable

from omni.errors import UserError
from train.eval.held_out import normalise, word_errors

Normaliser = Callable[[str], str]

NO_SPACES = ("zh", "yue", "wuu", "ja", "th", "lo", "my", "km", "bo", "dz")
"""Languages (BCP 47) whose words are not parted by spaces: their errors are counted by characters."""


def _whisper_basic() -> Normaliser:
    from whisper.normalizers import BasicTextNormalizer

    return BasicTextNormalizer()


def _whisper_english() -> Normaliser:
    from whisper.normalizers import EnglishTextNormalizer

    return EnglishTextNormalizer()


_NORMALISERS: dict[str, tuple[Callable[[], Normaliser], str]] = {
    "basic": (lambda: normalise, "NFKC, case folded, punctuation dropped but for apostrophes within words, single spaces"),
    "whisper-basic": (
        _whisper_basic,
        "openai-whisper's BasicTextNormalizer: lower case, no symbols, nothing in brackets, spaces for vowel signs",
    ),
    "whisper-english": (
        _whisper_english,
        "openai-whisper's EnglishTextNormalizer: also contractions, numbers and British spelling made alike",
    ),
}


@functools.lru_cache
def find_normaliser(name: str) -> Normaliser:
    """The normaliser of that name; UserError where there is none."""
    if name not in _NORMALISERS:
        raise UserError(f"normaliser {name!r} is unknown; known: {', '.join(_NORMALISERS)}")
    return _NORMALISERS[name][0]()


def explain(name: str) -> str:
    """What a normaliser does, for a report."""
    return _NORMALISERS[name][1]


def by_characters(language: str) -> bool:
    """Whether a language is counted by characters."""
    return language.lower().replace("_", "-").split("-")[0] in NO_SPACES


def text_errors(reference: str, said: str, language: str) -> tuple[str, int, int]:
    """Errors of normalised texts.

    Returns:
        `wer` or `cer`, as the language is counted; the errors (substitutions, deletions, insertions; jiwer); words or
        characters (without spaces) of the reference.
    """
    if by_characters(language):
        spread = (" ".join("".join(text.split())) for text in (reference, said))
        return "cer", *word_errors(*spread)
    return "wer", *word_errors(reference, said)
