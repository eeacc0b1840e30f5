"""People who talk to an engine in another process, by the clock, and what they note.

    person   speaks (the question in real time) --> asks --> hears, as it plays --> waits 0.5 to 2 s --> speaks ...
                                                             \\__ some speak again in the middle of the answer (barge-in)

Each is a task of one loop. What comes is noted in the reader thread of the engine's process, at the time at which it comes; a
few threads make the calls that wait for the engine.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.engine.process import EngineProcess
from omni.generate.results import AudioChunk, Ended, Timings

PAUSE = (0.5, 2.0)  # seconds between the end of an answer, as it is heard, and the next question; drawn evenly
BARGE = (0.25, 0.75)  # when somebody interrupts: parts of the longest answer, from its first sound; drawn evenly


@dataclass
class PlayedAudio:
    """Times (seconds) and counts that the listeners of a load noted while it was measured; see `LiveFigures`.

    A chunk is due when what came before it has played; the listener waits for one that is late, and later ones are due later.
    """

    lateness: list[float] = field(default_factory=list)
    first_audio: list[float] = field(default_factory=list)
    underruns: int = 0
    questions: int = 0
    answers: int = 0
    interrupted: int = 0
    errors: int = 0


@dataclass(frozen=True)
class Workload:
    """The workload: all people ask `question`, [S] at 16 kHz, and interrupt a share of the answers.

    Those who talk nonstop ask again as soon as an answer is written: they do not speak in real time, hear it out, or pause.
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


class LiveLoad:
    """All people, and the threads that call the engine for them; closed in the loop that they talk in.

    What they hear goes to `heard`, while that is not None.
    """

    def __init__(self, engine: EngineProcess, workload: Workload, context: int, seed: int = 0) -> None:
        self.engine, self.workload, self.context = engine, workload, context
        self.random = random.Random(seed)
        self.heard: PlayedAudio | None = None
        self._calls = ThreadPoolExecutor(16, "bench-call", torch.set_num_threads, (1,))
        self._people, self._sessions = list[asyncio.Task[None]](), list[Any]()
        self._noting = threading.Lock()

    def invite(self, number: int) -> None:
        """Lets that many people come, within one cycle."""
        self._people += [asyncio.create_task(self._talk()) for _ in range(number)]

    async def wait(self, seconds: float) -> None:
        """Waits; raises what goes wrong in somebody's talk meanwhile."""
        done, _ = await asyncio.wait(self._people, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for person in done:
            person.result()

    def note(self, name: str, value: float | None = None) -> None:
        """Counts one in a field of `PlayedAudio`, or appends a value to it, while something is measured."""
        with self._noting:
            if self.heard is not None and value is None:
                setattr(self.heard, name, getattr(self.heard, name) + 1)
            elif self.heard is not None:
                getattr(self.heard, name).append(value)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call that waits for the engine."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, function, *args)

    async def close(self) -> None:
        """Ends all people, and closes their sessions."""
        for person in self._people:
            person.cancel()
        await asyncio.gather(*self._people, return_exceptions=True)
        self._calls.shutdown(wait=True)
        for session in self._sessions:
            session.close()

    def _open(self) -> Any:
        own: Any = {"pace": "live", "context": self.context, "overflow": "forget", "max_tokens": 1 << 20}
        self._sessions.append(self.engine.session(max_seconds=self.workload.answer_seconds, **own))
        return self._sessions[-1]

    async def _talk(self) -> None:
        await asyncio.sleep(self.random.uniform(0, self.workload.cycle))
        session, pause = await self.call(self._open), 0.0
        while True:
            await asyncio.sleep(pause + self.workload.speaking)
            pause = await self._turn(session)

    async def _turn(self, session: Any) -> float:
        """Asks, and hears the answer out or interrupts it; returns the seconds of silence before the next question."""
        self.note("questions")
        hearer = await self.call(AnswerListener, self, session, asyncio.get_running_loop())
        await hearer.sounds.wait()
        interrupts = self.random.random() < self.workload.barge_in
        limit = self.random.uniform(*BARGE) * self.workload.answer_seconds if interrupts else None
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(hearer.over.wait(), limit)
            await self.call(session.commit)  # it goes into the history, as by a session's iterator
        if limit is not None:
            await asyncio.sleep(limit - hearer.played())
            if not hearer.over.is_set() or hearer.played() < hearer.end:  # it is still heard, or to come
                self.note("interrupted")
                await self.call(session.cancel, hearer.played())
                return 0.0
        return 0.0 if self.workload.nonstop else max(hearer.end - hearer.played(), 0.0) + self.random.uniform(*PAUSE)


class AnswerListener:
    """Asks, and hears the answer: notes in the reader thread when its chunks come, and when they were due.

    `sounds` and `over` are set in the loop once it sounds, and once it is written; `end` is the seconds of its sound that came.
    """

    def __init__(self, load: LiveLoad, session: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._load, self._loop, self._asked, self._heard = load, loop, time.perf_counter(), load.heard
        self.sounds, self.over, self.end = asyncio.Event(), asyncio.Event(), 0.0
        self._plays: float | None = None
        self._done = False
        self._answer = session.read(load.workload.question, "A1A2", SAMPLE_RATE)
        session.begin(self._answer)
        with self._answer.changed:
            self._answer.wake = self._take
            self._take()  # what came before

    def played(self) -> float:
        """Seconds that were heard by now."""
        return 0.0 if self._plays is None else min(time.perf_counter() - self._plays, self.end)

    def _take(self) -> None:
        now = time.perf_counter()
        while not self._done:
            try:
                event = self._answer.poll()
            except Exception as error:
                event = Ended("error", Timings(), str(error))
            if event is None:
                return
            if isinstance(event, AudioChunk):
                self._hear(event, now)
            elif isinstance(event, Ended):
                self._done = True
                if event.reason != "cancelled":
                    self._load.note("errors" if event.reason == "error" else "answers")
                self._tell(self.sounds, self.over)

    def _hear(self, chunk: AudioChunk, now: float) -> None:
        load, self.end = self._load, chunk.end
        if self._plays is None:
            self._plays = now
            if self._heard is load.heard:
                load.note("first_audio", now - self._asked)
            self._tell(self.sounds)
            return
        late = now - (self._plays + chunk.start)
        load.note("lateness", late)
        if late > 0:
            self._plays += late
            load.note("underruns")

    def _tell(self, *events: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop was closed
            for event in events:
                self._loop.call_soon_threadsafe(event.set)
