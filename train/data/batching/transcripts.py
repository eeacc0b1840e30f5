"""Transcripts for the encoder's alignment head: a question's text as ids for the CTC loss, the blank being 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import get_args

from omni.errors import UserError
from omni.text import Tokenizer
from train.data.config import AlignmentKind
from train.data.tts.espeak import check_voice, phonemes

_LETTERS = " 'abcdefghijklmnopqrstuvwxyz"

_TWO_SIGNS = ("tʃ", "dʒ", "eɪ", "aɪ", "oʊ", "aʊ", "ɔɪ")  # noqa: RUF001
_SOUNDS = {sound: i for i, sound in enumerate((*_TWO_SIGNS, *"pbtdkɡfvθðszʃʒhmnŋlɹjwiɪɛæɑɔʊuʌəɚɜɐᵻɾʔ"), 1)}  # noqa: RUF001
"""Ids of the phonemes of American English in espeak-ng's IPA. A vowel before r is two phonemes."""
_SOUND = re.compile("|".join(_SOUNDS))


class Alignment:
    """Spells transcripts as ids.

    Args:
        kind: `none`: no transcript. `letters`: a to z, space and apostrophe. `words`: the given words. `tokens`: the text
            stream's own.
        words: the vocabulary of `words`; a text with another word has no transcript.
        tokenizer: of the text stream, for `tokens`.
        sounds: spell by the phonemes of English as well, each word as espeak-ng reads it alone. Their ids follow the others',
            in the same list: the objective distinguishes them by their values, which start at `size`.

    Attributes:
        size: number of ids of the first spelling, the blank included: what `model.ctc` must be.
        sound_size: number of ids of the second, its blank included: what `model.ctc_sounds` must be; 0 without it.
    """

    def __init__(
        self, kind: AlignmentKind, words: Iterable[str] = (), tokenizer: Tokenizer | None = None, sounds: bool = False
    ) -> None:
        if kind not in get_args(AlignmentKind):
            raise UserError(f"alignment {kind!r} is unknown; known: {', '.join(get_args(AlignmentKind))}")
        self.kind = kind
        self.tokenizer = tokenizer
        symbols = sorted(set(words)) if kind == "words" else _LETTERS if kind == "letters" else ""
        self._ids = {symbol: i for i, symbol in enumerate(symbols, 1)}
        if kind == "words" and not self._ids:
            raise UserError("alignment 'words' needs the words that questions are made of; name them, or use 'letters'")
        if kind == "tokens":
            if tokenizer is None:
                raise UserError("alignment 'tokens' needs the text stream's tokenizer")
            self.size = 1 + len(tokenizer)
        else:
            self.size = 1 + len(self._ids) if self._ids else 0
        if sounds and kind == "none":
            raise UserError("data.sounds is a second spelling, but data.alignment is none: choose words or letters with it")
        if sounds:
            check_voice("en-us")  # raises where espeak-ng is not installed
        self.sound_size = 1 + len(_SOUNDS) if sounds else 0

    def ids(self, text: str) -> list[int]:
        """Ids of a text in every spelling, without blanks; empty where it cannot be spelt."""
        return [*self._spelt(text), *(self.size + _SOUNDS[sound] for sound in self._heard(text))]

    def _heard(self, text: str) -> list[str]:
        """Phonemes of a text; those that English does not have are left out."""
        if not self.sound_size:
            return []
        words = re.findall(r"[\w']+", text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
        return [sound for word in words for sound in _SOUND.findall(" ".join(phonemes(word)))]

    def _spelt(self, text: str) -> list[int]:
        if self.kind == "tokens" and self.tokenizer is not None:
            return [i + 1 for i in self.tokenizer.encode(text)]
        text = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        if self.kind == "words":
            found = [self._ids.get(word, 0) for word in re.findall(r"[\w']+", text)]
            return found if all(found) else []
        if self.kind == "letters":
            return [self._ids[letter] for letter in " ".join(text.split()) if letter in self._ids]
        return []
