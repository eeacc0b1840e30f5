"""What the engine's process sends: the events of answers, as their listeners take them, and replies.

An event waits with its answer (`omni.engine.client.Running`) until its listener in the other process has taken it, so that the
row rests, and the history is cut, as for a listener of this process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from omni.engine.client import Running
from omni.engine.wire import Item, pack, pack_error
from omni.generate.results import Ended

TOGETHER = 1e-3
"""Seconds for which the first event of a step waits for the others."""

LOOK = 0.1
"""Seconds between two looks at rows that rest."""


@dataclass(eq=False)
class SentAnswer:
    """An answer: the number of its events that were sent and not taken, and that were taken; `over` once its end was sent;
    `asked`, whether its listener was asked how far it is."""

    running: Running
    sent: int = 0
    taken: int = 0
    asked: bool = False
    over: bool = False


class Outbox:
    """Sends, in a thread of its own: one message for all that a step gave, and for all replies.

    Args:
        lost: set when nobody reads any more.

    Attributes:
        answers: those whose events are sent, by their numbers.
    """

    def __init__(self, pipe: Connection, lost: threading.Event) -> None:
        self.answers: dict[int, SentAnswer] = {}
        self._pipe, self._lost = pipe, lost
        self._replies: deque[Item] = deque()
        self._noted: deque[int] = deque()
        self._news = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._send, name="omni-send", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def open(self, number: int, running: Running) -> None:
        """Send an answer's events from now on."""
        running.wake = lambda: self.note(number)
        self.answers[number] = SentAnswer(running)

    def note(self, number: int) -> None:
        """An answer has an event, or its end."""
        self._noted.append(number)
        self._news.set()

    def reply(self, item: Item) -> None:
        self._replies.append(item)
        self._news.set()

    def taken(self, number: int, taken: int) -> None:
        """Count events as delivered, up to the number `taken`."""
        answer = self.answers.get(number)
        if answer is None:
            return
        answer.asked = False
        with answer.running.changed:
            while answer.taken < taken and not answer.running.cancelled:
                answer.running.poll()
                answer.taken += 1
                answer.sent -= 1

    def again(self, number: int) -> None:
        """Send an answer's end once more: it has become another."""
        if (answer := self.answers.get(number)) is not None:
            answer.over = False
            self.note(number)

    def finish(self) -> None:
        """Send what is left, and `bye`."""
        for number in list(self.answers):
            self.note(number)
        self._replies.append(("bye",))
        self._stopped = True
        self._news.set()
        self._thread.join(5)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        looked = 0.0
        while True:
            self._news.wait(LOOK if self.answers else None)
            self._news.clear()
            last = self._stopped
            if self._noted and not self._replies:
                time.sleep(TOGETHER)
            items: list[Item] = [self._noted_items(number) for number in dict.fromkeys(_all(self._noted))]
            if (now := time.monotonic()) >= looked + LOOK:
                looked = now
                items += [("where", number) for number, answer in list(self.answers.items()) if _rests(answer)]
            items = [item for item in items if item[-1] != []] + _all(self._replies)
            try:
                if items:
                    self._pipe.send_bytes(pack(items))
            except OSError:
                self._lost.set()
                return
            if last:
                return

    def _noted_items(self, number: int) -> Item:
        """The events of an answer that were not sent yet, or its failure."""
        answer = self.answers.get(number)
        if answer is None or answer.over:
            return ("events", number, [])
        running = answer.running
        with running.changed:
            if running.cancelled:  # by something else than its listener's cancel
                answer.over = True
                return ("events", number, [end_of(running)])
            events = running.coming(answer.sent)
            answer.sent += len(events)
            if not events and running.failure is not None:
                answer.over = True
                return ("failed", number, *pack_error(running.failure))
            if running.failure is not None:
                self.note(number)
            return ("events", number, [_timed(event, running) for event in events])


def end_of(running: Running) -> Ended:
    """The end of an answer that was stopped."""
    error = running.reply.error
    return Ended(running.ending if error is None else "error", running.timings(), error)


def _rests(answer: SentAnswer) -> bool:
    """Whether a row rests whose listener was not asked yet how far it is."""
    rests = answer.running.resting and not answer.asked
    answer.asked |= rests
    return rests


def _timed(event: Any, running: Running) -> Any:
    return Ended(event.reason, running.timings(), event.error) if isinstance(event, Ended) else event


def _all(waiting: deque[Any]) -> list[Any]:
    out = []
    while waiting:
        out.append(waiting.popleft())
    return out
