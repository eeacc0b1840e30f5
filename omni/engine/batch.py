"""The batch: the rows of the cache and the answers that have them. Only the stepping thread changes it.

question --> place: its slots --> begin: its rows --> step, step, ... --> end: the rows leave, the slot remembers
                                                        |
                                                        collect --> sound thread
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from omni.engine.answer import Running
from omni.engine.entering import Talk
from omni.engine.prefill_ahead import Listen
from omni.engine.slots import Seat, Slots
from omni.engine.sound import Outputs, SoundThread
from omni.engine.stats import LENGTH, Recorder
from omni.generate.results import Reason
from omni.generate.rows import RunnerRow
from omni.generate.runner import Runner
from omni.model.speech_model import SpeechModel

KEPT = 64
"""Slots up to which an engine without a fixed number grows before conversations that wait give theirs up."""


class EngineBatch:
    """The runner of an engine, its slots, and its answers.

    Args:
        fixed: number of slots; None grows with the conversations.
        context: least number of positions of a row; None for those that its conversations ask for.

    Attributes:
        runner: None before the first question.
        talks: the answers whose rows have started.
        seconds: of a step, from the newest ones.
    """

    def __init__(
        self,
        model: SpeechModel,
        fixed: int | None,
        context: int | None,
        sound: SoundThread,
        recorder: Recorder,
        graph: bool | None,
        compile: bool,
    ) -> None:
        self.model, self.fixed, self.context = model, fixed, context
        self.runner: Runner | None = None
        self.slots = Slots(0)
        self.talks: dict[Running, Talk] = {}
        self.seconds = 0.0
        self._rows: dict[RunnerRow, Talk] = {}
        self._sound, self._recorder = sound, recorder
        self._graph, self._compile = graph, compile

    # --- slots --------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a question or an answer has a slot."""
        return any(seat is not None and seat.busy for seat in self.slots.holders)

    def seat_early(self, listen: Listen, others: Sequence[Seat]) -> bool:
        """Give a conversation a slot before it asks, where one is free, or has been idle; a cache is made or grows for it only
        while nobody is answered. Those that are listened to keep theirs. Returns whether it has one."""
        seat, slots = listen.seat, self.slots
        if not self.busy:
            if not self.room([listen]):
                return False
        elif self.runner is None or self.runner.length < seat.limit:
            return False
        if not slots.free:
            idle = [other for other in slots.idle() if other not in others]
            if not idle or (self.fixed is None and len(slots.holders) < KEPT):
                return False
            slots.give(idle[0])
        slots.hold(seat)
        return True

    def room(self, waiting: Sequence[Running | Listen]) -> bool:
        """Whether the first of the waiting questions has its slots, or they were made."""
        if self.runner is not None and not self.busy:
            cache, norm = self.runner.cache, self.model.decoder.norm.weight
            if (cache.device, cache.dtype) != (norm.device, norm.dtype):  # the model was moved or cast
                self.forget()
        runner, slots, seats = self.runner, self.slots, [running.seat for running in waiting]
        wanted = [(running.seat.slot is None) + (running.fork is not None) for running in waiting]
        number, spare = len(slots.holders), slots.free
        if number >= KEPT or self.fixed is not None:
            spare += sum(1 for seat in slots.idle() if seat is not seats[0])
        if spare < wanted[0] or (self.fixed is None and number < KEPT):
            if self.fixed is not None and number:
                return False
            every = sum(wanted)
            grown = max(number + every - spare, 2 * number if number > 1 else 0) if every > spare else number
            number = self.fixed or grown
        context = self.model.config.decoder.context
        length = min(max(*(seat.limit for seat in seats), self.context or 0, 1), context)
        if runner is None:
            self.runner = Runner(self.model, number, length, graph=self._graph, compile=self._compile)
        elif number > len(runner.rows) or length > runner.length:
            self.collect(flush=True)
            runner.grow(number, length)
        slots.grow(number)
        return True

    def to_measure(self) -> Runner:
        """A runner without rows under way; it stays where the number of slots is fixed."""
        runner = self.runner
        if runner is None or self.fixed is None:
            size = self.fixed or 1, self.context or LENGTH
            runner = Runner(self.model, *size, graph=self._graph, compile=self._compile)
        if self.fixed is not None:
            self.runner = runner
        return runner

    def place(self, running: Running) -> Talk:
        """Give a question its slots, for which there is room."""
        seat = running.seat
        self.slots.place(seat)
        talk = Talk(running, [self._closer(seat, seat.slot)])  # type: ignore[arg-type]  # it has one now
        if running.fork is not None:
            talk.slots.append(self._closer(seat, self.slots.take(seat)))
        return talk

    def _closer(self, seat: Seat, slot: int) -> int:
        """Bring a row that is about to be stepped close to the others, in exchange for an idle one; returns its slot."""
        runner = self.runner
        assert runner is not None
        new = self.slots.closer(slot, origin=self.model.device.type == "cuda")
        if new != slot:
            idle = self.slots.exchange(slot, new)
            runner.cache.exchange_rows(slot, new, max(holder.held.high for holder in (seat, idle) if holder is not None))
        return new

    def empty(self, seat: Seat) -> bool:
        """Free a conversation's slot; False where a question or an answer of it has it."""
        if seat.busy:
            return False
        self.slots.give(seat)
        return True

    def forget(self) -> None:
        """Drop the cache; conversations are fed again."""
        for seat in self.slots.holders:
            if seat is not None:
                seat.slot, seat.busy = None, False
        self.runner, self.slots, self.talks, self._rows = None, Slots(0), {}, {}

    def shrink(self) -> None:
        """Drop a large cache that nobody uses: it is quick to make."""
        rows = 0 if self.runner is None else len(self.runner.rows)
        if rows > 2 and self.fixed is None and self.model.device.type == "cpu" and not self.busy:
            self.forget()

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, talks: Sequence[Talk]) -> None:
        """Take answers whose rows have started, and give on their first columns; those that were cancelled meanwhile end."""
        for talk in talks:
            self.talks[talk.running] = talk
            self._rows |= dict.fromkeys(talk.rows, talk)
        self.collect()
        for talk in talks:
            if talk.running.cancelled:
                self.end(talk.running, "cancelled")

    def step(self, talks: Sequence[Talk]) -> None:
        """Write the next column of some answers; those whose rows are full end."""
        runner = self.runner
        assert runner is not None
        full = [talk for talk in talks if talk.rows[0].position >= min(talk.running.seat.limit, runner.length)]
        if full:
            self.collect(flush=True)
            for talk in full:
                self.end(talk.running, "cache")
        rows = [row for talk in talks if not talk.left for row in talk.rows if not row.done]
        start = time.perf_counter()
        runner.step(rows)
        self.collect()
        taken = time.perf_counter() - start
        if 2 * len(rows) >= len(self._rows):  # a step of few says nothing of the others'
            self.seconds = 0.75 * self.seconds + 0.25 * taken
        self._recorder.stepped(len(rows), taken)

    def collect(self, flush: bool = False) -> None:
        """Give the sound thread what the rows wrote; answers that are complete leave."""
        runner = self.runner
        assert runner is not None
        outputs: Outputs = []
        complete: list[tuple[Running, Reason]] = []
        for row, output in runner.results(flush):
            talk = self._rows[row]
            if row is not talk.rows[0]:
                if row.done:
                    self._drop(talk, row)
                continue
            running = talk.running
            limits = running.reply.limits
            talk.columns.append(output.column)
            if output.frame is not None:
                talk.frames += 1
                if running.live and running.codec is not None:
                    talk.exact = running.codec.exact_samples(talk.frames) / running.codec.frame_samples
            running.written += 1
            outputs.append((running, output))
            if output.broken:
                complete.append((running, "error"))
            elif output.done:
                complete.append((running, "end"))
            elif len(talk.columns) >= limits.columns or talk.frames > limits.frames:
                complete.append((running, "length"))
        if outputs:
            self._sound.put(outputs, self.seconds if len(self.talks) > 1 else 0.0)
        for running, reason in complete:
            self.end(running, reason)
        if not self.talks:
            runner.results(flush=True)  # of rows that have left

    def _drop(self, talk: Talk, row: RunnerRow) -> None:
        """Free the second row of a talk, whose text has ended."""
        assert self.runner is not None
        self.runner.leave(row)
        talk.rows.remove(row)
        talk.slots.remove(row.slot)
        del self._rows[row]
        self.slots.drop(row.slot)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def end(self, running: Running, reason: Reason) -> bool:
        """Let an answer go: its rows leave, and its slot remembers what it holds. False where it has no rows."""
        talk = self.talks.pop(running, None)
        if talk is None:
            return False
        assert self.runner is not None
        for row in talk.rows:
            self.runner.leave(row)
            del self._rows[row]
        held = running.seat.held
        held.add(talk.columns[:-1], talk.rows[0].position)
        if reason == "error" or running.reply.error is not None:
            held.keys = []
        self.free(talk, reason)
        return True

    def free(self, talk: Talk, reason: Reason = "cancelled") -> None:
        """Free the slots of an answer whose rows have left, or never started."""
        talk.left = True
        for slot in talk.slots[1:]:
            self.slots.drop(slot)
        talk.running.seat.busy = False
        self.release(talk.running, reason)

    def release(self, running: Running, reason: Reason = "cancelled") -> None:
        """Say that an answer has no slots any more, nor needs its adapter."""
        running.release()
        running.left.set()
        self._sound.end(running, reason)
