"""The stepping thread: takes clients' `Requests` between two steps, and decides what comes next.

Deadlines belong to listeners. A listener who has heard nothing yet, or only the first frames, is served at once, as is one who
holds less than `LOW` frames: two, or as many as sound for 0.16 s, for which a thread of a busy machine may well have to wait
for its core. When somebody is low, rows that hold less than `HIGH` come along, until most hold so much; then all rest until
somebody is low again, so that rows stay together, and the time between belongs to questions that come in. Answers that nobody
plays (a program reads them) are written whenever nothing else is due.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from omni.engine.answer import AHEAD, UNREAD, Running, Seat
from omni.engine.batch import EngineBatch
from omni.engine.intake import Intake
from omni.engine.prefill_ahead import Listen, Refill
from omni.engine.stats import Recorder
from omni.engine.worker import Worker
from omni.utils.hardware import release_threads


class Requests:
    """Written by clients and the sound thread, taken by the stepping thread; `lock` guards all of it.

    Attributes:
        wake: has the stepping thread take them; closed: nobody does any more.
        seats: of the open conversations.
        asked: questions that were not taken yet; ended: answers that are to end; vacated: seats of conversations that have
            ended; threads: CPU threads of the thread that asked last, 0 before anybody asked.
        refills: what stays of conversations whose oldest turns went; listens: questions whose sound is still coming.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wake: Callable[[], None] = lambda: None
        self.closed = False
        self.refills: dict[Seat, Refill] = {}
        self.listens: dict[Seat, Listen] = {}
        self.seats: weakref.WeakSet[Seat] = weakref.WeakSet()
        self.asked: deque[Running] = deque()
        self.ended: list[Running] = []
        self.vacated: list[Seat] = []
        self.threads = 0

    def hand_over(self) -> None:
        """From here on the stepping thread computes, with as many threads as this one."""
        self.threads = torch.get_num_threads()
        release_threads()
        self.wake()

    def refill(self, refill: Refill) -> None:
        """Feed what stays of a conversation before its next question, in the time that nobody else needs."""
        if not self.closed:
            self.refills[refill.seat] = refill
            self.wake()

    def listen(self, listen: Listen) -> None:
        """Listen to a conversation's next question while its sound comes, in the time that nobody else needs; what stays of the
        conversation is fed with it."""
        with self.lock:
            if not self.closed:
                self.listens[listen.seat] = listen
                self.refills.pop(listen.seat, None)
                self.hand_over()

    def listening(self) -> list[Listen]:
        """The questions that are listened to, in their order; those that nobody wants any more are dropped."""
        with self.lock:
            self.listens = {seat: listen for seat, listen in self.listens.items() if not listen.stream.closed}
            return [*self.listens.values()]

    def later(self, listen: Listen) -> None:
        """Let others that are listened to come first."""
        with self.lock:
            if self.listens.get(listen.seat) is listen:
                self.listens[listen.seat] = self.listens.pop(listen.seat)

    def end(self, running: Running) -> None:
        """Have an answer end."""
        with self.lock:
            self.ended.append(running)
        self.wake()


TOLD = AHEAD // 4
"""Time steps of which the listener in another process may not have told yet that it has read them."""


LOW, HIGH = 2.0, 8.0
"""Frames of sound that live listeners hold: a row whose listener holds less than the first is stepped at once, and one whose
listener holds more than the second rests."""

LEAST = 0.16
"""Seconds that `LOW` stands for at least, for frames that are short; `HIGH` is raised by as many frames."""


@dataclass
class Due:
    """Answers by what their listeners hold.

    Attributes:
        new: of live listeners who have heard nothing yet, or the first frames only, to be stepped at once.
        low: of those who hold little, to be stepped at once.
        along: of others, to be stepped with the low ones; full, the number of those that hold enough.
        read: of programs that read.
        behind: of programs that do not.
        lost: of live listeners who do not, for too long.
        slack: seconds until another live listener is low; infinite where there is none.
        spare: seconds until one of them has run out of sound; infinite where there is none.
        late: somebody has run out of sound.
    """

    new: list[Running] = field(default_factory=list)
    low: list[Running] = field(default_factory=list)
    along: list[Running] = field(default_factory=list)
    full: int = 0
    read: list[Running] = field(default_factory=list)
    behind: list[Running] = field(default_factory=list)
    lost: list[Running] = field(default_factory=list)
    slack: float = float("inf")
    spare: float = float("inf")
    late: bool = False


def choose(answers: Iterable[Running], now: float, unread: float = UNREAD) -> Due:
    """Sort the answers whose rows have started by what their listeners hold at the time `now` of `time.perf_counter`.
    `unread`: seconds of sound that a live listener may leave unread, besides what is written ahead of it."""
    due, least = Due(), float("inf")
    for running in answers:
        if not running.live:
            whole = running.pace == "whole" or (running.ahead < AHEAD and not running.resting)
            (due.read if whole else due.behind).append(running)
            continue
        low = max(LOW, LEAST * running.frame_rate)
        high = HIGH + low - LOW
        if running.processed - running.read > high + TOLD + unread * running.frame_rate:
            due.lost.append(running)
        elif running.plays is None and not running.exact:
            due.new.append(running)
        else:
            played = 0.0 if running.plays is None else now - running.plays  # 0 for one that is about to play
            held = running.exact - played * running.frame_rate  # frames
            due.late |= held <= 0
            if running.exact <= low or running.plays is None:
                due.new.append(running)
            elif held < low:
                due.low.append(running)
            elif held < high:
                due.along.append(running)
            else:
                due.full += 1
            if (seconds := held / running.frame_rate) < least:
                least, due.slack = seconds, seconds - low / running.frame_rate
    due.spare = least
    return due


PATIENCE = 8
"""Steps after which a piece of a question is let in although somebody's sound may come late by it."""

BETWEEN = 2
"""Steps between two pieces of questions while everybody's sound lasts longer than a step and a piece."""


class SteppingThread:
    """Steps the rows of a batch and lets questions in; the only thread that changes either.

    Args:
        requests: of clients.
        patience: as for `omni.engine.engine.Engine`.
    """

    def __init__(
        self, requests: Requests, batch: EngineBatch, intake: Intake, recorder: Recorder, patience: float | None
    ) -> None:
        self._requests, self._batch, self._intake, self._recorder = requests, batch, intake, recorder
        self._patience, self._unread = patience, UNREAD if patience is None else patience
        self._steps = self._unfed = 0  # since a piece of a question, and since one that was fed ahead
        self._filling = False
        self.worker = Worker("omni-engine", self._turn)
        requests.wake = self.worker.wake

    def close(self) -> None:
        """End the thread, and all answers."""
        self.worker.stop()
        self._take()
        for running in [*self._intake.clear(), *self._batch.answers]:
            running.stop()
            running.release()
            running.left.set()
        self._batch.forget()

    def _turn(self) -> float | None:
        """One piece of work between two boundaries; see `Worker`."""
        try:
            return self._work()
        except BaseException as error:  # of all that are under way, since the rows' state is not known; the cache is made again
            under: list[Running] = [*self._batch.answers, *self._intake.clear()]
            self._batch.forget()
            for running in under:
                running.fail(error)
                self._batch.release(running, "error")
            return 0.0

    def _work(self) -> float | None:
        batch, intake = self._batch, self._intake
        self._take()
        intake.place()
        due = choose(batch.answers, time.perf_counter(), self._unread)
        unknown = not all([running.rest() for running in due.behind])
        self._recorder.slack = None if due.slack == float("inf") else due.slack
        wait = self._give_up(due)
        incoming = intake.entering is not None or bool(intake.placed)
        spare = max(due.slack, due.spare - 1.5 * batch.seconds)
        waited = self._steps >= (BETWEEN if spare > batch.seconds else PATIENCE)
        urgent = due.new + due.low
        self._filling = bool(due.low) or (self._filling and len(due.along) > due.full)
        answers = (due.along if self._filling else []) + due.read
        if urgent and not (incoming and waited):
            answers = urgent + self._beside(urgent, due)
        elif incoming:
            self._let_in(spare)
            return 0.0
        elif self._refill(due.slack, bool(due.read)):
            return 0.0
        if not answers:
            slack = min(due.slack, wait, 0.01) if unknown else min(due.slack, wait)
            return None if slack == float("inf") else max(slack, 1e-4)
        self._steps, self._unfed = self._steps + 1, self._unfed + 1
        batch.step(answers)
        return 0.0

    def _let_in(self, spare: float) -> None:
        """Feed a piece of the questions that come in, and more of them while half of `spare` seconds is left."""
        self._steps, start, passed = 0, time.perf_counter(), 0.0
        while True:
            self._intake.piece(spare - passed)
            passed = time.perf_counter() - start
            if not self._intake.coming or 2 * passed >= spare or spare == float("inf"):
                return

    def _beside(self, urgent: Sequence[Running], due: Due) -> list[Running]:
        """Answers that a step takes besides those that cannot wait."""
        fixed, each = self._recorder.cost() or (1.0, 0.0)
        alone, more = fixed + each * len(urgent), each * len(due.along)
        cheap = 4 * more <= alone  # of a large model, whose step costs little more with them
        if due.late or (not cheap and due.spare < 2 * (alone + more)):  # somebody's sound runs out if it takes twice as long
            return []
        if self._filling:
            return due.along + due.read
        return due.along if cheap else []

    def _refill(self, slack: float, read: bool) -> bool:
        """Feed a piece of a question whose sound is still coming, or of what stays of a conversation, where there is time: with
        rows to fill only now and then, and the latter also with rows that programs read."""
        wait = self._unfed < PATIENCE
        fed = not (self._filling and wait) and self._listen(slack)
        fed = fed or (not ((self._filling or read) and wait) and self._feed_what_stays(slack))
        self._unfed = 0 if fed else self._unfed
        return fed

    def _listen(self, slack: float) -> bool:
        start, every = time.perf_counter(), self._requests.listening()
        for listen in every:
            if self._intake.listen(listen, [other.seat for other in every], slack):
                self._requests.later(listen)
                self._recorder.note(hearing=time.perf_counter() - start)
                return True
        return False

    def _feed_what_stays(self, slack: float) -> bool:
        """Feed a piece of the refill that waits longest. Those of conversations that have lost their slot, or are being
        answered, are dropped: the question feeds what is left."""
        requests = self._requests
        for seat, refill in list(requests.refills.items()):
            ready = self._batch.runner is not None and seat.slot is not None and not seat.busy
            fed = self._intake.refill(refill, slack) if ready else 0
            with requests.lock:
                if fed == 0 and requests.refills.get(seat) is refill:
                    del requests.refills[seat]
            if ready:
                return fed is not None
        return False

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
        batch = self._batch
        large = batch.runner is not None and len(batch.runner.rows) > 2 and batch.fixed is None
        if vacated and empty and large and batch.model.device.type == "cpu" and not batch.busy:
            batch.forget()  # a large cache that nobody uses: it is quick to make

    def _empty(self, seat: Seat) -> None:
        """Free a conversation's slot; an answer that nobody waits for any more is cancelled first."""
        intake, batch = self._intake, self._batch
        for running in [each for each in (*intake.waiting, *intake.coming, *batch.answers) if each.seat is seat]:
            running.stop()
            if not batch.end(running, "cancelled"):
                intake.drop(running)
        if seat.busy:  # once it has come in
            self._requests.vacated.append(seat)
        else:
            self._batch.slots.give(seat)

    def _give_up(self, due: Due) -> float:
        """End answers that nobody has read for too long; returns the seconds until the next one."""
        ended, wait, now = [*due.lost], float("inf"), time.perf_counter()
        for running in due.behind if self._patience is not None else ():
            left = running.rested + self._unread - now
            if running.resting and left <= 0:
                ended.append(running)
            else:
                wait = min(wait, max(left, 0.01))
        for running in ended:
            running.reply.fail(f"nobody has read this answer for {self._unread:g} s; ask again, and read its events")
            self._batch.end(running, "error")
        return wait
