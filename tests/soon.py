"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def soon(done: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(done())
