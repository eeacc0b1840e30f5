"""Starts the process of an engine, and says how it ended."""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

from omni.engine.wire import Item

PATIENCE = 10.0
"""Seconds that a process has to end once it was told to, or its pipe is closed."""


def start(arguments: Item) -> tuple[Any, Any]:
    """The process, and this process's end of its pipe. Ctrl-C does not reach it, from its first moment on."""
    from omni.engine.child import run

    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=run, args=(other, *arguments), name="omni-engine")
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    except BaseException:
        pipe.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        other.close()
    return pipe, process


def how_it_ended(process: Any) -> str:
    """How the process ended, in words."""
    process.join(PATIENCE)
    code = process.exitcode
    if code is None:
        return f"the engine's process {process.pid} does not answer any more"
    if code >= 0:
        return f"the engine's process {process.pid} ended with code {code}"
    name = signal.Signals(-code).name
    memory = ", as where memory runs out" if -code == signal.SIGKILL else ""
    return f"the engine's process {process.pid} was ended by {name}{memory}"
