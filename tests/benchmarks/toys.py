"""A command to be watched from outside: holds memory of its own, maps a file, or fails. And checks that end in every way."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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


def hold_for_a_minute(device: torch.device, real: bool) -> Iterator[tuple[str, bool | None]]:
    yield "so far", True
    time.sleep(60)


def lose_the_process(device: torch.device, real: bool) -> Iterator[tuple[str, bool | None]]:
    yield "before", True
    os._exit(7)


def miss_a_package(device: torch.device, real: bool) -> Iterator[tuple[str, bool | None]]:
    import no_such_package

    yield no_such_package.text, True


def find_a_fault(device: torch.device, real: bool) -> Iterator[tuple[str, bool | None]]:
    print("a library's own line")
    yield "first", True
    yield "second", False
    yield f"on {device}, real {real}", None


def find_none(device: torch.device, real: bool) -> Iterator[tuple[str, bool | None]]:
    yield "all is well", True


CHECKS = {f.__name__: (f, 60.0) for f in (lose_the_process, miss_a_package, find_a_fault, find_none)}
CHECKS["hold_for_a_minute"] = hold_for_a_minute, 3.0
