"""Counts the words and the distinct texts of one side of rows, in memory that does not grow with their number."""

from __future__ import annotations

import hashlib
import re
from typing import Any

MOST = 1 << 20
"""Most words, and most texts, that are told apart."""

NAMED = 2000
"""Most distinct words that are listed in a report, such as for `data.words` of a run."""

_WORD = re.compile(r"[\w']+")


class TextCounts:
    """Texts that are not empty, their words, and how many of both are distinct (at most `MOST`). Case is ignored."""

    def __init__(self) -> None:
        self.texts = self.words = 0
        self._texts: set[bytes] = set()
        self._words: set[str] = set()

    def add(self, text: str) -> None:
        """Count a text."""
        found = _WORD.findall(text.lower())
        if not found:
            return
        self.texts, self.words = self.texts + 1, self.words + len(found)
        if len(self._words) < MOST:
            self._words.update(found)
        if len(self._texts) < MOST:
            self._texts.add(hashlib.blake2b(" ".join(found).encode("utf-8", "replace"), digest_size=8).digest())

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        distinct = {"distinct_texts": len(self._texts), "distinct_words": len(self._words)}
        listed = sorted(self._words) if len(self._words) <= NAMED else []
        return {"texts": self.texts, "words": self.words, **distinct, "vocabulary": listed}
