"""What has been done, in numbers that add up over blocks and shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Tally:
    """Counts of a preparation or a part of it.

    Attributes:
        items: taken from the source.
        rows: stored.
        broken: items that made no row.
        turns: in those rows.
        spoken_questions, spoken_answers: made by a voice.
        encoded: answers encoded from sound.
        codes_taken: answers whose codes the source had.
        question_seconds, answer_seconds: sound in those rows (of an answer with codes only: its frames).
    """

    items: int = 0
    rows: int = 0
    broken: int = 0
    turns: int = 0
    spoken_questions: int = 0
    spoken_answers: int = 0
    encoded: int = 0
    codes_taken: int = 0
    question_seconds: float = 0.0
    answer_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Sound of both sides."""
        return self.question_seconds + self.answer_seconds

    def add(self, other: Tally) -> None:
        """Count another part in."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def plain(self) -> dict[str, Any]:
        """As it stands in a report."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Tally:
        return cls(**data)
