"""Progress of training, preparing and converting: a bar on a terminal, lines elsewhere, nothing on other processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

Progress = Literal["auto", "bar", "lines", "off"]

SHARES = ("exact_match", "wer", "code_accuracy", "ended")
"""Names of validation figures that are shares or error rates, shown in per cent."""

WAITING = 0.05
"""Share of the time of training from which the screen shows what is waited for."""

OPEN = 0.999
"""Share of an open-ended budget that counts as used from its expected end on."""

LINE_SECONDS = 10.0
"""Seconds between two progress lines where there is no terminal."""


def duration(seconds: float) -> str:
    """Format a duration: `45s`, `3:07` or `2:03:07`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(number: int, noun: str) -> str:
    """Format a number of things: `1 item`, `2 items`, `2 batches`, `2 processes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 'ss')) else 's'}"


def short(value: float) -> str:
    """Format a number in a few characters: `950`, `12.3k`, `4.56M`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:  # three digits of what is just below are those of the unit
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def percent(share: float, digits: int = 1) -> str:
    """Format a share or an error rate: `49.5 %`. Errors may outnumber the words: values above 1 are capped, `> 100 %`."""
    return "> 100 %" if share > 1 else f"{100 * share:.{digits}f} %"


def shown(name: str, value: float) -> str:
    """Format a figure of a validation: shares and error rates in per cent, losses in nats."""
    return percent(value) if name.partition("/")[0] in SHARES else f"{value:.3g}"


def figures_line(figures: Mapping[str, float]) -> str:
    """Format figures as one line of names and values."""
    return ", ".join(f"{name.replace('_', ' ')} {shown(name, value)}" for name, value in figures.items())


def losses_line(figures: Mapping[str, float]) -> str:
    """`text 2.31 audio 4.02`: means per target in nats; where neither has targets the losses on the encoder, or else the
    objective."""
    for names in (("text", "audio"), ("alignment", "distill")):
        shown = [f"{name} {figures[f'loss/{name}']:#.3g}" for name in names if f"loss/{name}" in figures]
        if shown:
            return " ".join(shown)
    return f"loss {figures['loss']:#.3g}"


def columns(stream: TextIO) -> int | None:
    """Width of the terminal that a stream writes to: 0 where it does not tell; None where it is no terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return None


class Screen:
    """A bar on a terminal, lines elsewhere, or nothing.

    Args:
        mode: see `LogConfig.progress`.
        bar: arguments of tqdm.
    """

    def __init__(self, mode: Progress, stream: TextIO | None = None, **bar: Any) -> None:
        from tqdm import tqdm

        self.stream = stream or sys.stderr
        sized = columns(self.stream) != 0
        self.mode = ("bar" if self.stream.isatty() and sized else "lines") if mode == "auto" else mode
        width: dict[str, Any] = {"dynamic_ncols": True} if sized else {"ncols": 80}
        self.bar = tqdm(file=self.stream, **width, **bar) if self.mode == "bar" else None

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.mode == "off":
            return
        if self.bar is not None:
            self.bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)

    def say_apart(self, line: str) -> None:
        """Print a line over the `^C` with which a terminal echoes the key that it answers."""
        self.say(f"\r{line}" if self.bar is None and self.stream.isatty() else line)

    def close(self) -> None:
        """Leave the bar as it is; lines said later come below it."""
        bar, self.bar = self.bar, None
        if bar is not None:
            bar.close()
            self.mode = "lines"


class TrainProgress(Screen):
    """Shows the share of the budget that is used, and the figures of the last row of the log.

    Args:
        start: share and seconds used before this start, so that the time left is estimated from this one's pace.
        most: seconds that an open-ended budget may take; the time left is up to its expected end, and after that up to this.
    """

    def __init__(
        self, mode: Progress, start: tuple[float, float] = (0.0, 0.0), most: float | None = None, stream: TextIO | None = None
    ) -> None:
        super().__init__(
            mode, stream, total=1000, initial=round(1000 * start[0]), bar_format="{percentage:3.0f}% {bar} {desc}{postfix}"
        )
        self.start, self.most = start, most
        self.figures = self.last = ""

    def show(self, step: int, used: float, seconds: float) -> None:
        """Update the bar: steps done, share of the budget used, seconds over all starts."""
        if self.bar is None:
            return
        self.last = f"step {step} {self.figures}"
        self.bar.n = min(1000, round(1000 * used))
        self.bar.set_description_str(f"step {step} {self.figures} {self._left(used, seconds)}", refresh=False)
        self.bar.update(0)
        self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.set_description_str(self.last, refresh=False)
        super().close()

    def row(self, step: int, used: float, seconds: float, figures: Mapping[str, float]) -> None:
        """Show the figures of a new row of the log, or figures that only the screen gets."""
        parts = [losses_line(figures), f"lr {figures['lr']:.2e}"]
        if "tokens_per_second" in figures:
            parts.append(f"{short(figures['tokens_per_second'])} tokens/s")
        if "mfu" in figures:
            parts.append(f"MFU {100 * figures['mfu']:.1f}%")
        for name, words in (("data_wait", "waiting for data"), ("host_gap", "GPU without work")):
            if figures.get(name, 0.0) >= WAITING:
                parts.append(f"{100 * figures[name]:.0f}% {words}")
        self.figures = " ".join(parts)
        if self.mode == "lines":
            self.say(f"step {step} ({100 * used:.1f}%) {self.figures} {self._left(used, seconds)}")
        self.show(step, used, seconds)

    def _left(self, used: float, seconds: float) -> str:
        gained, spent = used - self.start[0], seconds - self.start[1]
        if gained <= 0 or spent <= 0:
            return ""
        if self.most is not None and OPEN <= used < 1:
            return f"at most {duration(self.most - seconds)} left"
        return f"{duration((1 - used) * spent / gained)} left"


class Bar(Screen):
    """Shows bytes written, their rate and the time left: a bar on a terminal, a line every `LINE_SECONDS` elsewhere."""

    def __init__(self, on: bool = True, stream: TextIO | None = None) -> None:
        super().__init__("auto" if on else "off", stream, unit="B", unit_scale=True, desc="writing", leave=False)
        self.started = self.shown_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(done - self.bar.n)
        elif done and time.monotonic() - self.shown_at >= LINE_SECONDS:
            self.shown_at = time.monotonic()
            rate = done / (self.shown_at - self.started)
            left = duration((total - done) / rate)
            self.say(f"{short(done)}B of {short(total)}B written ({done / total:.0%}), {short(rate)}B/s, {left} left")


class Display(Screen):
    """Shows items done, their rate and the time left: a bar on a terminal, a line every `LINE_SECONDS` elsewhere.

    Args:
        total: items to do in all.
        before: items done before this start.
        label: what is done, before the numbers.
    """

    def __init__(
        self, total: int, before: int = 0, mode: Progress = "auto", stream: TextIO | None = None, label: str = ""
    ) -> None:
        self.label = f"{label.replace('_', ' ')}: " if label else ""
        super().__init__(
            mode, stream, total=total, initial=before, mininterval=0.2,
            bar_format=self.label + "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} items {postfix}",
        )  # fmt: skip
        self.total, self.before, self.items, self.seconds = total, before, 0, 0.0
        self.shown_at = time.monotonic()
        self.start: float | None = None
        self.first = 0
        if self.bar is not None:
            self.bar.update(0)

    def tick(self, items: int, seconds: float) -> None:
        """Count `items` further items, which hold `seconds` of sound, as done."""
        self.items += items
        if self.start is None:  # the first call includes the start-up: it does not count for the rate
            self.start, self.first = time.monotonic(), items
        else:
            self.seconds += seconds
        if self.bar is not None:
            self.bar.set_postfix_str(self.pace(), refresh=False)
            self.bar.update(items)
        elif self.mode == "lines" and time.monotonic() - self.shown_at >= LINE_SECONDS:
            self.shown_at = time.monotonic()
            done = self.before + self.items
            self.say(f"{self.label}{done} of {self.total} items ({100 * done / self.total:.1f}%), {self.pace()}")

    def pace(self) -> str:
        """Format the rate since this start, and the time left at that rate."""
        items = self.items - self.first
        if self.start is None or not items:
            return "starting"
        passed = max(1e-9, time.monotonic() - self.start)
        left = (self.total - self.before - self.items) * passed / items
        pace = f", {self.seconds / passed:.1f}x real time" if self.seconds else ""
        return f"{items / passed:.1f} items/s{pace}, {duration(left)} left"
