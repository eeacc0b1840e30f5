"""What the encoder's alignment head spells: a question's text as ids for the CTC loss, the blank being 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, get_args

from omni.errors import UserError
from omni.text import Tokenizer

AlignmentKind = Literal["none", "letters", "words", "tokens"]

_LETTERS = " 'abcdefghijklmnopqrstuvwxyz"


class Alignment:
    """Ids of a transcript.

    Args:
        kind: `none`: no transcript. `letters`: a to z, space and apostrophe. `words`: the given words. `tokens`: the text
            stream's own.
        words: the vocabulary of `words`; a text with another word has no transcript.
        tokenizer: of the text stream, for `tokens`.

    Attributes:
        size: number of ids, the blank included: what `model.ctc` must be.
    """

    def __init__(self, kind: AlignmentKind, words: Iterable[str] = (), tokenizer: Tokenizer | None = None) -> None:
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

    def ids(self, text: str) -> list[int]:
        """Ids of a text, without blanks; empty where it cannot be spelt."""
        if self.kind == "tokens" and self.tokenizer is not None:
            return [i + 1 for i in self.tokenizer.encode(text)]
        text = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        if self.kind == "words":
            found = [self._ids.get(word, 0) for word in re.findall(r"[\w']+", text)]
            return found if all(found) else []
        if self.kind == "letters":
            return [self._ids[letter] for letter in " ".join(text.split()) if letter in self._ids]
        return []
