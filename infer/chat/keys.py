"""Keys and Ctrl-C of a chat: Enter, the end of the input (Ctrl-D), and interruptions."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

Key = Literal["enter", "end", "interrupt"]

TWICE = 2.0
"""Seconds within which a second Ctrl-C leaves."""


@contextlib.contextmanager
def keys(deliver: Callable[[Key], None], piped: bool = False) -> Iterator[None]:
    """Deliver the keys of the terminal on standard input, in a thread of their own, while the block runs.

    The terminal shows nothing that is typed meanwhile; it is restored afterwards.

    Args:
        piped: also take lines from what is no terminal.
    """
    try:
        number = sys.stdin.fileno()
        terminal = os.isatty(number)
    except (OSError, ValueError, AttributeError):  # closed, or a stand-in
        number, terminal = -1, False
    if number < 0 or not (terminal or piped):
        yield
        return
    woken, wake = os.pipe()
    thread = threading.Thread(target=_read, args=(number, woken, deliver), name="omni-keys", daemon=True)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, woken)
        if terminal:
            stack.enter_context(_quiet(number))
        thread.start()
        stack.callback(thread.join)
        stack.callback(os.close, wake)
        yield


def _read(number: int, woken: int, deliver: Callable[[Key], None]) -> None:
    """Until the input or the pipe `woken` ends; past Python's buffer, whose lock would keep the process from ending."""
    while True:
        ready, _, _ = select.select([number, woken], [], [])
        if woken in ready:
            return
        try:
            typed = os.read(number, 1024)
        except OSError:  # the terminal is gone
            typed = b""
        for _ in range(typed.count(b"\n")):
            deliver("enter")
        if not typed:
            deliver("end")
            return


@contextlib.contextmanager
def _quiet(number: int) -> Iterator[None]:
    """A terminal that shows nothing that is typed."""
    import termios

    before = termios.tcgetattr(number)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    try:
        termios.tcsetattr(number, termios.TCSADRAIN, quiet)
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


@contextlib.contextmanager
def interruptions(deliver: Callable[[Key], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Deliver Ctrl-C while the block runs; a second one within `TWICE` seconds raises KeyboardInterrupt."""
    latest = -TWICE

    def came(number: int, frame: FrameType | None) -> None:
        nonlocal latest
        now = clock()
        if now - latest < TWICE:
            raise KeyboardInterrupt
        latest = now
        deliver("interrupt")

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, came)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
