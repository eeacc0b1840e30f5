"""Handles requests to stop: SIGTERM, SIGHUP and Ctrl-C are noted, and the loop ends after the current step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from omni.process import ENDING

SIGNALS = (*ENDING, signal.SIGINT)


class Stop:
    """A context that notes the first signal in `number`; a second Ctrl-C interrupts at once.

    Data workers forked in it inherit the handler: they leave Ctrl-C to their parent, and other signals end them as usual.
    """

    def __init__(self) -> None:
        self.number = 0
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        heeded = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # `nohup` ignores it
        self._before = {s: signal.signal(s, self._note) for s in heeded}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = self.number or number
