"""The stepping thread: takes clients' `Requests` between two steps, and decides what comes next."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from omni.engine.answer import UNREAD, Running
from omni.engine.batch import EngineBatch
from omni.engine.entering import Talk
from omni.engine.intake import Intake
from omni.engine.prefill_ahead import Listen, Listens, Refills
from omni.engine.schedule import Due, Watermarks, choose
from omni.engine.slots import Seat
from omni.engine.stats import Recorder
from omni.engine.worker import Worker


class Requests:
    """Written by clients and the sound thread, taken by the stepping thread; `lock` guards all of it.

    Attributes:
        wake: has the stepping thread take them.
        seats: of the open conversations.
        asked: questions that were not taken yet; ended: answers that are to end; vacated: seats of conversations that have
            ended; threads: CPU threads of the thread that asked last, 0 before anybody asked.
        refills: what stays of conversations whose oldest turns went; listens: questions whose sound is still coming. They have
            locks of their own.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wake: Callable[[], None] = lambda: None
        self.refills, self.listens = Refills(), Listens()
        self.seats: weakref.WeakSet[Seat] = weakref.WeakSet()
        self.asked: deque[Running] = deque()
        self.ended: list[Running] = []
        self.vacated: list[Seat] = []
        self.threads = 0

    def ask(self, asked: Sequence[Running]) -> None:
        """Have questions answered; those that were cancelled before are left out. `lock` is held."""
        for running in asked:
            running.hungry = self.wake
            if not running.left.is_set():
                running.submitted = True
                self.asked.append(running)
        self.threads = torch.get_num_threads()

    def listen(self, listen: Listen) -> None:
        """Have a question listened to; what stays of its conversation is fed with it."""
        with self.lock:
            self.threads = torch.get_num_threads()
        self.listens.put(listen)
        self.refills.drop_of(listen.seat)

    def withdraw(self, running: Running) -> bool:
        """Let a question go that was not asked yet; returns whether it was not."""
        with self.lock:
            if running.submitted:
                return False
            running.release()
            running.left.set()
            return True

    def end(self, running: Running) -> None:
        """Have an answer end."""
        with self.lock:
            self.ended.append(running)
        self.wake()

    def vacate(self, seat: Seat) -> None:
        """Have a conversation's slot freed; the stepping thread is not woken."""
        self.listens.drop(seat)
        with self.lock:
            self.vacated.append(seat)
            self.seats.discard(seat)


PATIENCE = 8
"""Steps after which a piece of a question is let in although somebody's sound may come late by it."""

BETWEEN = 2
"""Steps between two pieces of questions while everybody's sound lasts longer than a step and a piece."""


class SteppingThread:
    """Steps the rows of a batch and lets questions in; the only thread that changes either.

    Args:
        requests: of clients.
        marks, patience: as for `omni.engine.engine.Engine`.
    """

    def __init__(
        self,
        requests: Requests,
        batch: EngineBatch,
        intake: Intake,
        recorder: Recorder,
        marks: Watermarks,
        patience: float | None,
    ) -> None:
        self._requests, self._batch, self._intake, self._recorder = requests, batch, intake, recorder
        self._marks, self._patience = marks, patience
        self._unread = UNREAD if patience is None else patience
        self._steps = self._unfed = 0  # since a piece of a question, and since one that was fed ahead
        self._filling = False
        self.worker = Worker("omni-engine", self._turn)
        requests.wake = self.worker.wake

    def close(self) -> None:
        """End the thread, and all answers."""
        self.worker.stop()
        self._take()
        for running in [*self._intake.clear(), *self._batch.talks]:
            running.stop()
            running.release()
            running.left.set()
        self._batch.forget()

    def _turn(self) -> float | None:
        """One piece of work between two boundaries; see `Worker`."""
        try:
            return self._work()
        except BaseException as error:  # of all that are under way, since the rows' state is not known
            self._fail(error)
            return 0.0

    def _work(self) -> float | None:
        batch, intake = self._batch, self._intake
        self._take()
        intake.place()
        due = choose(batch.talks.values(), time.perf_counter(), self._marks, self._unread)
        unknown = not all([talk.running.rest() for talk in due.behind])
        self._recorder.slack = None if due.slack == float("inf") else due.slack
        wait = self._give_up(due)
        incoming = intake.entering is not None or bool(intake.placed)
        spare = max(due.slack, due.spare - 1.5 * batch.seconds)
        waited = self._steps >= (BETWEEN if spare > batch.seconds else PATIENCE)
        urgent = due.new + due.low
        self._filling = bool(due.low) or (self._filling and len(due.along) > due.full)
        if urgent and not (incoming and waited):
            self._step(urgent + self._beside(urgent, due))
        elif incoming:
            self._let_in(spare)
        elif self._refill(due.slack, bool(due.read)):
            pass
        elif self._filling:
            self._step(due.along + due.read)
        elif due.read:
            self._step(due.read)
        else:
            slack = min(due.slack, wait, 0.01) if unknown else min(due.slack, wait)
            return None if slack == float("inf") else max(slack, 1e-4)
        return 0.0

    def _let_in(self, spare: float) -> None:
        """Feed a piece of the questions that come in, and more of them while half of `spare` seconds is left."""
        self._steps, start, passed = 0, time.perf_counter(), 0.0
        while True:
            self._intake.piece(spare - passed)
            passed = time.perf_counter() - start
            if not self._intake.coming or 2 * passed >= spare or spare == float("inf"):
                return

    def _beside(self, urgent: Sequence[Talk], due: Due) -> list[Talk]:
        """Talks that a step takes besides those that cannot wait."""
        fixed, each = self._recorder.cost() or (1.0, 0.0)
        alone, more = fixed + each * len(urgent), each * len(due.along)
        cheap = 4 * more <= alone  # of a large model, whose step costs little more with them
        if due.late or (not cheap and due.spare < 2 * (alone + more)):  # somebody's sound runs out if it takes twice as long
            return []
        if self._filling:
            return due.along + due.read
        return due.along if cheap else []

    def _step(self, talks: Sequence[Talk]) -> None:
        self._steps, self._unfed = self._steps + 1, self._unfed + 1
        self._batch.step(talks)

    def _refill(self, slack: float, read: bool) -> bool:
        """Feed a piece of a question whose sound is still coming, or of what stays of a conversation, where there is time: with
        rows to fill only now and then, and the latter also with rows that programs read."""
        requests, wait = self._requests, self._unfed < PATIENCE
        start = time.perf_counter()
        listened = not (self._filling and wait) and self._intake.listen(requests.listens, slack)
        if listened:
            self._recorder.heard(time.perf_counter() - start)
        if not listened and (((self._filling or read) and wait) or not self._intake.refill(requests.refills, slack)):
            return False
        self._unfed = 0
        return True

    def _take(self) -> None:
        """Take what clients asked for since the last boundary."""
        requests = self._requests
        with requests.lock:  # a question is in one of the two places at any time
            ended, vacated, requests.ended, requests.vacated = requests.ended, requests.vacated, [], []
            self._intake.waiting += requests.asked
            requests.asked.clear()
            empty, threads = not requests.seats, requests.threads
        if threads and threads != torch.get_num_threads():
            torch.set_num_threads(threads)  # each thread has its own number
        for running in ended:
            if not self._batch.end(running, "cancelled"):
                self._intake.drop(running)
        for seat in vacated:
            self._empty(seat)
        if vacated and empty:
            self._batch.shrink()

    def _empty(self, seat: Seat) -> None:
        """Free a conversation's slot; an answer that nobody waits for any more is cancelled first."""
        self._intake.cancel(seat)
        for running in [running for running in self._batch.talks if running.seat is seat]:
            running.stop()
            self._batch.end(running, "cancelled")
        if not self._batch.empty(seat):  # once it has come in
            self._requests.vacate(seat)

    def _give_up(self, due: Due) -> float:
        """End answers that nobody has read for too long; returns the seconds until the next one."""
        for talk in due.lost:
            self._unheard(talk.running, self._unread)
        wait, now = float("inf"), time.perf_counter()
        if self._patience is None:
            return wait
        for talk in due.behind:
            left = talk.running.rested + self._patience - now
            if talk.running.resting and left <= 0:
                self._unheard(talk.running, self._patience)
            else:
                wait = min(wait, max(left, 0.01))
        return wait

    def _unheard(self, running: Running, seconds: float) -> None:
        running.reply.fail(f"nobody has read this answer for {seconds:g} s; ask again, and read its events")
        self._batch.end(running, "error")

    def _fail(self, error: BaseException) -> None:
        """Give everybody who is under way the error; the cache is made again."""
        under: list[Running] = [*self._batch.talks, *self._intake.clear()]
        self._batch.forget()
        for running in under:
            running.fail(error)
            self._batch.release(running, "error")
