"""Load for `omni-infer bench --sessions`: people who talk to an engine in another process, by the clock.

    person   speaks (the question in real time) --> asks --> hears, as it plays --> waits 0.5 to 2 s --> speaks ...
                                                             \\__ some speak again in the middle of the answer (barge-in)
    caller   comes at random, asks one question, hears the answer, goes

Nobody has a thread of their own. What comes is noted in the reader thread of the engine's process, at the time at which it
comes; what is to happen later waits in one heap; calls that wait for the engine are made by a few threads.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from infer.bench.live.manner import BARGE, PAUSE, Heard, Manner
from omni.audio.io import SAMPLE_RATE
from omni.engine.process import EngineProcess
from omni.errors import BusyError
from omni.generate.results import AudioChunk, Ended, Timings

CALLING = 16
"""Threads that make calls which wait for the engine; they mostly sleep."""


class LiveLoad:
    """The clock of all people, and the threads that call the engine for them; close it, or use `with`.

    Attributes:
        heard: what is noted at present; None while nothing is measured.
        people: those who have come and not gone.
        failure: the first error of a call.
        over: nobody asks any more.
    """

    def __init__(self, engine: EngineProcess, manner: Manner, context: int, seed: int = 0) -> None:
        self.engine, self.manner, self.context = engine, manner, context
        self.random = random.Random(seed)
        self.heard: Heard | None = None
        self.over = False
        self.failure: BaseException | None = None
        self.people: set[Person] = set()
        self._calls = ThreadPoolExecutor(CALLING, "bench-call", torch.set_num_threads, (1,))
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed, self._noting = threading.Condition(), threading.Lock()
        self._clock = threading.Thread(target=self._run, name="bench-clock", daemon=True)
        self._clock.start()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Have something done by a calling thread after that many seconds."""
        with self._changed:
            heapq.heappush(self._heap, (time.perf_counter() + seconds, next(self._numbers), what))
            self._changed.notify()

    def invite(self, number: int) -> None:
        """Let that many people come, within one cycle."""
        for _ in range(number):
            self.later(self.random.uniform(0, self.manner.cycle), Person(self).come)

    def expect(self, rate: float) -> None:
        """Let callers come from now on, at random times, `rate` a second."""

        def come() -> None:
            self.later(self.random.expovariate(rate), come)
            Person(self, turns=1, when_full="refuse").come()

        self.later(self.random.expovariate(rate), come)

    def note(self, what: str, value: float | str | None = None) -> None:
        """Count one of a kind, or add a value to a list, while something is measured."""
        with self._noting:
            if self.heard is None:
                return
            if value is None:
                setattr(self.heard, what, getattr(self.heard, what) + 1)
            else:
                getattr(self.heard, what).append(value)

    def close(self) -> None:
        """Let all go, and wait until they have."""
        with self._changed:
            self.over = True
            self._heap.clear()
            self._changed.notify()
        self._clock.join()
        for person in list(self.people):
            self._calls.submit(self._call, person.go)
        self._calls.shutdown(wait=True)

    def __enter__(self) -> LiveLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self.over:
            with self._changed:
                wait = self._heap[0][0] - time.perf_counter() if self._heap else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                what = heapq.heappop(self._heap)[2]
            self._calls.submit(self._call, what)

    def _call(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # of the engine: told by who waits for the load's end
            if not self.over:  # else they have gone, in the middle of a question
                self.failure = self.failure or error


class Person:
    """Somebody with one session. What is planned has a number, and is left out where plans have changed since.

    Args:
        turns: questions after which they go; None for as many as there is time for.
        when_full: as of `EngineProcess.session`.
    """

    def __init__(self, load: LiveLoad, turns: int | None = None, when_full: Any = "wait") -> None:
        self.load, self.turns, self.when_full = load, turns, when_full
        self._session: Any = None
        self._asked = self._plan = 0

    def come(self) -> None:
        load, manner = self.load, self.load.manner
        self._session = load.engine.session(
            pace="live", when_full=self.when_full, context=load.context, overflow="forget",
            max_seconds=manner.answer_seconds, max_tokens=1 << 20,
        )  # fmt: skip
        load.people.add(self)
        if load.over:
            self.go()
        self._speak(0.0, self._plan)

    def go(self) -> None:
        self.load.people.discard(self)
        self._session.close()

    def _speak(self, pause: float, plan: int) -> None:
        """Speak a question after a pause."""
        self.load.later(pause + self.load.manner.speaking, lambda: self._ask(plan))

    def _ask(self, plan: int) -> None:
        load = self.load
        if load.over or plan != self._plan:
            return
        self._plan += 1
        self._asked += 1
        load.note("questions")
        asked, heard = time.perf_counter(), load.heard
        try:
            answer = self._session.read(load.manner.question, "A1A2", SAMPLE_RATE)
            self._session.begin(answer)
        except BusyError:
            load.note("refused")
            self._next(PAUSE[0], self._plan)
        else:
            AnswerHearer(self, self._plan, answer, asked, heard)

    def _next(self, wait: float, plan: int) -> None:
        """Go on `wait` seconds after an answer."""
        if self.turns is not None and self._asked >= self.turns:
            self.load.later(wait, self.go)
        else:
            self._speak(wait, plan)

    def ended(self, plan: int, playing: float) -> None:
        """An answer was written, and still plays for some seconds."""
        if plan == self._plan:
            self.load.later(0.0, lambda: self._settle(plan))
            self._next(0.0 if self.load.manner.nonstop else playing + self.load.random.uniform(*PAUSE), plan)

    def _settle(self, plan: int) -> None:
        """Put an answer that was written into the history, as a session's iterator does."""
        if plan == self._plan and self in self.load.people and not self.load.over:
            self._session.commit()

    def interrupt(self, plan: int, listener: AnswerHearer) -> None:
        """Speak into an answer, where it still plays."""
        if plan != self._plan or self.load.over or not listener.plays_on():
            return
        self._plan += 1
        self.load.note("interrupted")
        self._session.cancel(played_seconds=listener.played())
        self._next(0.0, self._plan)


class AnswerHearer:
    """Hears one answer: notes in the reader thread when its chunks come, and when they were due."""

    def __init__(self, person: Person, plan: int, answer: Any, asked: float, heard: Heard | None) -> None:
        self._person, self._plan, self._answer, self._asked, self._heard = person, plan, answer, asked, heard
        self._plays: float | None = None
        self._end = 0.0
        self._over = False
        with answer.changed:
            answer.wake = self._take
            self._take()  # what came before

    def played(self) -> float:
        """Seconds that were heard by now."""
        return 0.0 if self._plays is None else min(time.perf_counter() - self._plays, self._end)

    def plays_on(self) -> bool:
        """Whether sound of it is still heard, or to come."""
        return not self._over or self.played() < self._end

    def _take(self) -> None:
        now = time.perf_counter()
        while not self._over:
            try:
                event = self._answer.poll()
            except Exception as error:
                event = Ended("error", Timings(), str(error))
            if event is None:
                return
            if isinstance(event, AudioChunk):
                self._hear(event, now)
            elif isinstance(event, Ended):
                self._over = True
                if event.reason == "error":
                    self._person.load.note("errors", str(event.error))
                elif event.reason != "cancelled":
                    self._person.load.note("answers")
                self._person.ended(self._plan, self._end - self.played())

    def _hear(self, chunk: AudioChunk, now: float) -> None:
        load, manner = self._person.load, self._person.load.manner
        self._end = chunk.end
        if self._plays is None:
            self._plays = now
            if self._heard is load.heard:
                load.note("first_audio", now - self._asked)
            if load.random.random() < manner.barge_in:
                when = load.random.uniform(*BARGE) * manner.answer_seconds
                load.later(when, lambda: self._person.interrupt(self._plan, self))
            return
        late = now - (self._plays + chunk.start)
        load.note("lateness", late)
        if late > 0:
            self._plays += late
            load.note("underruns")
