"""What a preparation shows while it works: items done, rows a second, times real time, time left."""

from __future__ import annotations

import time
from typing import TextIO

from train.console.progress import LINE_SECONDS, Kind, Screen, duration


class Display(Screen):
    """A bar on a terminal, a line now and then elsewhere.

    Args:
        total: items to do in all.
        before: items done before this start.
    """

    def __init__(self, total: int, before: int = 0, kind: Kind = "auto", stream: TextIO | None = None) -> None:
        super().__init__(
            kind, stream, total=total, initial=before, mininterval=0.2,
            bar_format="{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} items {postfix}",
        )  # fmt: skip
        self.total, self.before, self.items, self.seconds = total, before, 0, 0.0
        self.told = time.monotonic()
        self.start: float | None = None
        self.first = 0
        if self.bar is not None:
            self.bar.update(0)

    def tick(self, items: int, seconds: float) -> None:
        """So many further items are done, with so many seconds of sound."""
        self.items += items
        if self.start is None:  # the first is what starting took, which says nothing about the pace
            self.start, self.first = time.monotonic(), items
        else:
            self.seconds += seconds
        if self.bar is not None:
            self.bar.set_postfix_str(self.pace(), refresh=False)
            self.bar.update(items)
        elif self.kind == "lines" and time.monotonic() - self.told >= LINE_SECONDS:
            self.told = time.monotonic()
            done = self.before + self.items
            print(f"{done} of {self.total} items ({100 * done / self.total:.1f}%), {self.pace()}", file=self.stream, flush=True)

    def pace(self) -> str:
        """Rate since this start, and the time left at it."""
        items = self.items - self.first
        if self.start is None or not items:
            return "starting"
        passed = max(1e-9, time.monotonic() - self.start)
        left = (self.total - self.before - self.items) * passed / items
        return f"{items / passed:.1f} items/s, {self.seconds / passed:.1f}x real time, {duration(left)} left"
