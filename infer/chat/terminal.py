"""The terminal of a chat: the conversation, one line under it that says what happens at present, keys and Ctrl-C.

Where there is no terminal the conversation goes to standard output, and a line of standard error tells each change of what
happens.
"""

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

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from infer.options import on_one_line

Doing = Literal["listening", "hearing you", "thinking", "speaking", "waiting", "connecting", "loading the model", "warming up"]

STYLES: dict[str, str] = {"listening": "green", "hearing you": "bold red", "thinking": "yellow", "speaking": "bold cyan"}

Key = Literal["enter", "end", "interrupt"]

TWICE = 2.0  # seconds within which a second Ctrl-C leaves


class ChatScreen:
    """A context manager; the terminal is as before afterwards. `caption` is the present answer, as far as it is shown."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._terminal else None
        self._doing, self._detail = "", ""
        self._held: list[Text] = []  # lines that wait for the end of the caption
        self.caption = ""

    def __enter__(self) -> ChatScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.caption:
            self.answered("(not finished)")
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()

    def doing(self, state: Doing, detail: str = "") -> None:
        """Tell what happens at present; `detail` is told on a terminal alone."""
        if (state, detail) == (self._doing, self._detail):
            return
        changed, self._doing, self._detail = state != self._doing, state, detail
        if self._live is not None:
            self._refresh()
        elif changed:
            print(f"[{state}]", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """Show the next piece of the answer."""
        if self._live is None:
            print(text if self.caption else f"model: {text}", end="", flush=True)
        self.caption += text
        self._refresh()

    def answered(self, note: str = "") -> None:
        """The answer is over."""
        text, self.caption = self.caption, ""
        if self._live is not None:
            self._refresh()  # before, without the caption
            self._console.print(Text.assemble(("model: ", "bold cyan"), text, (f"  {note}" if note else "", "dim")))
        else:
            print(f"{'' if text else 'model:'}{f' {note}' if note else ''}", flush=True)
        held, self._held = self._held, []
        for line in held:
            self.line(line)

    def you(self, text: str) -> None:
        """Show what was heard."""
        self.line(Text.assemble(("you: ", "bold green"), on_one_line(text)))

    def line(self, text: Text) -> None:
        """Show a line; outside of a terminal, once the answer under way is over."""
        if self._live is not None:
            self._console.print(text)
        elif self.caption:
            self._held.append(text)
        else:
            print(text.plain, flush=True)

    def tell(self, text: str) -> None:
        """Print a warning, an error or a hint, which go to standard error where there is no terminal."""
        if self._live is not None:
            self._console.print(Text(text, "yellow"))
        else:
            print(text, file=sys.stderr, flush=True)

    def _refresh(self) -> None:
        if self._live is None:
            return
        status = Text.assemble(("● ", STYLES.get(self._doing, "")), self._doing, (f"  {self._detail}", "dim"))
        status.no_wrap, status.overflow = True, "ellipsis"
        caption = [Text.assemble(("model: ", "bold cyan"), self.caption)] if self.caption else []
        self._live.update(Group(*caption, status), refresh=True)


@contextlib.contextmanager
def keys(deliver: Callable[[Key], None], piped: bool = False) -> Iterator[None]:
    """Deliver the keys of the terminal on standard input (`piped`: lines of what is none, too), in a thread of their own,
    while the block runs. The terminal shows nothing that is typed meanwhile; it is restored afterwards."""
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
