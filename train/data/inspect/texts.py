"""Counts the words and the distinct texts of one side of rows, in memory: each distinct word, and 8 bytes for each text."""

from __future__ import annotations

import re
from array import array
from typing import Any

import numpy as np

from train.data.inspect.measures import text_digest

NAMED = 2000
"""Most distinct words that are listed in a report, such as for `data.words` of a run."""
_WORD = re.compile(r"[\w']+")


class TextCounts:
    """Texts that are not empty, their words, and how many of both are distinct. Case is ignored."""

    def __init__(self) -> None:
        self.words = 0
        self._texts, self._distinct = array("Q"), set[str]()

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self._texts)

    def add(self, text: str) -> None:
        """Count a text."""
        found = _WORD.findall(text.lower())
        if found:
            self.words += len(found)
            self._distinct.update(found)
            self._texts.append(text_digest(" ".join(found)))

    def merge(self, other: TextCounts) -> None:
        """Count the texts of other rows too."""
        self.words += other.words
        self._distinct |= other._distinct
        self._texts.extend(other._texts)

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        texts = len(np.unique(np.array(self._texts, np.uint64)))
        counts = {"distinct_texts": texts, "distinct_words": len(self._distinct)}
        listed = sorted(self._distinct) if len(self._distinct) <= NAMED else []
        return {"texts": self.texts, "words": self.words, **counts, "vocabulary": listed}
