"""The engine: one batch for every conversation with a model on one device.

One thread steps. Between two steps it takes what came meanwhile: new questions get a slot and are encoded and prefilled in
pieces that fit the time until a listener needs sound; answers that ended or were cancelled leave. A second thread
(`omni.engine.sound`) turns what was written into text and sound while the next step runs.

    client: ask --> [waiting] --> slot --> encode --> prefill --> [rows: step, step, ...] --> events --> client
                                              between two steps              sound thread

A row's answer does not depend on its company, so that each conversation is what it would be alone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from omni.engine.admission import Verdict, admit
from omni.engine.client import Running
from omni.engine.entering import Entering, Talk, encode, together, unheard
from omni.engine.forget import Refill, Refills, columns_in
from omni.engine.schedule import Watermarks, choose
from omni.engine.slots import Seat, Slots, check_slots
from omni.engine.sound import Outputs, SoundThread
from omni.engine.stats import EngineStats, Recorder
from omni.engine.worker import Worker
from omni.errors import BusyError, UserError
from omni.generate.results import Reason
from omni.generate.rows import RunnerRow
from omni.generate.runner import Runner
from omni.hardware import release_threads
from omni.model.speech_model import SpeechModel

KEPT = 64
"""Slots up to which an engine without a fixed number grows before conversations that wait give theirs up."""

PATIENCE = 8
"""Steps after which a question is let in although somebody is due."""


class Engine:
    """Answers the questions of any number of conversations; `omni.generate.session.Session` is its client.

    Args:
        slots: rows of the cache; None grows with the conversations.
        context: positions of a row; None for those that its conversations ask for.
        marks: how far ahead of its listener a row is written.
        queue: live listeners' questions that may wait; None for any number.
        patience: seconds after which an answer that nobody reads ends; None for never.
        graph, compile: as for `omni.generate.runner.Runner`.
    """

    def __init__(
        self,
        model: SpeechModel,
        *,
        slots: int | None = None,
        context: int | None = None,
        marks: Watermarks | None = None,
        queue: int | None = None,
        patience: float | None = None,
        graph: bool | None = None,
        compile: bool = False,
    ) -> None:
        check_slots(slots)
        self.queue, self.patience = queue, patience
        self.model, self.marks = model, marks or Watermarks()
        self.fixed, self.context = slots, context
        self._graph, self._compile = graph, compile
        self._changed = threading.RLock()  # guards what clients write: the next five
        self._asked: deque[Running] = deque()
        self._ended: list[Running] = []
        self._vacated: list[Seat] = []
        self._closed = self._draining = False
        self._threads = 0
        self._seats: weakref.WeakSet[Seat] = weakref.WeakSet()
        self._slots = Slots(0)
        self.runner: Runner | None = None
        self._waiting: deque[Running] = deque()
        self._placed: list[Talk] = []  # with a slot, not yet prefilled
        self._entering: Entering | None = None
        self._talks: dict[Running, Talk] = {}
        self._rows: dict[RunnerRow, Talk] = {}
        self._refills = Refills()
        self._steps = 0  # since a piece of a question
        self._filling = False
        self._seconds = 1e-3  # of a column's prefill, measured
        self._worker = Worker("omni-engine", self._turn)
        self._recorder = Recorder()
        self._sound = SoundThread(self.leave, self._recorder)
        release_threads()  # of who loaded the model

    # --- clients ------------------------------------------------------------------------------------------------------

    def seat(self, limit: int) -> Seat:
        """A place for a conversation of up to that many positions; it takes a slot with its first question.

        Raises:
            UserError: the engine is closed, or its rows are shorter.
        """
        self.check()
        if self.context is not None and limit > self.context:
            raise UserError(f"context is {limit}, and the engine's rows have {self.context} positions; give a smaller one")
        seat = Seat(limit)
        self._seats.add(seat)
        return seat

    def ask(self, asked: Sequence[Running]) -> None:
        """Take questions; they are answered in any order, together where they fit.

        Raises:
            UserError: the engine is closed, or an answer takes more slots than there are.
            BusyError: a live listener's question that is not to wait, or a queue that is full.
        """
        self.check()
        for running in asked:
            rows = 1 if running.fork is None else 2
            if self.fixed is not None and rows > self.fixed:
                raise UserError(f"text assist takes 2 slots, and the engine has {self.fixed}; give it more, or leave it out")
        with self._changed:
            for running in asked:
                if running.pace == "live":
                    self._check_queue(running)
            for running in asked:
                running.hungry = self._worker.wake
                if not running.left.is_set():  # else it was cancelled before
                    running.given = True
                    self._asked.append(running)
            self._threads = torch.get_num_threads()
        release_threads()  # from here on the stepping thread computes
        self._worker.wake()

    def _check_queue(self, running: Running) -> None:
        waiting = len(self._asked) + len(self._waiting)
        verdict = self._verdict(running)
        if not verdict.fits and running.when_full == "refuse":
            raise BusyError(f"there is no room for another listener: {verdict.why}; ask again later", waiting)
        if not verdict.fits and self.queue is not None and waiting >= self.queue:
            raise BusyError(f"{waiting} questions wait already: {verdict.why}; ask again later", waiting)

    def place(self, running: Running) -> int:
        """Place of a question among those that wait, from 1; 0 for one that does not."""
        with self._changed:
            waiting = [*self._waiting, *self._asked]
        return waiting.index(running) + 1 if running in waiting else 0

    def stats(self) -> EngineStats:
        """What it does at present, and its newest measurements."""
        talks = [*self._talks.values()]
        with self._changed:
            waiting = len(self._asked) + len(self._waiting)
        return self._recorder.stats(
            sessions=len(self._seats),
            active=len(talks),
            live=sum(talk.running.pace == "live" for talk in talks),
            waiting=waiting + len(self._placed),
            slots=len(self._slots.holders),
            free=self._slots.free,
        )

    def clear_stats(self) -> None:
        """Forget the measurements so far."""
        self._recorder.clear()

    def leave(self, running: Running) -> None:
        """End an answer at the next step's boundary; `running.left` is set then."""
        with self._changed:
            self._ended.append(running)
        self._worker.wake()

    def stop(self, running: Running, wait: bool = True) -> None:
        """Cancel an answer, and wait (or do not) until its rows are free; `running.left` is set then."""
        if self.forked:
            return
        running.stop()
        with self._changed:
            if not running.given:
                running.release()
                running.left.set()
        if not running.left.is_set():
            self.leave(running)
            if wait and not self._worker.here:
                running.left.wait()

    def refill(self, refill: Refill) -> None:
        """Feed what stays of a conversation before its next question, in the time that nobody else needs."""
        if not self._closed and os.getpid() == self._worker._process:
            self._refills.put(refill)
            self._worker.wake()

    def vacate(self, seat: Seat) -> None:
        """Free a conversation's slot, at the next step's boundary; what is left of its answer is cancelled."""
        if self.forked:
            return
        with self._changed:
            self._vacated.append(seat)
        self._seats.discard(seat)
        if not self._closed:
            self._worker.wake()

    def drain(self, seconds: float) -> bool:
        """Refuse new questions, and wait until all answers ended, at most that long; returns whether they have."""
        self._draining = True
        end = time.perf_counter() + seconds
        while (left := self.stats()).active + left.waiting and time.perf_counter() < end:
            time.sleep(0.01)
        return not left.active + left.waiting

    def close(self) -> None:
        """End all answers, wait for the threads to end, and free the cache."""
        if self.forked:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._worker.stop()
        self._take()
        entering = [] if self._entering is None else self._entering.talks
        for running in [*self._waiting, *(talk.running for talk in [*self._placed, *entering]), *self._talks]:
            running.stop()
            running.release()
            running.left.set()
        self._sound.stop()
        self.runner, self._talks, self._rows, self._placed, self._entering = None, {}, {}, [], None

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the engine's, and so has no threads of it."""
        return os.getpid() != self._worker._process

    def check_process(self) -> None:
        """UserError in a process that was forked."""
        self._worker.check_process()

    def check(self) -> None:
        """UserError in a process that was forked, or where the engine is closed."""
        self.check_process()
        if self._closed or self._draining:
            raise UserError("this engine is closed; load the model again, or start another engine")

    # --- the stepping thread ------------------------------------------------------------------------------------------

    def _turn(self) -> float | None:
        """One piece of work between two boundaries; see `Worker`."""
        try:
            return self._work()
        except BaseException as error:  # of all that are under way, since the rows' state is not known
            self._fail(error)
            return 0.0

    def _work(self) -> float | None:
        self._take()
        self._place()
        due = choose(self._talks.values(), time.perf_counter(), self.marks)
        unknown = not all([talk.running.rest() for talk in due.behind])
        self._recorder.slack = None if due.slack == float("inf") else due.slack
        wait = self._give_up(due.behind)
        incoming = self._entering is not None or bool(self._placed)
        urgent = due.new + due.low
        self._filling = bool(due.low) or (self._filling and bool(due.along))
        if urgent and not (incoming and self._steps >= PATIENCE):
            together = self._filling and not due.late
            self._step(urgent + (due.along + due.read if together else []))
        elif incoming:
            self._let_in(due.slack)
        elif self._refilled(due.slack, bool(due.read) or self._filling):
            pass
        elif self._filling:
            self._step(due.along + due.read)
        elif due.read:
            self._step(due.read)
        else:
            slack = min(due.slack, wait, 0.01) if unknown else min(due.slack, wait)
            return None if slack == float("inf") else max(slack, 1e-4)
        return 0.0

    def _take(self) -> None:
        """Take what clients asked for since the last boundary."""
        with self._changed:
            ended, self._ended = self._ended, []
            vacated, self._vacated = self._vacated, []
            self._waiting += self._asked
            self._asked.clear()
            threads = self._threads
        if threads and threads != torch.get_num_threads():
            torch.set_num_threads(threads)  # each thread has its own number
        for running in ended:
            self._end(running, "cancelled")
        for seat in vacated:
            self._empty(seat)
        runner = self.runner
        unused = vacated and not self._seats and not self._talks and self.fixed is None
        if unused and runner is not None and len(runner.rows) > 2 and self.model.device.type == "cpu":
            self._forget()  # a batch's cache is large, and quick to make

    def _empty(self, seat: Seat) -> None:
        """Free a conversation's slot; an answer that nobody waits for any more is cancelled first."""
        for running in [r for r in (*self._waiting, *self._talks) if r.seat is seat]:
            running.stop()
            self._end(running, "cancelled")
        coming = [] if self._entering is None else self._entering.talks
        for talk in (*self._placed, *coming):
            if talk.running.seat is seat:
                talk.running.stop()
        if not seat.busy:
            self._slots.give(seat)
        else:  # once it has come in
            with self._changed:
                self._vacated.append(seat)

    def _give_up(self, behind: Sequence[Talk]) -> float:
        """End answers that nobody has read for too long; returns the seconds until the next one."""
        wait, now = float("inf"), time.perf_counter()
        for talk in behind if self.patience is not None else ():
            left = talk.running.rested + self.patience - now  # type: ignore[operator]  # it is a number here
            if talk.running.resting and left <= 0:
                talk.running.reply.fail(f"nobody has read this answer for {self.patience:g} s; ask again, and read its events")
                self._end(talk.running, "error")
            else:
                wait = min(wait, max(left, 0.01))
        return wait

    def _verdict(self, running: Running) -> Verdict:
        """Whether a live listener's answer fits beside the others."""
        if running.codec is None or not running.task.audio:
            return Verdict(True)
        coming = [] if self._entering is None else self._entering.talks
        talks = [*self._talks.values(), *coming, *self._placed]
        live = sum(talk.running.pace == "live" for talk in talks)
        return admit(self._recorder, live, 1 / running.codec.frame_rate)

    def _place(self) -> None:
        """Give waiting questions their slots, in their order."""
        slots = self._slots
        while self._waiting:
            first = self._waiting[0]
            if (first.pace == "live" and not self._verdict(first).fits) or not self._room():
                break
            running = self._waiting.popleft()
            slots = self._slots
            slots.place(running.seat)
            talk = Talk(running, [running.seat.slot])  # type: ignore[list-item]  # it has one now
            if running.fork is not None:
                talk.slots.append(slots.take(running.seat))
            self._placed.append(talk)

    def _room(self) -> bool:
        """Whether the first of the waiting questions has its slots, or they were made."""
        runner, slots, seats = self.runner, self._slots, [running.seat for running in self._waiting]
        if runner is not None and not self._talks and self._entering is None and not self._placed:
            cache, norm = runner.cache, self.model.decoder.norm.weight
            if (cache.device, cache.dtype) != (norm.device, norm.dtype):  # the model was moved or cast
                self._forget()
                runner, slots = None, self._slots
        wanted = [(running.seat.slot is None) + (running.fork is not None) for running in self._waiting]
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
            self._collect(flush=True)
            runner.grow(number, length)
        slots.grow(number)
        return True

    def _forget(self) -> None:
        """Drop the cache; idle conversations are fed again."""
        for seat in self._slots.idle():
            seat.slot = None
        self.runner, self._slots = None, Slots(0)

    def _let_in(self, slack: float) -> None:
        """One piece of work for questions that come in: an encoding, or a piece of a prefill."""
        self._steps = 0
        runner = self.runner
        assert runner is not None
        if self._entering is None:
            self._placed, dropped = _split(self._placed)
            for talk in dropped:
                self._free(talk.running, talk)
            if not self._placed:
                return
            if any(unheard(talk) for talk in self._placed):
                for talk in encode(self.model, [talk for talk in self._placed if unheard(talk)]):
                    self._placed.remove(talk)
                    self._free(talk.running, talk, "error")
                return
            chosen = together(self._placed, runner)
            self._placed = [talk for talk in self._placed if talk not in chosen]
            self._entering = Entering(runner, chosen)
        entering = self._entering
        if all(talk.running.cancelled for talk in entering.talks):
            self._entering = None
            for talk in entering.talks:
                self._free(talk.running, talk)
            return
        columns = entering.left
        if slack < float("inf"):
            columns = max(16, int(slack / self._seconds / entering.rows))
        start, fed = time.perf_counter(), min(columns, entering.left, runner.chunk) * entering.rows
        if entering.piece(columns):
            self._entering = None
            for talk in entering.talks:
                self._talks[talk.running] = talk
                self._rows |= dict.fromkeys(talk.rows, talk)
        self._seconds = 0.5 * self._seconds + 0.5 * (time.perf_counter() - start) / fed
        if self._entering is None:
            self._collect()
            for talk in entering.talks:
                if talk.running.cancelled:
                    self._end(talk.running, "cancelled")

    def _refilled(self, slack: float, others: bool) -> bool:
        """Feed a piece of what stays of a conversation, where there is time; with others to step only now and then."""
        refill, columns = self._refills.first(self.runner), columns_in(slack, self._seconds)
        if self.runner is None or refill is None or not columns or (others and self._steps < PATIENCE):
            return False
        self._steps, start = 0, time.perf_counter()
        if fed := self._refills.piece(self.runner, refill, columns):
            self._seconds = 0.5 * self._seconds + 0.5 * (time.perf_counter() - start) / fed
        return True

    def _step(self, talks: Sequence[Talk]) -> None:
        runner = self.runner
        assert runner is not None
        full = [talk for talk in talks if talk.rows[0].position >= min(talk.running.seat.limit, runner.length)]
        if full:
            self._collect(flush=True)
            for talk in full:
                self._end(talk.running, "cache")
        rows = [row for talk in talks if not talk.left for row in talk.rows if not row.done]
        self._steps += 1
        start = time.perf_counter()
        runner.step(rows)
        self._collect()
        self._recorder.stepped(len(rows), time.perf_counter() - start)

    def _collect(self, flush: bool = False) -> None:
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
            limits = talk.running.reply.limits
            talk.columns.append(output.column)
            talk.frames += output.frame is not None
            talk.running.written += 1
            outputs.append((talk.running, output))
            if output.broken:
                complete.append((talk.running, "error"))
            elif output.done:
                complete.append((talk.running, "end"))
            elif len(talk.columns) >= limits.columns or talk.frames > limits.frames:
                complete.append((talk.running, "length"))
        if outputs:
            self._sound.put(outputs)
        for running, reason in complete:
            self._end(running, reason)
        if not self._talks:
            runner.results(flush=True)  # of rows that have left

    def _drop(self, talk: Talk, row: RunnerRow) -> None:
        """Free the second row of a talk, whose text has ended."""
        assert self.runner is not None
        self.runner.leave(row)
        talk.rows.remove(row)
        talk.slots.remove(row.slot)
        del self._rows[row]
        self._slots.drop(row.slot)

    def _end(self, running: Running, reason: Reason) -> None:
        """Let an answer go: its rows leave, and its slot remembers what it holds."""
        talk = self._talks.pop(running, None)
        if talk is None:
            if running in self._waiting:
                self._waiting.remove(running)
                self._free(running)
            return  # it comes in, and goes when its turn comes
        assert self.runner is not None
        for row in talk.rows:
            self.runner.leave(row)
            del self._rows[row]
        held = running.seat.held
        held.add(talk.columns[:-1], talk.rows[0].position)
        if reason == "error" or running.reply.error is not None:
            held.keys = []
        self._free(running, talk, reason)

    def _free(self, running: Running, talk: Talk | None = None, reason: Reason = "cancelled") -> None:
        if talk is not None:
            talk.left = True
            for slot in talk.slots[1:]:
                self._slots.drop(slot)
            running.seat.busy = False
        running.release()
        running.left.set()
        self._sound.end(running, reason)

    def _fail(self, error: BaseException) -> None:
        """Give everybody who is under way the error; the cache is made again."""
        entering = [] if self._entering is None else self._entering.talks
        talks = [*self._talks.values(), *entering, *self._placed]
        self._talks, self._rows, self._placed, self._entering, self.runner = {}, {}, [], None, None
        for seat in {talk.running.seat for talk in talks} | set(self._slots.idle()):
            seat.slot, seat.busy = None, False
        self._slots = Slots(0)
        waiting, self._waiting = list(self._waiting), deque()
        for running in [*(talk.running for talk in talks), *waiting]:
            running.fail(error)
            self._free(running, reason="error")


def _split(talks: Sequence[Talk]) -> tuple[list[Talk], list[Talk]]:
    """Those that still want an answer, and those that were cancelled."""
    return [t for t in talks if not t.running.cancelled], [t for t in talks if t.running.cancelled]
