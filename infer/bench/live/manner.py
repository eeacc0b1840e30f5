"""How people talk to an engine in `omni-infer bench --sessions`, and what they note."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from omni.audio.io import SAMPLE_RATE

PAUSE = (0.5, 2.0)
"""Seconds between the end of an answer, as it is heard, and the next question; drawn evenly."""

BARGE = (0.25, 0.75)
"""When somebody interrupts: parts of the longest answer, from its first sound; drawn evenly."""


@dataclass
class Heard:
    """What the listeners of a load noted while it was measured. Times in seconds.

    Attributes:
        lateness: of every chunk after an answer's first: when it came, less when it was due; below zero it was early. A
            chunk is due when what came before it has played.
        first_audio: from the end of each question that was asked since to the first sound.
        underruns: chunks that came late; the listener waits for each, and later ones are due later by that.
        questions, answers: asked, and heard to their ends.
        interrupted: answers into which somebody spoke.
        refused: questions that the engine did not take.
        errors: of answers that broke.
    """

    lateness: list[float] = field(default_factory=list)
    first_audio: list[float] = field(default_factory=list)
    underruns: int = 0
    questions: int = 0
    answers: int = 0
    interrupted: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Manner:
    """How people talk.

    Attributes:
        question: the sound that all ask, [S] at 16 kHz.
        answer_seconds: longest answer.
        barge_in: share of answers that are interrupted.
        nonstop: ask again as soon as an answer is written, without speaking in real time, hearing it out, or a pause.
    """

    question: Tensor
    answer_seconds: float
    barge_in: float
    nonstop: bool

    @property
    def speaking(self) -> float:
        """Seconds that a question takes."""
        return 0.0 if self.nonstop else len(self.question) / SAMPLE_RATE

    @property
    def cycle(self) -> float:
        """About the seconds from one question of a session to its next."""
        return self.answer_seconds + (0.0 if self.nonstop else self.speaking + sum(PAUSE) / 2)
