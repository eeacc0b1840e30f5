"""Starts the process of an engine, and says how it ended."""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

from omni.engine.wire import EngineLost, Item, ModelFacts, unpack, unpack_error

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
    # `omni.engine.process` ends it at exit; multiprocessing would, too, but fails in a process that was forked from this one
    getattr(multiprocessing.process, "_children", set()).discard(process)
    return pipe, process


def first_message(pipe: Any, process: Any) -> ModelFacts:
    """What the process says once its model is loaded.

    Raises:
        UserError: the model cannot be loaded.
        EngineLost: the process ended before.
    """
    try:
        kind, *rest = unpack(pipe.recv_bytes())[0]
    except (EOFError, OSError):
        raise EngineLost(
            f"{how_it_ended(process)} before the model was loaded; what it said is above (a script that starts one "
            'needs if __name__ == "__main__":)'
        ) from None
    if kind == "refused":
        raise unpack_error(*rest)
    facts: ModelFacts = rest[0]
    return facts


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
