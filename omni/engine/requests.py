"""What clients ask of the stepping thread, kept until its next boundary."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from omni.engine.client import Running
from omni.engine.forget import Refills
from omni.engine.listen import Listen, Listens
from omni.engine.slots import Seat


class Taken(NamedTuple):
    """What was asked since the boundary before.

    Attributes:
        asked: new questions, in their order.
        ended: answers that are to end.
        vacated: places of conversations that have ended.
        empty: whether no conversation is open any more.
        threads: CPU threads of the thread that asked last, 0 before anybody asked.
    """

    asked: Sequence[Running]
    ended: Sequence[Running]
    vacated: Sequence[Seat]
    empty: bool
    threads: int


class Requests:
    """Written by clients and the sound thread, taken by the stepping thread; `lock` guards all of it.

    Attributes:
        wake: has the stepping thread take them.
        seats: places of the open conversations.
        asked: questions that were not taken yet.
        refills: what stays of conversations whose oldest turns went; listens: questions whose sound is still coming. They have
            locks of their own.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wake: Callable[[], None] = lambda: None
        self.refills, self.listens = Refills(), Listens()
        self.seats: weakref.WeakSet[Seat] = weakref.WeakSet()
        self.asked: deque[Running] = deque()
        self._ended: list[Running] = []
        self._vacated: list[Seat] = []
        self._threads = 0

    def ask(self, asked: Sequence[Running]) -> None:
        """Have questions answered; those that were cancelled before are left out. `lock` is held."""
        for running in asked:
            running.hungry = self.wake
            if not running.left.is_set():
                running.given = True
                self.asked.append(running)
        self._threads = torch.get_num_threads()

    def listen(self, listen: Listen) -> None:
        """Have a question listened to; what stays of its conversation is fed with it."""
        with self.lock:
            self._threads = torch.get_num_threads()
        self.listens.put(listen)
        self.refills.drop_of(listen.seat)

    def withdraw(self, running: Running) -> bool:
        """Let a question go that was not asked yet; returns whether it was not."""
        with self.lock:
            if running.given:
                return False
            running.release()
            running.left.set()
            return True

    def end(self, running: Running) -> None:
        """Have an answer end."""
        with self.lock:
            self._ended.append(running)
        self.wake()

    def vacate(self, seat: Seat) -> None:
        """Have a conversation's slot freed; the stepping thread is not woken."""
        self.listens.drop(seat)
        with self.lock:
            self._vacated.append(seat)
            self.seats.discard(seat)

    def take(self) -> Taken:
        """All requests; they are no longer here then."""
        with self.lock:
            taken = Taken([*self.asked], self._ended, self._vacated, not self.seats, self._threads)
            self.asked.clear()
            self._ended, self._vacated = [], []
        return taken
