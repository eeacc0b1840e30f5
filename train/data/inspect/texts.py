"""Counts the words and the distinct texts of one side of rows, in memory that does not grow with their number."""

from __future__ import annotations

import re
from typing import Any

from train.data.inspect.digests import Distinct
from train.data.inspect.measures import text_digest

NAMED = 2000
"""Most distinct words that are listed in a report, such as for `data.words` of a run."""

_WORD = re.compile(r"[\w']+")


class TextCounts:
    """Texts that are not empty, their words, and how many of both are distinct (see `Distinct`). Case is ignored."""

    def __init__(self) -> None:
        self.texts = self.words = 0
        self._texts, self._words = Distinct(), Distinct()

    def add(self, text: str) -> None:
        """Count a text."""
        found = _WORD.findall(text.lower())
        if not found:
            return
        self.texts, self.words = self.texts + 1, self.words + len(found)
        for word in found:
            self._words.add(word, text_digest)
        self._texts.add(text_digest(" ".join(found)))

    @property
    def estimated(self) -> dict[str, float]:
        """Standard errors, as shares, of those numbers that are no exact ones."""
        errors = {"distinct_texts": self._texts.error, "distinct_words": self._words.error}
        return {name: error for name, error in errors.items() if error}

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        counts = {"distinct_texts": self._texts.count, "distinct_words": self._words.count}
        listed = sorted(self._words.held) if self._words.count <= NAMED else []
        standard_errors = {"standard_errors": self.estimated} if self.estimated else {}
        return {"texts": self.texts, "words": self.words, **counts, **standard_errors, "vocabulary": listed}
