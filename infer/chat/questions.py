"""Cuts questions out of the microphone's sound, where voice activity finds them or between two presses of a key, and asks them.

    voice activity   ...   | padding | speech   pause   speech | padding |  silence_duration_ms  | ...
                           began      pieces as they come; a pause is given once speech goes on  ended

What lies after a question, and what may become the padding of the next, is kept: every sample is in one question, or in none.
A thread asks the session question after question, and another has them transcribed.

S samples, int16 at `PCM_RATE`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from infer.audio import collect_warnings
from infer.pcm import PCM_RATE
from infer.turns.detector import ONSET, SemanticVad, ServerVad, TurnDetector
from infer.turns.vad import FRAME_SECONDS, Silero, SpeechStream
from omni.generate.results import Event
from omni.generate.session import Session
from omni.generate.turn_end import TurnFrames

SPARE = 0.5  # seconds of the longest question that are left to the model, as the server leaves them
LAST_WORDS = 10.0  # seconds in which the step under way may end when the program does


@dataclass(frozen=True, eq=False)
class QuestionPart:
    """A part of a question in the sound.

    Attributes:
        kind: `began`; `sound`, its next samples; `ahead`, samples after those, which may not belong to it; `ended`; or `cut`,
            ended at the longest question that the model takes.
    """

    kind: Literal["began", "sound", "ahead", "ended", "cut"]
    at: int = 0  # sample of the input at which a question begins or ends
    samples: np.ndarray | None = None


class Dropped(Exception):
    """The question was dropped while it was still coming."""


class SpokenTurn:
    """A question while it is spoken, and what becomes of its answer.

    coming --> whole --> asked --> answered
      `drop`: withdrawn   |  cancelled as soon as it was asked   |  cancelled, or cut to what was heard

    Attributes:
        question: its pieces so far, samples [S], int16 at `PCM_RATE`.
        frames: what the model's turn head says of it, where it has one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.question: list[np.ndarray] = []
        self.frames: TurnFrames | None = None
        self._pieces: queue.SimpleQueue[tuple[np.ndarray, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._session: Session | None = None  # once it was asked
        self._dropped = False

    @property
    def dropped(self) -> bool:
        return self._dropped

    @property
    def seconds(self) -> float:
        """Length of the question so far."""
        return sum(map(len, self.question)) / PCM_RATE

    def put(self, samples: np.ndarray) -> None:
        """Add samples [S] to the question."""
        self.question.append(samples)
        self._pieces.put((samples, True))

    def look_ahead(self, samples: np.ndarray) -> None:
        """Have the turn head hear samples [S] that follow, and may not belong to the question."""
        self._pieces.put((samples, False))

    def end(self) -> None:
        """The question is whole."""
        self._pieces.put(None)

    def pieces(self) -> Iterator[tuple[np.ndarray, bool]]:
        """The question as it comes, each piece with whether it surely belongs to it; Dropped where it was dropped meanwhile."""
        while (piece := self._pieces.get()) is not None and not self._dropped:
            yield piece
        if self._dropped:
            raise Dropped

    def asked(self, session: Session) -> None:
        """The session answers it now."""
        with self._lock:
            self._session = session
            if self._dropped:
                session.cancel(played_seconds=0.0)

    def drop(self, played: float) -> None:
        """Withdraw the question, or end its answer; the history keeps the seconds of it that were heard."""
        with self._lock:
            self._dropped = True
            self._pieces.put(None)
            if self._session is not None:
                self._session.cancel(played_seconds=played)


class VoiceQuestions:
    """Questions where voice activity finds them in sound that comes without end, by the detector of the server.

    Args:
        settings: threshold and silence, or the eagerness with which the model's turn head ends questions.
        padding, longest: seconds of sound around speech that a question has, and of the longest question.

    Attributes:
        question: that is under way, for the model's judgement of its end.
    """

    def __init__(self, model: Silero, settings: ServerVad | SemanticVad, padding: float, longest: float) -> None:
        self.question: SpokenTurn | None = None
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
        """Take the next samples [S]."""
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
        frames = None if self.question is None else self.question.frames
        events = detector.push(probability, False, detector.said(frames, self._began / PCM_RATE))
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

    def _forget(self, before: int) -> None:
        gone = min(max(before - self._start, 0), len(self._sound))
        self._sound, self._start = self._sound[gone:], self._start + gone

    def press(self) -> list[QuestionPart]:
        """The key was pressed."""
        return []

    def drop(self) -> None:
        """Leave the question under way where it is: what follows belongs to none."""
        self._forget(self._end)
        self._free = self._end
        self._restart()

    def pass_over(self, samples: np.ndarray) -> None:
        """Take samples [S] that nobody is to hear: no question has them, and none goes on across them."""
        self._start, self._sound = self._end + len(samples), self._sound[:0]
        self._free = self._start
        self._restart()


class PressedQuestions:
    """Questions between two presses of a key, of at most so many seconds; its methods are those of `VoiceQuestions`."""

    def __init__(self, longest: float) -> None:
        self.question: SpokenTurn | None = None
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


QuestionFinder = VoiceQuestions | PressedQuestions


class Answered(NamedTuple):
    """The next event of a turn's answer."""

    turn: SpokenTurn
    event: Event


class Remarked(NamedTuple):
    """A reason to doubt a turn's question (silent, very short)."""

    turn: SpokenTurn
    text: str


class Failed(NamedTuple):
    """Asking a turn raised an error."""

    turn: SpokenTurn
    error: BaseException


class Asker:
    """The thread that asks; `deliver` is called there, and with `turn` the model's turn head hears where questions end."""

    def __init__(self, session: Session, deliver: Callable[[Answered | Remarked | Failed], None], turn: bool = False) -> None:
        self._session, self._deliver, self._turn = session, deliver, turn
        self._turns: queue.SimpleQueue[SpokenTurn | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="omni-asker", daemon=True)
        self._thread.start()

    def ask(self, turn: SpokenTurn) -> None:
        """Ask a question, which may be still coming, once those before have been answered or dropped."""
        self._turns.put(turn)

    def _work(self) -> None:
        while (turn := self._turns.get()) is not None:
            try:
                self._answer(turn)
            except Dropped:
                pass
            except BaseException as error:  # raised again in the thread that talks
                self._deliver(Failed(turn, error))

    def _answer(self, turn: SpokenTurn) -> None:
        with collect_warnings() as remarks:
            listening = self._session.listen("A1A2", sample_rate=PCM_RATE, turn=self._turn)
            turn.frames = listening.turn
            try:
                for samples, sure in turn.pieces():
                    (listening.push if sure else listening.peek)(samples)
            except BaseException:
                listening.drop()
                raise
            events = self._session.ask(listening, "A1A2")
            turn.asked(self._session)
        for remark in remarks:
            self._deliver(Remarked(turn, remark))
        for event in events:
            self._deliver(Answered(turn, event))

    def close(self) -> None:
        """End the thread; the last turn was dropped, or has its answer."""
        self._turns.put(None)
        self._thread.join(LAST_WORDS)


class Transcribed(NamedTuple):
    """The transcript of a question, or why there is none."""

    text: str
    error: str | None = None


class Transcriber:
    """The thread that has questions [S] transcribed, one after another, and delivers the texts; it ends with the program."""

    def __init__(self, transcribe: Callable[[np.ndarray], str], deliver: Callable[[Transcribed], None]) -> None:
        self._transcribe, self._deliver = transcribe, deliver
        self._questions: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="omni-transcriber", daemon=True).start()

    def write_down(self, question: np.ndarray) -> None:
        """Have a question [S] transcribed."""
        self._questions.put(question)

    def _work(self) -> None:
        while True:
            try:
                self._deliver(Transcribed(self._transcribe(self._questions.get())))
            except Exception as error:
                self._deliver(Transcribed("", str(error)))
                return
