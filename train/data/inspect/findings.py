"""Kinds of findings in rows, and a collection of the findings that were made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding: an error makes the data unfit for training, a warning asks for a look at it."""

    severity: Severity
    what: str


KINDS: dict[str, FindingKind] = {
    "unreadable_file": FindingKind("error", "a file that is no Parquet, or of another format"),
    "damaged_pages": FindingKind("error", "rows of a row group whose pages are damaged"),
    "changed_file": FindingKind("error", "a file that is not as its preparation left it"),
    "bad_row": FindingKind("error", "a row that breaks the format: version, turns, types"),
    "escaping_reference": FindingKind("error", "a recording's path leaves the data's folder"),
    "missing_reference": FindingKind("error", "a recording that is not where its path says"),
    "changed_reference": FindingKind("error", "a recording that is not the one that the data was prepared with"),
    "broken_sound": FindingKind("error", "a recording that cannot be decoded"),
    "silent_sound": FindingKind("error", "a recording without any sound"),
    "unknown_task": FindingKind("error", "a task that does not exist"),
    "unfit_row": FindingKind("error", "a turn that lacks what its task needs, or fits no task"),
    "codes_order": FindingKind("error", "codes in an order that their codec does not have"),
    "codes_shape": FindingKind("error", "codes without frames, or of another number of streams"),
    "codes_range": FindingKind("error", "codes that their codec does not have"),
    "codes_length": FindingKind("error", "codes that last longer or shorter than their recording"),
    "word_times": FindingKind("error", "words that end before they start, or outside of their recording"),
    "leaked_audio": FindingKind("error", "a question's recording that is in the other data too"),
    "unknown_codec": FindingKind("warning", "codes of a codec that is not known, so not checked"),
    "mostly_silent": FindingKind("warning", "a recording that is mostly silent"),
    "clipped": FindingKind("warning", "a recording that is clipped"),
    "empty_text": FindingKind("warning", "a recording or codes without their text"),
    "odd_text": FindingKind("warning", "a text with control or replacement characters"),
    "speech_rate": FindingKind("warning", "a text too long or too short for its sound"),
    "duplicate_row": FindingKind("warning", "a row whose texts and sound are those of an earlier row"),
    "duplicate_audio": FindingKind("warning", "a question's recording that an earlier row has"),
    "duplicate_text": FindingKind("warning", "a question and answer in words that an earlier row of this speaker has"),
    "leaked_text": FindingKind("warning", "a question in words that is in the other data too"),
    "leaked_speaker": FindingKind("warning", "a speaker who is in the other data too"),
}
"""Kinds of findings by name."""


@dataclass
class Findings:
    """Counts of findings by kind, and the first few of each.

    Args:
        examples: number of findings of each kind that are kept.
        stream: gets each finding as a line of JSON; None for none.
    """

    examples: int = 5
    stream: TextIO | None = None
    counts: Counter[str] = field(default_factory=Counter)
    shown: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, kind: str, where: str, text: str, count: int = 1) -> None:
        """Add a finding, which counts for `count` rows."""
        severity = KINDS[kind].severity
        self.counts[kind] += count
        kept = self.shown.setdefault(kind, [])
        if len(kept) < self.examples:
            kept.append((where, text))
        if self.stream is not None:
            line = {"kind": kind, "severity": severity, "where": where, "text": text}
            self.stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def of(self, severity: Severity) -> int:
        """Number of findings of a severity."""
        return sum(count for kind, count in self.counts.items() if KINDS[kind].severity == severity)

    def kinds(self) -> Iterator[str]:
        """Kinds with findings, errors first."""
        return (name for name in KINDS if self.counts[name])

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        return {
            name: {
                "severity": KINDS[name].severity,
                "what": KINDS[name].what,
                "count": self.counts[name],
                "examples": [{"where": where, "text": text} for where, text in self.shown[name]],
            }
            for name in self.kinds()
        }
