"""Runs a command in a process of its own, and measures its memory from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from omni.errors import UserError

EVERY = 0.003
"""Seconds between two readings of the memory; a peak that is shorter may be missed."""

_CHILD = """
import importlib, sys
command = importlib.import_module(sys.argv[1])
for name in filter(None, sys.argv[2].split(",")):
    importlib.import_module(name)
print("ready", flush=True)
sys.stdin.readline()
sys.exit(command.main(sys.argv[3:]))
"""


class ResourceUse(NamedTuple):
    """Seconds of a command, and bytes at its peak beyond those of a process that has imported all and done nothing.

    Attributes:
        resident: RSS; pages of mapped files count while they are there.
        anonymous: without files and shared memory, where the system tells them apart (Linux).
    """

    seconds: float
    resident: int
    anonymous: int


def run_apart(module: str, arguments: Sequence[str], imports: Sequence[str] = ()) -> ResourceUse:
    """Runs `module.main(arguments)` in a new interpreter that has imported these modules; UserError where it fails."""
    command = [sys.executable, "-c", _CHILD, module, ",".join(imports), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        seconds, resident, anonymous = 0.0, 0, 0
        if child.stdout.readline():
            watched = psutil.Process(child.pid)
            idle = top = _memory(watched)
            start = time.perf_counter()
            child.stdin.write("\n")
            child.stdin.flush()
            while child.poll() is None:
                with suppress(psutil.Error):  # it has just ended
                    now = _memory(watched)
                    top = max(top[0], now[0]), max(top[1], now[1])
                time.sleep(EVERY)
            seconds = time.perf_counter() - start
            resident, anonymous = top[0] - idle[0], top[1] - idle[1]
        child.communicate()
    if child.returncode:
        raise UserError(f"{module} {' '.join(arguments)} ended with {child.returncode}; see what it said above")
    return ResourceUse(seconds, resident, anonymous)


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Bytes resident, and those of them that are neither files' nor shared."""
    memory = process.memory_info()
    return memory.rss, memory.rss - getattr(memory, "shared", 0)
