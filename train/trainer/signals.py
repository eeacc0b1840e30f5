"""Handles requests to stop: SIGTERM, SIGHUP and Ctrl-C are noted, and the loop ends after the current step.

The handler only puts a line into a queue: a thread prints it, because the handler may have interrupted the main thread within a
lock of the screen.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any, ClassVar, Literal

from omni.utils.process import ENDING

SIGNALS = (*ENDING, signal.SIGINT)

Phase = Literal["step", "validation", "end"]

TOLD: dict[Phase, str] = {
    "step": "the run stops after this step and saves its state; Ctrl-C again ends it at once, without saving",
    "validation": "the validation is broken off, and the state saved; Ctrl-C again ends the run at once, without saving",
    "end": "the last step is done, and the run ends once its results are written; Ctrl-C again ends it at once, without them",
}
"""What the first signal brings about, by what the run is doing."""


SAME = 0.3
"""Seconds in which another Ctrl-C is the same one: torchrun sends its processes what they have from the terminal already."""


class BrokenOff(Exception):
    """Ends a validation during which the run was asked to stop."""


class Stop:
    """A context that notes the first signal in `number`; a Ctrl-C after it interrupts at once.

    `say` prints a line, from another thread, when the first signal has come, by the `phase` of the run. Data workers forked
    in it inherit the handler: they leave Ctrl-C to their parent, and other signals end them as usual.
    """

    active: ClassVar[Stop | None] = None
    """The innermost one."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.number, self.say = 0, say
        self.phase: Phase = "step"
        self._came, self._pid = 0.0, os.getpid()
        self._lines = SimpleQueue[str | None]()
        self._printer = threading.Thread(target=self._print, daemon=True)
        self._before: dict[int, Any] = {}
        self._outer: Stop | None = None

    def __enter__(self) -> Stop:
        if self.say is not None:
            self._printer.start()
        heeded = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # `nohup` ignores it
        self._outer, Stop.active = Stop.active, self
        self._before = {s: signal.signal(s, self._note) for s in heeded}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        Stop.active = self._outer
        if self.say is not None:
            self._lines.put(None)
            self._printer.join(1.0)

    def _print(self) -> None:
        while (line := self._lines.get()) is not None and self.say is not None:
            self.say(line)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.number and number == signal.SIGINT and time.monotonic() - self._came >= SAME:
            raise KeyboardInterrupt
        if not self.number:
            self.number, self._came = number, time.monotonic()
            self._lines.put(f"{signal.Signals(number).name}: {TOLD[self.phase]}")  # which may be interrupted by itself


def break_off() -> None:
    """Raises `BrokenOff` where a run in this process has been asked to stop."""
    if Stop.active is not None and Stop.active.number:
        raise BrokenOff
