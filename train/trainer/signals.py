"""Handles requests to stop: SIGTERM, SIGHUP and Ctrl-C are noted, and the loop ends after the current step.

The handler only writes a byte to a pipe: a thread that waits for it prints what the run does now, because the handler may have
interrupted the main thread within a lock of the screen.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
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
        self.number = 0
        self.say = say
        self.phase: Phase = "step"
        self._at: Phase = "step"
        self._came = 0.0
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._outer: Stop | None = None
        self._pipe: tuple[int, int] | None = None
        self._teller: threading.Thread | None = None

    def __enter__(self) -> Stop:
        if self.say is not None:
            self._pipe = os.pipe()
            self._teller = threading.Thread(target=self._tell, args=(self._pipe[0], self.say), daemon=True)
            self._teller.start()
        heeded = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # `nohup` ignores it
        self._outer, Stop.active = Stop.active, self
        self._before = {s: signal.signal(s, self._note) for s in heeded}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        Stop.active = self._outer
        if self._pipe is not None and self._teller is not None:
            os.write(self._pipe[1], b"0")
            self._teller.join(1.0)
            if not self._teller.is_alive():
                for end in self._pipe:
                    os.close(end)
            self._pipe = None

    def _tell(self, end: int, say: Callable[[str], None]) -> None:
        while os.read(end, 1) == b"1":
            say(f"{signal.Signals(self.number).name}: {TOLD[self._at]}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.number and number == signal.SIGINT and time.monotonic() - self._came >= SAME:
            raise KeyboardInterrupt
        if not self.number:
            self.number, self._at, self._came = number, self.phase, time.monotonic()
            if self._pipe is not None:
                os.write(self._pipe[1], b"1")


def break_off() -> None:
    """Raises `BrokenOff` where a run in this process has been asked to stop."""
    if Stop.active is not None and Stop.active.number:
        raise BrokenOff
