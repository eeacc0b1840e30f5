"""Draws pictures of an evaluation: figures with intervals, their distribution over questions, and two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omni.utils.charts import INK, drawn
from train.eval.measures import MEASURES, Figure, pairs_of, shown
from train.eval.report import TEXT_BEFORE, Record, Run, ScoreChange, signed

PICTURE, COMPARISON = "report.png", "compare.png"
SHARES = ("exact_match", "ended", "code_accuracy", "wer", "cer", "speech_text_wer", "speech_wer", "ear_wer", "text_exact_match")
SPREAD = {
    "wer": "word errors in per cent of the words, per question",
    "cer": "character errors in per cent of the characters, per question",
    "speech_text_wer": "speech against its text in per cent, per question",
    "first_audio": "first audio in ms, per question",
    "first_text": "first text in ms, per question",
    "real_time_factor": "real-time factor, per question",
    "text_perplexity": "text: nats per token, per question",
    "text_perplexity_plain": "text, plain: nats per token, per question",
}
"""Measures whose distribution over the questions is drawn, with the label of the axis."""


def draw_report(run: Run, figures: Mapping[str, Figure]) -> Path:
    """Draw `report.png`: bars of the shares with 95 % intervals, and the share of questions up to each value (ECDF)."""
    shares = [name for name in SHARES if name in figures]
    spreads = [name for name in SPREAD if name in figures]
    lines, bars = -(-len(spreads) // 2), 0.9 + 0.42 * len(shares)
    size, ratios = (9, bars + 2.5 * lines), [bars, *[2.5] * lines]
    with drawn(run.folder / PICTURE, lines + 1, 2, size, height_ratios=ratios) as axes:
        figure, grid = axes[0, 0].figure, axes[0, 0].get_gridspec()
        for axis in (*axes[0], *axes.flat[2 + len(spreads) :]):
            axis.remove()
        _bars(figure.add_subplot(grid[0, :]), shares, figures)
        for name, axis in zip(spreads, axes.flat[2:], strict=False):
            series: list[tuple[str, Sequence[Record]]] = [("", run.scored)]
            if name.startswith("text_") and len(pairs_of(run.records[TEXT_BEFORE], name)):
                series = [("before", run.records[TEXT_BEFORE]), ("after", run.scored)]
            for i, (label, records) in enumerate(series):
                _spread(axis, _scale(name) * _each(name, pairs_of(records, name)), f"C{i}", label)
            axis.set(xlabel=SPREAD[name], ylabel="share of questions", ylim=(0, 1.02))
        title = f"{Path(run.started['model']).name}: {run.answered} questions of {Path(run.started['data']).name}"
        figure.suptitle(f"{title}\nbelow: share of the questions up to a value; dotted: the median", fontsize=10)
    return run.folder / PICTURE


def draw_comparison(changes: Mapping[str, ScoreChange], names: tuple[str, str], file: Path) -> Path:
    """Draw both runs' figures with 95 % intervals, a panel each, the difference in its title."""
    columns = min(3, len(changes))
    rows = -(-len(changes) // columns)
    with drawn(file, rows, columns, (3.6 * columns, 2.7 * rows + 0.4)) as axes:
        for axis in axes.flat[len(changes) :]:
            axis.remove()
        for axis, (name, change) in zip(axes.flat, changes.items(), strict=False):
            sides, scale, d = (change.before, change.after), _scale(name), change.difference
            errors = errors_of(sides, scale)
            axis.bar(range(2), lengths_of(sides, scale), 0.6, color=["C0", "C1"], yerr=errors, ecolor=INK)
            axis.set_xticks(range(2), [f"{letter}: {label}" for letter, label in zip("AB", names, strict=True)])
            axis.set_ylim(bottom=0)
            title = f"{MEASURES[name].title} ({MEASURES[name].better} is better)"
            interval = f"B - A: {signed(name, d.value)} ({signed(name, d.low)} to {signed(name, d.high)})"
            axis.set_title(f"{title}\n{interval}", fontsize=8)
            axis.set_ylabel(_unit(name))
    return file


def _bars(axis: Any, names: Sequence[str], figures: Mapping[str, Figure]) -> None:
    found = [figures[name] for name in names]
    places, lengths = np.arange(len(names))[::-1], lengths_of(found, 100.0)
    colors = ["C2" if MEASURES[name].better == "higher" else "C1" for name in names]
    axis.barh(places, lengths, 0.62, xerr=errors_of(found, 100.0), color=colors, ecolor=INK)
    axis.set_yticks(places, [MEASURES[name].title for name in names])
    ends = np.maximum(lengths, np.nan_to_num([100 * f.high for f in found], posinf=0.0))
    axis.set_xlim(0, max([105.0, *1.12 * ends]))
    for place, name, f, end in zip(places, names, found, ends, strict=True):
        text = shown(name, f.value)
        axis.annotate(text, (end, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    axis.set_xlabel("per cent, with 95 % intervals (green: higher is better, orange: lower)")


def _each(name: str, pairs: np.ndarray) -> np.ndarray:
    """A value per question, [N]; those without weight are left out."""
    pairs = pairs[pairs[:, 1] > 0]
    return pairs[:, 0] / pairs[:, 1]


def _spread(axis: Any, values: np.ndarray, color: str, label: str) -> None:
    """Draws the empirical distribution function of values."""
    if not len(values):
        return
    x = np.sort(values)
    left = min(0.0, x[0])
    axis.step(
        [left, *x, x[-1] * 1.02 + 1e-9], [0, *np.arange(1, len(x) + 1) / len(x), 1.0], where="post", color=color, label=label
    )
    axis.axvline(np.median(x), color=color, linewidth=0.8, linestyle=":")


def errors_of(found: Sequence[Figure], scale: float) -> np.ndarray:
    """Distances from values to interval ends, [2, figures]; none where there is no interval."""
    ends = [(f.value - f.low, f.high - f.value) for f in found]
    return scale * np.maximum(0, np.nan_to_num(np.asarray(ends).reshape(-1, 2).T, posinf=0.0, neginf=0.0))


def lengths_of(found: Sequence[Figure], scale: float) -> np.ndarray:
    """Lengths of bars [figures]; 0 where there is no figure, or an infinite one."""
    return scale * np.nan_to_num([f.value for f in found], posinf=0.0)


def _scale(name: str) -> float:
    return 100.0 if _unit(name) == "per cent" else 1.0


def _unit(name: str) -> str:
    return "per cent" if MEASURES[name].kind == "share" else MEASURES[name].unit
