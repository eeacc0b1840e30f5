"""Compares texts: normalisers, and error rates by words or by characters; compares codes too."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

from omni.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Normaliser = Callable[[str], str]

NO_SPACES = ("zh", "yue", "wuu", "ja", "th", "lo", "my", "km", "bo", "dz")
"""Languages (BCP 47) written without spaces between words: their errors are counted by characters."""


NORMALISERS = {
    "basic": "NFKC, case folded, punctuation dropped but for apostrophes within words, single spaces",
    "whisper-basic": "openai-whisper's BasicTextNormalizer: lower case, no symbols, nothing in brackets, spaces for vowel "
    "signs",
    "whisper-english": "openai-whisper's EnglishTextNormalizer: also contractions, numbers and British spelling made alike",
}
"""Normalisers by name, described for a report."""


@functools.lru_cache
def find_normaliser(name: str) -> Normaliser:
    """The normaliser of that name; UserError where there is none."""
    if name not in NORMALISERS:
        raise UserError(f"normaliser {name!r} is unknown; known: {', '.join(NORMALISERS)}")
    if name == "basic":
        return normalise
    from whisper.normalizers import BasicTextNormalizer, EnglishTextNormalizer

    return BasicTextNormalizer() if name == "whisper-basic" else EnglishTextNormalizer()


def primary(language: str) -> str:
    """`en` of `en-US`."""
    return language.replace("_", "-").split("-")[0].casefold()


def text_errors(reference: str, said: str, language: str) -> tuple[str, int, int]:
    """Count the errors of `said` against `reference`, both normalised: `wer` or `cer`, as the language is counted; the
    errors (substitutions, deletions, insertions; jiwer); words or characters (without spaces) of the reference."""
    if primary(language) in NO_SPACES:
        spread = (" ".join("".join(text.split())) for text in (reference, said))
        return "cer", *word_errors(*spread)
    return "wer", *word_errors(reference, said)


_ALIKE: dict[int, str | None] = {
    **dict.fromkeys((0x2019, 0x02BC), "'"),
    **dict.fromkeys((*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)), None),
}
"""Characters that `normalise` unifies: apostrophes become ', variation selectors, which only choose a glyph, are dropped."""


def normalise(text: str) -> str:
    """Normalise a text for comparison: NFKC, case folded, no punctuation, single spaces (an apostrophe within a word stays).

    Words consist of letters, digits and their combining marks (Unicode's Mn and Mc: vowel signs, accents, tones). Invisible
    characters (Cf, such as joiners and soft hyphens) are dropped, all others separate words.
    """
    out = []
    for character in unicodedata.normalize("NFKC", text).casefold().translate(_ALIKE):
        category = unicodedata.category(character)
        if character.isalnum() or character == "'" or category in ("Mn", "Mc"):
            out.append(character)
        elif category != "Cf":
            out.append(" ")
    # No word starts with an apostrophe or a combining mark.
    words = ("".join(itertools.dropwhile(lambda c: not c.isalnum(), word)).rstrip("'") for word in "".join(out).split())
    return " ".join(filter(None, words))


def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Count substitutions, deletions and insertions together, and the words of the reference."""
    import jiwer

    words = len(reference.split())
    if words == 0:
        return len(hypothesis.split()), 0
    out = jiwer.process_words(reference, hypothesis)
    return out.substitutions + out.deletions + out.insertions, words


def compare_codes(reference: Tensor, codes: Tensor | None) -> tuple[int, int]:
    """Count equal codes and compared codes of two answers [A, F], over their common frames.

    Without common frames, all codes of the reference count as compared.
    """
    frames = 0 if codes is None else min(reference.shape[1], codes.shape[1])
    if codes is None or frames == 0:
        return 0, reference.numel()
    same = reference[:, :frames] == codes[:, :frames].to(reference.device)
    return int(same.sum()), same.numel()
