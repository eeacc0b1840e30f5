"""What the command line shows: messages of the library in its words, tables, and the progress of long work."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

WORDS: tuple[tuple[str, str], ...] = (
    (r"^(device|dtype|quantize|kernels|task) (?='|\S+ is not available)", r"--\1 "),
    (r"\ba larger context\b", "a larger --context"),
    (r"\buse 'cpu'", "use --device cpu"),
    (r"\bload the model in (float\w+)", r"use --dtype \1"),
    (r"\bgive raw PCM with its sample rate instead\b", "pipe raw PCM into - with its --input_rate instead"),
    (r"(?<= )(channel|task)='?(\w+)'?(?![\w.])", r"--\1 \2"),
)
"""Patterns of the library's messages, with their replacements on the command line."""

LINE_SECONDS = 10.0  # seconds between two lines where there is no terminal


def on_one_line(name: str) -> str:
    """Escapes line ends and control characters in a name, so that it fits on one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def in_options(message: str) -> str:
    """Replaces keywords in a message by the names of options."""
    for pattern, words in WORDS:
        message = re.sub(pattern, words, message)
    return message


class WorkBar:
    """Shows how much of some work is done, in bytes (`B`) or seconds (`s`); a context manager."""

    def __init__(self, label: str, unit: str = "B", on: bool = True) -> None:
        from tqdm import tqdm  # which most commands do not need

        self.label, self.on = label, on
        self.started = self.shown_at = time.monotonic()
        terminal = on and sys.stderr.isatty()
        shape = "{desc}: {percentage:3.0f}% {bar} {remaining} left {postfix}" if unit == "s" else None
        bytes_ = unit == "B"
        self.bar: Any = (
            tqdm(unit=unit, unit_scale=bytes_, desc=label, leave=False, bar_format=shape, file=sys.stderr) if terminal else None
        )

    def __call__(self, done: float, total: float, note: str = "") -> None:
        """Show that `done` of `total` is done; `note` says what happens at present."""
        now = time.monotonic()
        if self.bar is not None:
            self.bar.total = total
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(done - self.bar.n)
        elif self.on and now - self.shown_at >= LINE_SECONDS and total:
            self.shown_at = now
            left = f", {_minutes((total - done) * (now - self.started) / done)} left" if done else ""
            print(f"{self.label}: {done / total:.0%} done{left}{f' ({note})' if note else ''}", file=sys.stderr, flush=True)

    def __enter__(self) -> WorkBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
