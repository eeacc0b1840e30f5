"""Cuts questions out of the microphone's sound: where voice activity finds them, or between two presses of a key.

    voice activity   ...   | padding | speech   pause   speech | padding |  silence_duration_ms  | ...
                           began      pieces as they come; a pause is given once speech goes on  ended

What lies after a question, and what may become the padding of the next, is kept: every sample is in one question, or in none.

S samples, int16 at `PCM_RATE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from infer.turns.detector import ONSET, TurnDetector
from infer.turns.settings import PCM_RATE, SemanticVad, ServerVad
from infer.turns.turn_end import has_ended
from infer.turns.vad import FRAME_SECONDS, Silero, SpeechStream
from omni.generate.turn_end import TurnFrames

SPARE = 0.5
"""Seconds of the longest question that are left to the model, as the server leaves them."""


@dataclass(frozen=True, eq=False)
class QuestionPart:
    """What was found in the sound.

    Attributes:
        kind: a question began, its next samples, or it ended; `cut`: it ended because it was as long as the model takes;
            `ahead`: samples behind those, which may not belong to it.
        at: sample of the input at which a question begins or ends.
    """

    kind: Literal["began", "sound", "ahead", "ended", "cut"]
    at: int = 0
    samples: np.ndarray | None = None


class HasTurnFrames(Protocol):
    """A question that the model's turn head hears.

    Attributes:
        frames: what the head says of its frames, once it hears it.
    """

    frames: TurnFrames | None


class QuestionFinder(Protocol):
    """Finds questions in sound that comes without end.

    Attributes:
        question: that is under way, for the model's judgement of its end.
    """

    question: HasTurnFrames | None

    def push(self, samples: np.ndarray) -> list[QuestionPart]:
        """Take the next samples [S]."""

    def press(self) -> list[QuestionPart]:
        """The key was pressed."""

    def drop(self) -> None:
        """Leave the question under way where it is: what follows belongs to none."""

    def pass_over(self, samples: np.ndarray) -> None:
        """Take samples [S] that nobody is to hear: no question has them, and none goes on across them."""


class VoiceQuestions:
    """Questions where voice activity finds them, by the detector of the server.

    Args:
        model: judges frames of sound.
        settings: threshold and silence, or the eagerness with which the model's turn head ends questions.
        padding: seconds of sound before speech, and after it, that a question has.
        longest: seconds of the longest question.
    """

    def __init__(self, model: Silero, settings: ServerVad | SemanticVad, padding: float, longest: float) -> None:
        self.question: HasTurnFrames | None = None
        self._model, self._settings, self._padding = model, settings, _samples(padding)
        self._longest = round(max(longest - SPARE, longest / 2) * PCM_RATE)
        self._sound = np.zeros(0, np.int16)
        self._start = 0  # sample of the input that is the first of `_sound`
        self._free = 0  # first sample that no question has
        self._began = self._ahead = 0  # of the question under way: its first sample, and the end of what was given ahead
        self._restart()

    def _restart(self) -> None:
        self._stream, self._detector = SpeechStream(), TurnDetector(self._settings, self._end / PCM_RATE)

    @property
    def _end(self) -> int:
        return self._start + len(self._sound)

    def push(self, samples: np.ndarray) -> list[QuestionPart]:
        self._sound = np.concatenate([self._sound, samples])
        parts: list[QuestionPart] = []
        for probability in self._model.push(self._stream, samples):
            self._judge(probability, parts)
        if not self._detector.speaking:
            kept = _samples(self._detector.now - (ONSET + 1) * FRAME_SECONDS) - self._padding
            self._forget(max(kept, self._free))
        return parts

    def _judge(self, probability: float, parts: list[QuestionPart]) -> None:
        detector, semantic = self._detector, isinstance(self._settings, SemanticVad)
        events = detector.push(probability, False, self._said())
        for event in events:
            if event.kind == "began":
                self._began = self._ahead = max(_samples(event.at) - self._padding, self._free, self._start)
                self.question = None
                self._forget(self._began)
                parts.append(QuestionPart("began", self._began))
        now, ended = _samples(detector.now), any(event.kind == "ended" for event in events)
        if not (detector.speaking or ended):
            return
        cut = not ended and now - self._began >= self._longest
        until = now if cut else min(_samples(detector.voiced) + self._padding, now)
        if until > self._start:
            parts.append(QuestionPart("sound", samples=self._sound[: until - self._start]))
            self._forget(until)
        if cut:
            detector.stop()
        if cut or ended:
            self._free = until
            parts.append(QuestionPart("cut" if cut else "ended", until))
        elif semantic and now > (ahead := max(self._ahead, self._start)):
            parts.append(QuestionPart("ahead", samples=self._sound[ahead - self._start : now - self._start]))
            self._ahead = now

    def _said(self) -> bool | None:
        """What the model says of the question's end; None where it is not asked."""
        detector, settings, question = self._detector, self._settings, self.question
        if not isinstance(settings, SemanticVad) or question is None or not detector.speaking:
            return None
        return has_ended(question.frames, self._began / PCM_RATE, detector.now, detector.voiced, settings.eagerness)

    def _forget(self, before: int) -> None:
        gone = min(max(before - self._start, 0), len(self._sound))
        self._sound, self._start = self._sound[gone:], self._start + gone

    def press(self) -> list[QuestionPart]:
        return []

    def drop(self) -> None:
        self._forget(self._end)
        self._free = self._end
        self._restart()

    def pass_over(self, samples: np.ndarray) -> None:
        self._start, self._sound = self._end + len(samples), self._sound[:0]
        self._free = self._start
        self._restart()


class PressedQuestions:
    """Questions between two presses of a key.

    Args:
        longest: seconds of the longest question.
    """

    def __init__(self, longest: float) -> None:
        self.question: HasTurnFrames | None = None
        self._longest = round(max(longest - SPARE, longest / 2) * PCM_RATE)
        self._end = self._began = 0
        self._open = False

    def push(self, samples: np.ndarray) -> list[QuestionPart]:
        before, self._end = self._end, self._end + len(samples)
        if not self._open:
            return []
        most = self._began + self._longest - before
        parts = [QuestionPart("sound", samples=samples[:most])]
        if len(samples) >= most:
            self._open = False
            parts.append(QuestionPart("cut", before + most))
        return parts

    def press(self) -> list[QuestionPart]:
        self._open = not self._open
        if self._open:
            self._began = self._end
        return [QuestionPart("began" if self._open else "ended", self._end)]

    def drop(self) -> None:
        self._open = False

    def pass_over(self, samples: np.ndarray) -> None:
        self._end += len(samples)


def _samples(seconds: float) -> int:
    return round(seconds * PCM_RATE)
