"""Counts the words and the distinct texts of one side of rows, in memory that does not grow with their number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omni.files import read_json, write_json, writing
from train.data.inspect.digests import Distinct
from train.data.inspect.measures import text_digest
from train.data.inspect.parts import DAMAGED

NAMED = 2000
"""Most distinct words that are listed in a report, such as for `data.words` of a run."""

WORDS = "distinct_words"
"""Name of the number of distinct words in a report."""
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

    def save(self, folder: Path, name: str) -> None:
        """Write all to files of `folder` that begin with `name`, for `join`."""
        held = {kind: sorted(one.held) for kind, one in self._distinct().items()}
        write_json(folder / f"{name}.json", {"texts": self.texts, "words": self.words, **held}, indent=None)
        for kind, one in self._distinct().items():
            if data := one.filter_bytes:
                with writing(folder / f"{name}-{kind}.bloom"):
                    (folder / f"{name}-{kind}.bloom").write_bytes(data)

    def join(self, folder: Path, name: str) -> None:
        """Count what others have saved, too; UserError where it is damaged."""
        saved = read_json(folder / f"{name}.json", DAMAGED)
        self.texts, self.words = self.texts + saved["texts"], self.words + saved["words"]
        for kind, one in self._distinct().items():
            file = folder / f"{name}-{kind}.bloom"
            data = file.read_bytes() if file.exists() else b""
            one.join(set(saved[kind]), data, text_digest if kind == WORDS else int)

    def _distinct(self) -> dict[str, Distinct]:
        return {"distinct_texts": self._texts, WORDS: self._words}

    @property
    def estimated(self) -> dict[str, float]:
        """Standard errors, as shares, of those numbers that are no exact ones."""
        return {name: one.error for name, one in self._distinct().items() if one.error}

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        counts = {name: one.count for name, one in self._distinct().items()}
        listed = sorted(self._words.held) if self._words.count <= NAMED else []
        standard_errors = {"standard_errors": self.estimated} if self.estimated else {}
        return {"texts": self.texts, "words": self.words, **counts, **standard_errors, "vocabulary": listed}
