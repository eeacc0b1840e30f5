"""Asks a session question after question, and has questions transcribed, each in a thread of its own, while the microphone is
heard and answers are played."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from infer.audio_in import collect_warnings
from infer.turns.settings import PCM_RATE
from omni.generate.results import Event
from omni.generate.session import Session
from omni.generate.turn_end import TurnFrames

LAST_WORDS = 10.0
"""Seconds in which the step under way may end when the program does."""


class Dropped(Exception):
    """Nobody wants the question any more that is still coming."""


class SpokenTurn:
    """A question while it is spoken, and what becomes of its answer.

    coming --> whole --> asked --> answered
      `drop`: withdrawn   |  cancelled as soon as it was asked   |  cancelled, or cut to what was heard

    Args:
        number: of the question, from 1.

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


@dataclass(frozen=True)
class Answered:
    """The next event of a turn's answer."""

    turn: SpokenTurn
    event: Event


@dataclass(frozen=True)
class Remarked:
    """A reason to doubt a turn's question (silent, very short)."""

    turn: SpokenTurn
    text: str


@dataclass(frozen=True)
class Failed:
    """Asking a turn raised an error."""

    turn: SpokenTurn
    error: BaseException


class Asker:
    """The thread that asks.

    Args:
        deliver: called there with each `Answered`, `Remarked` or `Failed`.
        turn: have the model's turn head hear where questions end.
    """

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


@dataclass(frozen=True)
class Transcribed:
    """The transcript of a question, or why there is none."""

    text: str
    error: str | None = None


class Transcriber:
    """The thread that has questions transcribed, one after another; it ends with the program.

    Args:
        transcribe: returns the transcript of a question [S].
        deliver: called there with each.
    """

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
