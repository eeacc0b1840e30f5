"""Compares texts: normalisers, error rates by words or characters, whether answers say the same; compares codes too."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Normaliser = Callable[[str], str]

NO_SPACES = ("zh", "yue", "wuu", "ja", "th", "lo", "my", "km", "bo", "dz")
"""Languages (BCP 47) written without spaces between words: their errors are counted by characters."""


NORMALISERS = {
    "whisper": "openai-whisper's: lower case, no symbols, nothing in brackets; in English also contractions, numbers and "
    "British spelling made alike",
    "basic": "NFKC, case folded, punctuation dropped but for apostrophes within words, single spaces",
}
"""Normalisers by name, described for a report."""


def find_normaliser(name: str, language: str = "en") -> Normaliser:
    """The normaliser of that name for texts in a language."""
    return normalise if name == "basic" else _whisper_normaliser(primary(language) == "en")


@functools.lru_cache
def _whisper_normaliser(english: bool) -> Normaliser:
    from whisper.normalizers import BasicTextNormalizer, EnglishTextNormalizer

    normal = EnglishTextNormalizer() if english else BasicTextNormalizer()
    return lambda text: str(normal(text)).strip()


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


FUNCTION_WORDS = (
    "a an the this that these those it its he she they we you i me my your his her their our there here is are was were be "
    "been being am has have had do does did can could will would may might should of in on at to for from by with as about "
    "and or but so if than then which who what when where how why also very"
)
"""English words that say nothing of a question's answer."""


def says_the_same(question: str, a: str, b: str, normaliser: Normaliser) -> bool:
    """Whether two answers to a question say the same: their first sentences have a token F1 (SQuAD's, Rajpurkar et al. 2016) of
    at least 0.5 over the words that are neither in the question nor function words; where none are left, they are equal."""
    texts = [re.sub(r"^\d+[.)]\s+", "", text.strip()) for text in (a, b)]  # without the number of a list's first item
    sentences = [normaliser(re.split(r"(?<=[.!?])\s|\n", text, maxsplit=1)[0]).split() for text in texts]
    dropped = {*FUNCTION_WORDS.split(), *normaliser(question).split()}
    said, other = (Counter(word for word in words if word not in dropped) for words in sentences)
    if not said and not other:
        return sentences[0] == sentences[1] != []
    return 4 * (said & other).total() >= said.total() + other.total()


def compare_codes(reference: Tensor, codes: Tensor | None) -> tuple[int, int]:
    """Count equal codes and compared codes of two answers [A, F], over their common frames.

    Without common frames, all codes of the reference count as compared.
    """
    frames = 0 if codes is None else min(reference.shape[1], codes.shape[1])
    if codes is None or frames == 0:
        return 0, reference.numel()
    same = reference[:, :frames] == codes[:, :frames].to(reference.device)
    return int(same.sum()), same.numel()
