"""The intake: questions from when they were asked until their rows start. Only the stepping thread changes it.

[waiting] --> place: a slot --> [placed] --> encode --> [entering] prefill, piece by piece --> batch
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from omni.engine.answer import Running
from omni.engine.batch import EngineBatch
from omni.engine.entering import TOGETHER, Entering, Talk, advance, encode, same_kind, together, unheard
from omni.engine.prefill_ahead import Listen, Listens, Refills, columns_in
from omni.engine.schedule import Verdict, admit
from omni.engine.slots import Seat
from omni.engine.stats import Recorder

LEAST = 32
"""Columns of all rows that a piece of a prefill has at least."""


class Intake:
    """Feeds what is not in the cache: questions that come in, and, in idle time, what stays of conversations, and what has
    come of questions whose sound is still coming.

    Attributes:
        waiting: questions without a slot, in their order.
        placed: those with a slot, not yet prefilled.
        entering: those that are prefilled at present.
    """

    def __init__(self, batch: EngineBatch, recorder: Recorder) -> None:
        self.waiting: deque[Running] = deque()
        self.placed: list[Talk] = []
        self.entering: Entering | None = None
        self._batch, self._recorder = batch, recorder
        self._seconds = 1e-3  # of a column's prefill, measured
        self._hearing = 1e-2  # of the encoding of a question, measured
        self._chunk = 1e-3  # of the encoding of a chunk, measured

    @property
    def coming(self) -> list[Talk]:
        """Questions with a slot."""
        entering = self.entering
        return [*self.placed, *([] if entering is None else entering.talks)]

    # --- who is let in ------------------------------------------------------------------------------------------------

    def verdict(self, running: Running, before: Sequence[Running] = ()) -> Verdict:
        """Whether a live listener's answer fits beside the others, and those that wait before it; from any thread."""
        if running.codec is None or not running.task.audio:
            return Verdict(True)
        talks = [*self._batch.talks.values(), *self.coming]
        live = sum(talk.running.pace == "live" for talk in talks) + sum(other.live for other in before)
        if (fixed := self._batch.fixed) is not None:
            taken = sum(seat is not None and seat.busy for seat in list(self._batch.slots.holders))
            if taken + sum(1 + (other.fork is not None) for other in (*before, running)) > fixed:
                return Verdict(False, f"the {fixed} slots are taken")
        return admit(self._recorder, live, 1 / running.codec.frame_rate)

    def place(self) -> None:
        """Give waiting questions their slots, in their order."""
        while self.waiting:
            first = self.waiting[0]
            if (first.pace == "live" and not self.verdict(first).fits) or not self._batch.room(self.waiting):
                break
            self.placed.append(self._batch.place(self.waiting.popleft()))

    # --- what is fed --------------------------------------------------------------------------------------------------

    def piece(self, slack: float) -> None:
        """One piece of work: an encoding, or a piece of a prefill, that fits into `slack` seconds where it can."""
        batch, entering = self._batch, self.entering
        runner = batch.runner
        assert runner is not None
        if entering is None and (entering := self._next(slack)) is None:
            return
        self.entering = entering
        if all(talk.running.cancelled for talk in entering.talks):
            self.entering = None
            for talk in entering.talks:
                batch.free(talk)
            return
        columns = entering.left
        if slack < float("inf"):
            columns = max(-(-LEAST // entering.rows), int(slack / self._seconds / entering.rows))
        start, fed = time.perf_counter(), min(columns, entering.left, runner.chunk) * entering.rows
        started = entering.piece(columns)
        self._timed(start, fed)
        if started:
            self.entering = None
            batch.begin(entering.talks)

    def _next(self, slack: float) -> Entering | None:
        """The questions to prefill next; None where some were encoded instead, or none is left."""
        batch = self._batch
        dropped = [talk for talk in self.placed if talk.running.cancelled]
        self.placed = [talk for talk in self.placed if not talk.running.cancelled]
        for talk in dropped:
            batch.free(talk)
        if not self.placed:
            return None
        if pending := [talk for talk in self.placed if unheard(talk.running)]:
            if advance(pending[0].running):
                return None
            fitting = TOGETHER if slack == float("inf") else max(1, int(slack / self._hearing))
            chosen, start = same_kind(pending, fitting), time.perf_counter()
            broken = encode(batch.model, [talk.running for talk in chosen])
            for talk in [talk for talk in chosen if talk.running in broken]:
                self.placed.remove(talk)
                batch.free(talk, "error")
            self._hearing = 0.5 * self._hearing + 0.5 * (time.perf_counter() - start) / len(chosen)
            return None
        assert batch.runner is not None
        entering = Entering(batch.runner, together(self.placed, batch.runner))  # where this fails, they are still placed
        self.placed = [talk for talk in self.placed if talk not in entering.talks]
        return entering

    def refill(self, refills: Refills, slack: float) -> bool:
        """Feed a piece of what stays of a conversation, where there is one and it fits into `slack` seconds."""
        runner = self._batch.runner
        refill, columns = refills.first(runner), columns_in(slack, self._seconds)
        if runner is None or refill is None or not columns:
            return False
        start = time.perf_counter()
        if fed := refills.piece(runner, refill, columns):
            self._timed(start, fed)
        return True

    def listen(self, listens: Listens, slack: float) -> bool:
        """Encode a chunk, or feed a piece, of a question whose sound is still coming, where there is one and it fits into
        `slack` seconds."""
        every = listens.open()
        for listen in every:
            if self._listen(listen, [other.seat for other in every], slack):
                listens.later(listen)
                return True
        return False

    def _listen(self, listen: Listen, open: Sequence[Seat], slack: float) -> bool:
        batch, start = self._batch, time.perf_counter()
        if listen.stream.due and slack >= 2 * self._chunk and listen.encode(batch.model):
            self._chunk = 0.5 * self._chunk + 0.5 * (time.perf_counter() - start)
            return True
        if not listen.ready or listen.seat.busy:
            return False
        if listen.lacks(batch.model.layout):
            if slack < 2 * self._hearing or not listen.encode_before(batch.model):
                return False
            self._hearing = 0.5 * self._hearing + 0.5 * (time.perf_counter() - start)
            return True
        columns = columns_in(slack, self._seconds)
        if not columns or not (listen.seat.slot is not None or (not self.waiting and batch.seat_early(listen, open))):
            return False
        assert batch.runner is not None
        batch.slots.hold(listen.seat)
        fed = listen.feed(batch.runner, columns)
        if fed >= LEAST:  # fewer take as long
            self._timed(start, fed)
        return fed > 0

    def _timed(self, start: float, fed: int) -> None:
        self._seconds = 0.5 * self._seconds + 0.5 * (time.perf_counter() - start) / fed

    # --- who goes -----------------------------------------------------------------------------------------------------

    def drop(self, running: Running) -> None:
        """Let a question go that has no slot yet; one that has goes when its turn comes."""
        if running in self.waiting:
            self.waiting.remove(running)
            self._batch.release(running)

    def cancel(self, seat: Seat) -> None:
        """Cancel the questions of a conversation."""
        for running in [running for running in self.waiting if running.seat is seat]:
            running.stop()
            self.drop(running)
        for talk in self.coming:
            if talk.running.seat is seat:
                talk.running.stop()

    def clear(self) -> list[Running]:
        """Take all questions away; returns them."""
        questions = [*(talk.running for talk in self.coming), *self.waiting]
        self.waiting, self.placed, self.entering = deque(), [], None
        return questions
