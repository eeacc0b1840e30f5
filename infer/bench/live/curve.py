"""The deadline curve: lateness, steps and first audio over the number of live sessions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infer.bench.live.figures import LiveFigures, LiveTable, largest_without_underrun
from omni.charts import COLORS, GRID, INK, printable, pyplot_quietly, save_figure
from omni.engine.stats import Percentiles

STYLES = {"closed": "-", "nonstop": "-", "open": "--"}
PARTS = {"p50": COLORS[0], "p95": COLORS[1], "p99": COLORS[3]}


def draw(table: LiveTable, file: Path) -> Path:
    """Draw the curve as a PNG file."""
    pyplot = pyplot_quietly()
    figure, axes = pyplot.subplots(3, 1, figsize=(9.5, 9), sharex=True, height_ratios=(3, 2, 2))
    late, step, first = axes
    loops = list(dict.fromkeys(run.loop for run in table.runs))
    for loop in loops:
        runs = sorted((run for run in table.runs if run.loop == loop), key=lambda run: run.sessions)
        _lines(late, runs, loop, lambda run: run.lateness)
        _lines(step, runs, loop, lambda run: run.step)
        _lines(first, runs, loop, lambda run: run.first_audio)
    _level(late, 0.0, "due")
    _level(step, 1e3 * table.frame, f"a frame, {1e3 * table.frame:.0f} ms")
    step.set_ylim(bottom=0)
    first.set_ylim(bottom=0)
    for place, loop in enumerate(loops):
        _mark(axes, table, loop, place)
    numbers = sorted({run.sessions for run in table.runs})
    for axis, name in zip(axes, ("lateness (ms)", "step (ms)", "first audio (ms)"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(n) for n in numbers])
        axis.minorticks_off()
        axis.set_ylabel(name)
        axis.grid(color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK)
    first.set_xlabel("live sessions")
    named = next((axis for axis in axes if axis.get_legend_handles_labels()[0]), late)
    late.legend(*named.get_legend_handles_labels(), fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    late.set_title("\n".join(textwrap.wrap(printable(table.title, 200), 95)), fontsize=10, loc="left")
    return save_figure(figure, file)


def _lines(axis: Any, runs: list[LiveFigures], loop: str, figure: Callable[[LiveFigures], Percentiles]) -> None:
    marker = "s" if loop == "open" else "o"
    for part, color in PARTS.items():
        points = [(run.sessions, 1e3 * value) for run in runs if (value := getattr(figure(run), part)) is not None]
        if points:
            x, y = zip(*points, strict=True)
            axis.plot(x, y, STYLES[loop], color=color, marker=marker, markersize=4, label=f"{part}, {loop}")


def _level(axis: Any, height: float, name: str) -> None:
    """A horizontal line with its name."""
    axis.axhline(height, color=INK, linewidth=1.2)
    place: Any = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points", "va": "bottom"}
    axis.annotate(name, (1, height), fontsize=8, color=INK, ha="right", **place)


def _mark(axes: Any, table: LiveTable, loop: Any, place: int) -> None:
    """A line at the largest number of sessions without an underrun, named in the first picture."""
    best = largest_without_underrun(table.runs, loop)
    if best is None:
        return
    for axis in axes:
        axis.axvline(best, color=COLORS[2], linewidth=1.2, linestyle="-." if loop == "open" else ":")
    side: Any = {"xytext": (-4, 0), "ha": "right"}
    if best == min(run.sessions for run in table.runs):
        side = {"xytext": (4, 0), "ha": "left"}
    axes[0].annotate(
        f"{best} without underrun ({loop})", (best, 0.5 - 0.07 * place), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=8, color=INK, **side,
    )  # fmt: skip
