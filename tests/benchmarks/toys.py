"""A command to be watched from outside: holds memory of its own, maps a file, or fails."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

HELD = 0.5
"""Seconds for which what it takes stays there."""


def main(argv: Sequence[str]) -> int:
    what, value = argv
    if what == "hold":
        held = b"x" * int(value)
        time.sleep(HELD)
        return int(not held)
    if what == "map":
        with open(value, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            touched = sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE))
            time.sleep(HELD)
            return touched
    return int(value)
