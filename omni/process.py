"""What a program owes the process it runs in: whole standard streams, an orderly end by signals, a quick exit.

Both doors (`python -m infer`, `python -m train`) go through `lead`; it knows nothing of commands.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from omni.errors import in_one_line

FAILED, BROKEN_PIPE = 1, 128 + signal.SIGPIPE

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a program as an exception does: what it was writing is closed or removed."""

GRACE = 1.0
"""Seconds in which another signal of `ENDING` counts as the same: it must not break off what the first one ends."""


def lead(main: Callable[[], int]) -> NoReturn:
    """Run a program's main function as this process, and end it with the code that it returns."""
    gc.disable()  # until `all_imported`
    open_streams()
    came = end_in_order()
    threading.excepthook = _thread_failed
    code: object = FAILED
    try:
        code = main()
    except SystemExit as done:
        code = done.code
    finally:
        code = last_flush(128 + came[-1] if came else code)
        gc.freeze()  # the interpreter's last collection would look at every object of torch, which takes half a second
    sys.exit(code)


def open_streams() -> None:
    """Give the program all three standard streams, which take any name.

    One that the caller has closed (`>&-`) leads nowhere: else the next file that is opened would take its number, and
    get what libraries print. Characters that a stream's encoding lacks (and bytes of a file's name that are not UTF-8)
    are written as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_RDWR)
                if nowhere != number:
                    os.dup2(nowhere, number)
                    os.close(nowhere)
                setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115 (for the whole process)
        elif number and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def end_in_order() -> list[int]:
    """Leave by an exception when a signal of `ENDING` comes; one that is ignored (`nohup`) stays ignored.

    While libraries are imported (until `all_imported`), which may swallow the exception, the process ends at once: nothing was
    written yet. What swallows it later meets the next signal's. Children that are forked later die of it as ever.

    Returns:
        the signals that an exception was raised for, as they come.
    """
    owner, came, latest = os.getpid(), list[int](), -GRACE

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal latest
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not gc.isenabled():
            os._exit(128 + number)
        if time.monotonic() - latest >= GRACE:
            latest = time.monotonic()
            came.append(number)
            raise SystemExit(128 + number)

    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)
    return came


def last_flush(code: object = 0) -> int:
    """Write out what the standard streams still hold, so that the interpreter has nothing to complain of; the exit code.

    Args:
        code: of the program so far, as `SystemExit` has it.
    """
    if isinstance(code, str):
        say(code)
    number = code if isinstance(code, int) else 0 if code is None else FAILED
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            number = number or BROKEN_PIPE
            forget(stream.fileno())
        except (OSError, ValueError) as error:
            if not number:
                say(f"error: {in_one_line(error)}")
            number = number or FAILED
            with contextlib.suppress(OSError, ValueError):
                forget(stream.fileno())
    return number


def forget(number: int) -> None:
    """Nobody takes what is written to a file descriptor any more: let it go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def say(text: str) -> None:
    """A text on standard error; where nobody can be told, the exit code tells."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def all_imported() -> None:
    """Let the garbage collector work again, which `lead` stops (while large libraries are imported it takes a fifth of the time
    and finds nothing), on what is made from now on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """The garbage collector rests while large libraries are imported after the command line was read; see `all_imported`."""
    working = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if working:
            all_imported()


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or args.exc_type is SystemExit:
        return
    if "--debug" in sys.argv:
        threading.__excepthook__(args)
    say(f"error: in the background: {in_one_line(args.exc_value)}")
