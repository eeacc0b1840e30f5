"""The batch: the rows of the cache and the answers that have them. Only the stepping thread changes it.

A conversation keeps its slot between its turns, so that only what is new is fed; the one that waited longest gives it up where
others need it. Its turns are kept apart (`omni.generate.history`), so it finds another slot and is fed again there.

question --> place: its slots --> begin: its rows --> step, step, ... --> end: the rows leave, the slot remembers
                                                        |
                                                        collect --> sound thread
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from omni.engine.answer import Running, Seat
from omni.engine.prefill_ahead import Listen
from omni.engine.sound import Outputs, SoundThread
from omni.engine.stats import LENGTH, Recorder
from omni.generate.history import CachedHistory
from omni.generate.results import Reason
from omni.generate.rows import RunnerRow, StepOutput
from omni.generate.runner import Runner
from omni.model.projector import TokenHead
from omni.model.speech_model import SpeechModel


class Slots:
    """The slots, lowest first, so that the rows of a step are neighbours. `holders`: the seat that has each slot; a second
    row of an answer has the seat of the first."""

    def __init__(self, number: int) -> None:
        self.holders: list[Seat | None] = [None] * number

    def idle(self) -> list[Seat]:
        """Seats that have a slot and no answer under way, the one that waited longest first."""
        held = {id(seat): seat for seat in self.holders if seat is not None and not seat.busy}
        return sorted(held.values(), key=lambda seat: seat.used)

    def take(self, seat: Seat) -> int:
        """A free slot for a seat, or one of a seat that is idle."""
        if None not in self.holders:
            self.give(self.idle()[0])
        slot = self.holders.index(None)
        self.holders[slot] = seat
        return slot

    def hold(self, seat: Seat) -> None:
        """Give a seat its slot, where it has none, and let it be the last that gives one up."""
        seat.used = time.perf_counter()
        if seat.slot is None:
            seat.slot, seat.held = self.take(seat), CachedHistory()

    def closer(self, slot: int, origin: bool) -> int:
        """The slot to which a busy seat's row in `slot` is to move, so that rows of a step are neighbours and few others lie
        between them; `slot` itself where it is close enough. `origin`: steps begin with slot 0, whoever holds it."""
        busy = [slot, *(n for n, seat in enumerate(self.holders) if seat is not None and seat.busy)]
        count, span = len(set(busy)), max(busy) + 1 - (0 if origin else min(busy))
        if slot < count or span <= count + count // 10 + 1:
            return slot
        return next((n for n, seat in enumerate(self.holders[:slot]) if seat is None or not seat.busy), slot)

    def exchange(self, slot: int, other: int) -> Seat | None:
        """Exchange two slots, of a busy seat and of one that is idle, which is returned; or of none."""
        seat, idle = self.holders[slot], self.holders[other]
        self.holders[slot], self.holders[other] = idle, seat
        for holder, old, new in ((seat, slot, other), (idle, other, slot)):
            if holder is not None and holder.slot == old:
                holder.slot = new
        return idle

    def give(self, seat: Seat) -> None:
        """Free a seat's slots."""
        self.holders = [None if holder is seat else holder for holder in self.holders]
        seat.slot = None


KEPT = 64
"""Slots up to which an engine without a fixed number grows before conversations that wait give theirs up."""


class EngineBatch:
    """The runner of an engine, its slots, and its answers.

    Args:
        fixed: number of slots; None grows with the conversations.
        context: least number of positions of a row; None for those that its conversations ask for.
        options: of `Runner`.

    Attributes:
        runner: None before the first question.
        answers: those whose rows have started.
        seconds: of a step, from the newest ones.
    """

    def __init__(
        self, model: SpeechModel, fixed: int | None, context: int | None, sound: SoundThread, recorder: Recorder, **options: Any
    ) -> None:
        self.model, self.fixed, self.context = model, fixed, context
        self.runner: Runner | None = None
        self.slots = Slots(0)
        self.answers: list[Running] = []
        self.seconds = 0.0
        self._rows: dict[RunnerRow, Running] = {}
        self._sound, self._recorder, self._options = sound, recorder, options

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
        if None not in slots.holders:
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
        number, spare = len(slots.holders), slots.holders.count(None)
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
            self.runner = Runner(self.model, number, length, **self._options)
        elif number > len(runner.rows) or length > runner.length:
            self.collect(flush=True)
            runner.grow(number, length)
        slots.holders += [None] * (number - len(slots.holders))
        return True

    def to_measure(self) -> Runner:
        """A runner without rows under way; it stays where the number of slots is fixed."""
        runner = self.runner
        if runner is None or self.fixed is None:
            runner = Runner(self.model, self.fixed or 1, self.context or LENGTH, **self._options)
        if self.fixed is not None:
            self.runner = runner
        return runner

    def place(self, running: Running) -> None:
        """Give a question its slots, for which there is room."""
        seat = running.seat
        seat.busy = True
        self.slots.hold(seat)
        assert seat.slot is not None
        running.slots = [self._closer(seat, seat.slot)]
        if running.fork is not None:
            running.slots.append(self._closer(seat, self.slots.take(seat)))

    def _closer(self, seat: Seat, slot: int) -> int:
        """Bring a row that is about to be stepped close to the others, in exchange for an idle one; returns its slot."""
        runner = self.runner
        assert runner is not None
        new = self.slots.closer(slot, origin=self.model.device.type == "cuda")
        if new != slot:
            idle = self.slots.exchange(slot, new)
            runner.cache.exchange_rows(slot, new, max(holder.held.high for holder in (seat, idle) if holder is not None))
        return new

    def forget(self) -> None:
        """Drop the cache; conversations are fed again."""
        for seat in self.slots.holders:
            if seat is not None:
                seat.slot, seat.busy = None, False
        self.runner, self.slots, self.answers, self._rows = None, Slots(0), [], {}

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, answers: Sequence[Running]) -> None:
        """Take answers whose rows have started, and give on their first columns; those that were cancelled meanwhile end."""
        self.answers += answers
        for running in answers:
            self._rows |= dict.fromkeys(running.rows, running)
        self.collect()
        for running in answers:
            if running.cancelled:
                self.end(running, "cancelled")

    def step(self, answers: Sequence[Running]) -> None:
        """Write the next column of some answers; those whose rows are full end."""
        runner = self.runner
        assert runner is not None
        full = [running for running in answers if running.rows[0].position >= min(running.seat.limit, runner.length)]
        if full:
            self.collect(flush=True)
            for running in full:
                self.end(running, "cache")
        rows = [row for running in answers for row in running.rows if row.live and not row.done]
        start = time.perf_counter()
        runner.step(rows)
        self.collect()
        taken = time.perf_counter() - start
        if 2 * len(rows) >= len(self._rows):  # a step of few says nothing of the others'
            self.seconds = 0.75 * self.seconds + 0.25 * taken
        self._recorder.note(steps=[(len(rows), taken)])

    def collect(self, flush: bool = False) -> None:
        """Give the sound thread what the rows wrote; answers that are complete leave."""
        runner = self.runner
        assert runner is not None
        outputs: Outputs = []
        complete: list[tuple[Running, Reason]] = []
        for row, output in runner.results(flush):
            running = self._rows[row]
            if row is not running.rows[0]:
                if row.done:
                    self._drop(running, row)
                continue
            limits = running.reply.limits
            running.wrote.append(output.column)
            if output.frame is not None:
                running.frames += 1
                if running.live and running.codec is not None:
                    running.exact = running.codec.exact_samples(running.frames) / running.codec.frame_samples
            outputs.append((running, output))
            if output.broken:
                complete.append((running, "error"))
            elif output.done:
                complete.append((running, "end"))
            elif len(running.wrote) >= limits.columns or running.frames > limits.frames:
                complete.append((running, "length"))
        if outputs:
            self._sound.put(outputs, self.seconds if len(self.answers) > 1 else 0.0)
        for running, reason in complete:
            self.end(running, reason)
        if not self.answers:
            runner.results(flush=True)  # of rows that have left

    def _drop(self, running: Running, row: RunnerRow) -> None:
        """Free the second row of an answer, whose text has ended."""
        assert self.runner is not None
        self.runner.leave(row)
        running.rows.remove(row)
        running.slots.remove(row.slot)
        del self._rows[row]
        self.slots.holders[row.slot] = None

    def transcribed(self, running: Running) -> bool:
        """Whether the answer is what a head `tokens` has read."""
        return running.task.writes == "question" and isinstance(self.model.alignment_head, TokenHead)

    def say(self, running: Running) -> None:
        """Give the sound thread what was read of a question, as if a row had written it."""
        features, pads = cast(Tensor, running.exchange.features), self.model.layout.ids("pad").tolist()
        columns = [(*pads[:-1], token) for token in self.model.written(features)]
        self._sound.put([(running, StepOutput(column, None, column[-1], False)) for column in columns])
        self.free(running, "end")

    # --- ends ---------------------------------------------------------------------------------------------------------

    def end(self, running: Running, reason: Reason) -> bool:
        """Let an answer go: its rows leave, and its slot remembers what it holds. False where it has no rows."""
        if running not in self.answers:
            return False
        self.answers.remove(running)
        assert self.runner is not None
        for row in running.rows:
            self.runner.leave(row)
            del self._rows[row]
        held = running.seat.held
        held.add(running.wrote[:-1], running.rows[0].position)
        if reason == "error" or running.reply.error is not None:
            held.keys = []
        self.free(running, reason)
        return True

    def free(self, running: Running, reason: Reason = "cancelled") -> None:
        """Free the slots of an answer whose rows have left, or never started."""
        for slot in running.slots[1:]:
            self.slots.holders[slot] = None
        running.seat.busy = False
        self.release(running, reason)

    def release(self, running: Running, reason: Reason = "cancelled") -> None:
        """Say that an answer has no slots any more, nor needs its adapter."""
        running.release()
        running.left.set()
        self._sound.put([(running, reason)])
