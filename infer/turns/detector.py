"""Decides from probabilities of speech, and the model's turn head, when a turn begins and ends, and when it interrupts.

`server_vad`: speech begins with `ONSET` frames above the threshold, and has ended after a fixed silence.

`semantic_vad`: a turn ends where the model's turn head says so (`said`), or without such a head `SURE`
seconds after speech that has clearly stopped; and after the longest wait of its eagerness where that stays unclear (breath,
noise, a question that lacks its end). While an answer plays, speech first makes it softer (`duck`); it interrupts where it
lasts for `PROVE` seconds, and was a "mm-hmm" or a cough where it has ended before (`restore`).

        answer plays         speech                              still speech after PROVE
        ------------- duck ------------------------------------ began: interrupts --- ... --- ended
                           speech ends before: restore; speech that goes on within HELD began there

A turn head that was trained on some voices is often sure of nothing with others. So what it says of the end counts after a
least silence, and where it does not know the voice, or does not clearly say that more must come, silence alone ends the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from infer.turns.vad import FRAME_SECONDS
from omni.generate.listening import END, RULES, VOICE, TurnFrames

EAGERNESS = {"low": 8.0, "medium": 4.0, "high": 2.0, "auto": 4.0}
"""Seconds of the longest wait of `semantic_vad`, as OpenAI states them."""

Eagerness = Literal["low", "medium", "high", "auto"]

Milliseconds = Annotated[int, Field(ge=0, le=60_000)]

ONSET = 2  # frames above the threshold with which speech begins; one alone is a click
HYSTERESIS = 0.15  # by how much the probability falls below the threshold where speech has ended, as in silero's own iterator
THRESHOLD = 0.5  # of `semantic_vad`, which has none to set
PADDING = 0.1  # seconds of sound around speech that a question keeps: models answer best where they hear as much as in training
PREFIX = 0.3  # seconds before speech that belong to its turn, of `semantic_vad`

SURE = {"low": 1.2, "medium": 0.8, "high": 0.5, "auto": 0.8}
"""Seconds of silence after which `semantic_vad` takes a turn for ended, by eagerness."""

PROVE = 0.57  # seconds after which speech that made an answer softer, and still goes on, ends it: within 600 ms
GAP = 0.13  # seconds of silence after which a short sound has ended

HELD, MOST_HELD = 1.0, 3.0
"""Seconds after a short sound, and after its onset, in which speech goes on from it: what it turns out to interrupt an answer
with began there."""

Kind = Literal["began", "ended", "duck", "restore", "idle"]

LEAST = {"low": 0.4, "medium": 0.3, "high": 0.3, "auto": 0.3}
"""Seconds of silence after which the head can end a turn, by eagerness."""

UNSURE = 1.05  # seconds of silence that end a turn of which the head is not sure: more than between the words of a sentence

KNOWN, HEARD = 0.99, 0.8
"""A voice is known where the head is so sure of it in most frames of the last speech, of so many seconds."""

MORE = 0.1  # probability of the end below which more must come


class Section(BaseModel):
    """A part of the configuration; what is not given stays as it is."""

    model_config = ConfigDict(extra="ignore", validate_assignment=True)


class ServerVad(Section):
    """Turns end after a fixed silence."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    idle_timeout_ms: Annotated[int, Field(ge=5000, le=30_000)] | None = None
    create_response: bool = True
    interrupt_response: bool = True


class SemanticVad(Section):
    """Turns end sooner where speech has clearly ended, and an answer goes on under a short sound of its listener."""

    type: Literal["semantic_vad"] = "semantic_vad"
    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True


@dataclass(frozen=True)
class TurnEvent:
    """A decision about speech that began or ended at second `at` of the input, made at second `decided`."""

    kind: Kind
    at: float
    decided: float


class TurnDetector:
    """Follows one session's input, from second `start` to `now`; `speaking` while a turn is under way, with speech last at
    `voiced`."""

    def __init__(self, settings: ServerVad | SemanticVad, start: float = 0.0) -> None:
        self.settings, self.now = settings, start
        self.speaking = False
        self._run = 0  # frames of speech without a break
        self._onset = start  # where the present speech began
        self.voiced = start
        self._quiet = start  # end of the last frame that was not clearly silent
        self._held = start  # until when what begins goes on from that onset
        self._ducked: float | None = None  # since when the answer is softer
        self.idle_since: float | None = None  # end of an answer, from which its listener's silence counts (`idle_timeout_ms`)

    @property
    def padding(self) -> float:
        """Seconds before speech that belong to its turn."""
        return PREFIX if isinstance(self.settings, SemanticVad) else self.settings.prefix_padding_ms / 1000

    def push(self, probability: float, playing: bool, said: bool | None = None) -> list[TurnEvent]:
        """Take the next frame; `playing` while an answer is heard; `said`: by the model the turn has ended, or has not."""
        start, self.now = self.now, self.now + FRAME_SECONDS
        threshold = THRESHOLD if isinstance(self.settings, SemanticVad) else self.settings.threshold
        if probability >= threshold:
            if self._run == 0 and self._ducked is None and not self.speaking and start >= self._held:
                self._onset = start
            self._run += 1
            self.voiced = self._quiet = self.now
        else:
            self._run = 0
            if probability >= max(threshold - HYSTERESIS, 0.01):
                self._quiet = self.now
        if self.speaking:
            return self._end(said)
        return self._begin(playing) or self._idle(playing)

    def _begin(self, playing: bool) -> list[TurnEvent]:
        """Whether a turn begins."""
        if self._ducked is not None:  # does the sound that made an answer softer interrupt it?
            if self.now - self.voiced >= GAP:
                self._ducked = None
                self._held = min(self.voiced + HELD, self._onset + MOST_HELD)
                return [TurnEvent("restore", self.voiced, self.now)]
            if playing and (self.now - self._ducked < PROVE or not self._run):
                return []
        elif self._run < ONSET:
            return []
        elif playing and isinstance(self.settings, SemanticVad) and self.settings.interrupt_response:
            self._ducked = self.now
            return [TurnEvent("duck", self._onset, self.now)]
        self.speaking, self._ducked, self.idle_since, self._quiet = True, None, None, self.voiced
        return [TurnEvent("began", self._onset, self.now)]

    def _end(self, said: bool | None) -> list[TurnEvent]:
        """Whether the turn has ended."""
        if isinstance(self.settings, SemanticVad):
            sure = self.now - self._quiet >= SURE[self.settings.eagerness]
            ended = sure if said is None else said and not self._run
            ended = ended or self.now - self.voiced >= EAGERNESS[self.settings.eagerness]
        else:
            ended = self.now - self._quiet >= self.settings.silence_duration_ms / 1000
        if not ended:
            return []
        self.stop()
        return [TurnEvent("ended", self.voiced, self.now)]

    def said(self, frames: TurnFrames | None, start: float) -> bool | None:
        """Whether a turn whose sound begins at second `start` has ended, by the turn head; None where it does not judge. After
        `UNSURE` seconds it has, unless its frames come late, or the head knows who speaks and clearly says that more must come.
        """
        if frames is None or not isinstance(self.settings, SemanticVad) or not self.speaking:
            return None
        second, voiced, eagerness = self.now - start, self.voiced - start, self.settings.eagerness
        if second - voiced >= UNSURE:
            known, last, count = frames.known, int(voiced * frames.rate), int(HEARD * frames.rate)
            newest = min(int(second * frames.rate), len(known))
            speech, silence = known[max(last - count, 0) : last, VOICE], known[max(newest - 2, 0) : newest, END]
            waits = newest < last or (len(speech) == count and speech.median() >= KNOWN and silence.mean() < MORE)
            if not waits:
                return True
        return second - voiced >= LEAST[eagerness] and frames.ended(second, voiced, RULES[eagerness])

    def stop(self) -> None:
        """End the turn, whatever was heard last."""
        self.speaking, self._run, self.idle_since, self._held = False, 0, None, self.now

    def _idle(self, playing: bool) -> list[TurnEvent]:
        limit = self.settings.idle_timeout_ms if isinstance(self.settings, ServerVad) else None
        if limit is None or self.idle_since is None or playing or self.now - self.idle_since < limit / 1000:
            return []
        since, self.idle_since = self.idle_since, None
        return [TurnEvent("idle", since, self.now)]
