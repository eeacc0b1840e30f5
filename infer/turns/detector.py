"""Decides from probabilities of speech when a turn begins and ends, and when it interrupts an answer.

`server_vad`: speech begins with `ONSET` frames above the threshold, and has ended after a fixed silence.

`semantic_vad`: a turn ends where the model's turn head says so (`said`), or without such a head `SURE`
seconds after speech that has clearly stopped; and after the longest wait of its eagerness where that stays unclear (breath,
noise, a question that lacks its end). While an answer plays, speech first makes it softer (`duck`); it interrupts where it
lasts for `PROVE` seconds, and was a "mm-hmm" or a cough where it has ended before (`restore`).

        answer plays         speech                              still speech after PROVE
        ------------- duck ------------------------------------ began: interrupts --- ... --- ended
                           speech ends before: restore; speech that goes on within HELD began there
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infer.turns.settings import SemanticVad, ServerVad
from infer.turns.vad import FRAME_SECONDS

ONSET = 2
"""Frames above the threshold with which speech begins; one alone is a click."""

HYSTERESIS = 0.15
"""By how much the probability falls below the threshold where speech has ended, as in silero's own iterator."""

THRESHOLD = 0.5
"""Of `semantic_vad`, which has none to set."""

PREFIX = 0.3
"""Seconds before speech that belong to its turn, of `semantic_vad`."""

SURE = {"low": 1.2, "medium": 0.8, "high": 0.5, "auto": 0.8}
"""Seconds of silence after which `semantic_vad` takes a turn for ended, by eagerness."""

PROVE = 0.57
"""Seconds after which speech that made an answer softer, and still goes on, ends it: within 600 ms."""

GAP = 0.13
"""Seconds of silence after which a short sound has ended."""

HELD, MOST_HELD = 1.0, 3.0
"""Seconds after a short sound, and after its onset, in which speech goes on from it: what it turns out to interrupt an answer
with began there."""

Kind = Literal["began", "ended", "duck", "restore", "idle"]


@dataclass(frozen=True)
class TurnEvent:
    """What was decided.

    Attributes:
        at: second of the input at which speech began or ended.
        decided: second of the input at which that was decided.
    """

    kind: Kind
    at: float
    decided: float


class TurnDetector:
    """Follows one session's input.

    Args:
        start: second of the input at which it begins to follow.

    Attributes:
        speaking: a turn is under way.
        now: seconds of input that were followed.
    """

    def __init__(self, settings: ServerVad | SemanticVad, start: float = 0.0) -> None:
        self.settings, self.now = settings, start
        self.speaking = False
        self._run = 0  # frames of speech without a break
        self._onset = start  # where the present speech began
        self._voiced = start  # end of the last frame that was speech
        self._quiet = start  # end of the last frame that was not clearly silent
        self._held = start  # until when what begins goes on from that onset
        self._ducked: float | None = None  # since when the answer is softer
        self._idle_since: float | None = None

    @property
    def semantic(self) -> bool:
        return isinstance(self.settings, SemanticVad)

    @property
    def ducked(self) -> bool:
        return self._ducked is not None

    @property
    def voiced(self) -> float:
        """Second of the input at which the last frame that was speech ended."""
        return self._voiced

    @property
    def padding(self) -> float:
        """Seconds before speech that belong to its turn."""
        return PREFIX if isinstance(self.settings, SemanticVad) else self.settings.prefix_padding_ms / 1000

    def push(self, probability: float, playing: bool, said: bool | None = None) -> list[TurnEvent]:
        """Take the next frame; `playing` while an answer is heard; `said`: by the model the turn has ended, or has not."""
        start, self.now = self.now, self.now + FRAME_SECONDS
        threshold = THRESHOLD if isinstance(self.settings, SemanticVad) else self.settings.threshold
        if probability >= threshold:
            if self._run == 0 and not (self.ducked or self.speaking) and start >= self._held:
                self._onset = start
            self._run += 1
            self._voiced = self._quiet = self.now
        else:
            self._run = 0
            if probability >= max(threshold - HYSTERESIS, 0.01):
                self._quiet = self.now
        if self.speaking:
            return self._end(said)
        return self._begin(playing) or self._idle(playing)

    def _begin(self, playing: bool) -> list[TurnEvent]:
        """Whether a turn begins."""
        if self._ducked is not None:
            return self._prove(self._ducked, playing)
        if self._run < ONSET:
            return []
        if playing and self.semantic and self.settings.interrupt_response:
            self._ducked = self.now
            return [TurnEvent("duck", self._onset, self.now)]
        return [self._began()]

    def _prove(self, since: float, playing: bool) -> list[TurnEvent]:
        """Whether the sound that made an answer softer interrupts it."""
        if self.now - self._voiced >= GAP:
            self._ducked = None
            self._held = min(self._voiced + HELD, self._onset + MOST_HELD)
            return [TurnEvent("restore", self._voiced, self.now)]
        if not playing or (self.now - since >= PROVE and self._run):
            self._ducked = None
            return [self._began()]
        return []

    def _began(self) -> TurnEvent:
        self.speaking, self._idle_since = True, None
        self._quiet = self._voiced
        return TurnEvent("began", self._onset, self.now)

    def _end(self, said: bool | None) -> list[TurnEvent]:
        """Whether the turn has ended."""
        if isinstance(self.settings, SemanticVad):
            sure = self.now - self._quiet >= SURE[self.settings.eagerness]
            ended = sure if said is None else said and not self._run
            ended = ended or self.now - self._voiced >= self.settings.longest_wait
        else:
            ended = self.now - self._quiet >= self.settings.silence_duration_ms / 1000
        if not ended:
            return []
        self.stop()
        return [TurnEvent("ended", self._voiced, self.now)]

    def stop(self) -> None:
        """End the turn, whatever was heard last."""
        self.speaking, self._run, self._idle_since, self._held = False, 0, None, self.now

    def wait(self) -> None:
        """The answer has been heard: the listener's silence counts from here (`idle_timeout_ms`)."""
        self._idle_since = self.now

    def _idle(self, playing: bool) -> list[TurnEvent]:
        limit = self.settings.idle_timeout_ms if isinstance(self.settings, ServerVad) else None
        if limit is None or self._idle_since is None or playing or self.now - self._idle_since < limit / 1000:
            return []
        since, self._idle_since = self._idle_since, None
        return [TurnEvent("idle", since, self.now)]
