"""People answered by the bare loop: what this machine allows with public kernels, beside the engine's live sessions.

One thread, a row of a cache for each answer. Each step takes all rows; questions that wait are encoded and prefilled together
between two steps. A row that forgets is fed what stays of it, with the question; what the columns say does not matter.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass

import torch

from benchmarks.bare import BareLoop
from infer.bench.people import BARGE, PAUSE, PlayedAudio, Workload
from infer.timing import Player
from omni.generate.history import forgotten_of
from omni.generate.speech_lm import SpeechLM

LOW = 0.16
"""Seconds of sound: rows are stepped while somebody holds less."""


@dataclass(eq=False)
class _Row:
    """An answer: its person, when it was asked, its position, decoder, frames and columns, and who plays them."""

    person: int
    asked: float
    position: int
    stream: int
    player: Player
    frames: int = 0
    columns: int = 1


class BarePeople:
    """A number of people and the loop that answers them.

    Args:
        lm: in full precision with PyTorch's kernels (`kernels="reference"`).
        context: positions of a row; conversations forget as in `omni.generate.history.fit`.

    Attributes:
        heard: what is noted at present; `written`, columns that were written, of all rows.
    """

    def __init__(self, lm: SpeechLM, workload: Workload, number: int, context: int, seed: int = 0) -> None:
        assert lm.codec is not None
        self.codec, self.workload, self.context = lm.codec, workload, context
        self.heard: PlayedAudio | None = None
        self.written = 0
        self._most = round(workload.answer_seconds * lm.codec.frame_rate)
        self.loop = BareLoop(lm, workload.question, number, context + self._most + lm.model.layout.max_delay + 1)
        self._turns: list[list[int]] = [[] for _ in range(number)]  # columns of each person's turns
        self._batch, self._rows = lm.codec.batch(), list[_Row]()
        self._random, self._pending = random.Random(seed), list[tuple[float, int]]()
        begin = time.perf_counter()
        self._numbers = [0] * number  # of each person's plans: what was planned before another question is left out
        self._plans = [(begin + self._random.uniform(0, workload.cycle), person, "ask", 0) for person in range(number)]
        heapq.heapify(self._plans)

    @torch.inference_mode()
    def play(self, seconds: float) -> None:
        """Answers them for some seconds."""
        begin, between = time.perf_counter(), 0
        while (now := time.perf_counter()) - begin < seconds:
            self._take(now)
            least = min((self._holds(row, now) for row in self._rows), default=float("inf"))
            if self._pending and (not self._rows or between >= 2):
                between = 0
                self._enter()
            elif least < LOW:
                between += 1
                self._step()
            elif self._pending:
                between = 0
                self._enter()
            else:
                next_ = self._plans[0][0] - now if self._plans else 1.0
                time.sleep(max(0.0, min(least - LOW, next_, 0.5)))

    # --- people -------------------------------------------------------------------------------------------------------

    def _take(self, now: float) -> None:
        """Carry out the plans that are due: questions, and words spoken into an answer."""
        while self._plans and self._plans[0][0] <= now:
            at, person, event, number = heapq.heappop(self._plans)
            if number != self._numbers[person]:
                continue
            self._numbers[person] += 1
            if event == "ask":
                self._pending.append((at, person))
                self._note("questions")
                continue
            self._note("interrupted")
            for row in [row for row in self._rows if row.person == person]:  # else it is written, and still plays
                self._leave(row)
            self._plan(person, self.workload.speaking)

    def _plan(self, person: int, seconds: float, event: str = "ask") -> None:
        heapq.heappush(self._plans, (time.perf_counter() + seconds, person, event, self._numbers[person]))

    def _holds(self, row: _Row, now: float) -> float:
        """Seconds of sound that its listener has left; below zero before the first."""
        return -1.0 if row.player.dry_at is None else row.player.dry_at - now

    def _hear(self, row: _Row, now: float) -> None:
        """Note that the next frame came; the first sound is of two."""
        row.frames += 1
        if row.frames == 1:
            return
        late = row.player.receive(self.codec.frame_samples * (2 if row.frames == 2 else 1), now)
        if late is None:
            self._note("first_audio", now - row.asked)
            if self._random.random() < self.workload.barge_in:
                self._plan(row.person, self._random.uniform(*BARGE) * self.workload.answer_seconds, "interrupt")
            return
        self._note("lateness", late)
        if late > 0:
            self._note("underruns")

    def _note(self, field: str, value: float | None = None) -> None:
        if self.heard is not None and value is not None:
            getattr(self.heard, field).append(value)
        elif self.heard is not None:
            setattr(self.heard, field, getattr(self.heard, field) + 1)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Encode and prefill the question that waits longest, and others that feed as many columns."""
        kept = {person: self._kept(self._turns[person]) for _, person in self._pending}
        again = {person: sum(turns) if len(turns) < len(self._turns[person]) else 0 for person, turns in kept.items()}
        stays = again[self._pending[0][1]]
        starting = [(asked, person) for asked, person in self._pending if again[person] == stays][:2]
        self._pending = [waiting for waiting in self._pending if waiting not in starting]
        for _, person in starting:
            self._turns[person] = kept[person]
        ends = [sum(self._turns[person]) + len(self.loop.columns) for _, person in starting]
        self.loop.prefill(slice(len(self._rows), len(self._rows) + len(starting)), ends, stays)
        for (asked, person), end in zip(starting, ends, strict=True):
            self._rows.append(_Row(person, asked, end, self._batch.open(), Player(self.codec.sample_rate)))

    def _kept(self, turns: list[int]) -> list[int]:
        """Columns of the turns of a conversation that are left when the next question comes."""
        question = len(self.loop.columns)
        kept = turns[forgotten_of(turns, question, self.context) :]
        while kept and sum(kept) + question > self.context - self.context // 4:
            del kept[0]
        return kept

    def _step(self) -> None:
        """Writes the next column of all rows, and decodes the frames that it completes."""
        rows, sounding = list(self._rows), list[int]()
        self.written += len(rows)
        self.loop.step([row.position for row in rows])
        codes = self.loop.frame(slice(0, len(rows)))
        for n, row in enumerate(rows):
            row.position, row.columns = row.position + 1, row.columns + 1
            if row.columns > self.loop.delay:
                sounding.append(n)
        if sounding:
            self._batch.push([rows[n].stream for n in sounding], codes[sounding][:, :, None])
        now = time.perf_counter()
        for row in [rows[n] for n in sounding]:
            self._hear(row, now)
            if row.frames >= self._most:
                self._note("answers")
                self._leave(row)
                pause = 0.0 if self.workload.nonstop else max(self._holds(row, now), 0.0) + self._random.uniform(*PAUSE)
                self._plan(row.person, pause + self.workload.speaking)

    def _leave(self, row: _Row) -> None:
        """Let an answer go; the last row takes its place."""
        index, last = self._rows.index(row), len(self._rows) - 1
        self._batch.close(row.stream)
        self._turns[row.person].append(len(self.loop.columns) + row.columns)
        moved = self._rows.pop()
        if moved is not row:
            self._rows[index] = moved
            self.loop.move(last, index, moved.position)
