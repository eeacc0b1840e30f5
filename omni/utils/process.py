"""Sets up the process of a command line: usable standard streams, a clean end on signals, a quick exit.

Both command lines (`omni-infer`, `omni-train`) run through `lead`, which knows nothing of commands.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from omni.errors import in_one_line

FAILED, BROKEN_PIPE, INTERRUPTED = 1, 128 + signal.SIGPIPE, 128 + signal.SIGINT

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a program by an exception, so that files it was writing are closed or removed."""

GRACE = 1.0
"""Seconds in which a further signal of `ENDING` counts as the same one: it must not interrupt the clean-up of the first."""


def lead(main: Callable[[], int]) -> NoReturn:
    """Run a program's main function as this process, and end it with the code that it returns."""
    gc.disable()  # until `all_imported`
    open_streams()
    came = end_in_order()
    threading.excepthook = _thread_failed
    logging.getLogger("omni").addHandler(_Warnings(logging.WARNING))
    code: object = FAILED
    try:
        code = main()
    except SystemExit as done:
        code = done.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        gc.disable()  # a signal ends the process at once from now on
        code = last_flush(128 + came[-1] if came else code)
        gc.freeze()  # the interpreter's last collection would visit every object of torch, which takes half a second
    sys.exit(code)


def open_streams() -> None:
    """Opens whichever of the three standard streams is closed, and lets them write any file name. A stream that the caller has
    closed (`>&-`) is led to the null device: otherwise the next file that is opened would take its number, and receive what
    libraries print. Characters that a stream's encoding lacks (and bytes of a file's name that are not UTF-8) are written as
    escapes."""
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
    """Installs handlers that raise an exception on the signals of `ENDING`, and on Ctrl-C, as Python's own does; a signal that
    is ignored (`nohup`) stays ignored.

    While libraries are imported (until `all_imported`, and in `importing`), which may swallow the exception or be broken by it,
    the process ends at once: nothing was written yet. If it is swallowed later, the next signal raises again. Children that
    are forked later end by the signal's default action, or by `KeyboardInterrupt`.

    Returns:
        a list that grows by each signal that an exception was raised for.
    """
    owner, came, latest = os.getpid(), list[int](), -GRACE

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal latest
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif time.monotonic() - latest >= GRACE:
            if _importing_now():
                os._exit(128 + number)
            latest = time.monotonic()
            came.append(number)
            raise SystemExit(128 + number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner and _importing_now():
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return came


def _importing_now() -> bool:
    """True where the collector is stopped for imports, and while NumPy or PyTorch is imported by whatever needs it first."""
    specs = [getattr(sys.modules.get(name), "__spec__", None) for name in ("numpy", "torch")]
    return not gc.isenabled() or any(getattr(spec, "_initializing", False) for spec in specs)


def end_by_signal(number: int, line: str) -> NoReturn:
    """Ends a program that has noted a signal, with a line on standard error and the signal's exit code."""
    say(line)
    raise SystemExit(128 + number)


def last_flush(code: object = 0) -> int:
    """Flushes the standard streams, so that the interpreter reports no error at exit; returns the exit code.

    Args:
        code: exit code of the program so far, as `SystemExit` has it.
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
    """Points a file descriptor that nobody reads any more to the null device."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


class _Warnings(logging.Handler):
    """Prints what the library warns of, above a progress bar; nothing where the program has a handler of its own for logs."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")
        if logging.getLogger().handlers:
            return
        if bars is None:
            say(record.getMessage())
        else:
            with contextlib.suppress(OSError, ValueError):
                bars.tqdm.write(record.getMessage(), file=sys.stderr)


LINES = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    "torch.utils.cpp_extension": "No CUDA runtime is found, using CUDA_HOME",
}
"""How lines of libraries begin that are of no use to whoever runs this package, by the names of their loggers."""


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LINES[record.name])


def silence(logger: str) -> None:
    """Drops the line of this logger in `LINES`; to be called before its library is imported."""
    logging.getLogger(logger).addFilter(_is_kept)


def say(text: str) -> None:
    """Prints a text on standard error; errors are ignored, because the exit code says it too."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def all_imported() -> None:
    """Restarts the garbage collector, for objects made from now on. `lead` stops it, because it takes a fifth of the time while
    large libraries are imported and finds nothing."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Stops the garbage collector while large libraries are imported after the command line was read; see `all_imported`."""
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
