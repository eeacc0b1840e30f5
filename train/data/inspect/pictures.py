"""Charts of the statistics of rows: histograms of durations and lengths, and codebook usage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from omni.utils.charts import GRID, INK, drawn
from train.data.inspect.collect import Collected, Sample, StreamUse

PANELS = {
    "durations.png": (("question seconds", "answer seconds"), "seconds", "turns"),
    "texts.png": (("question characters", "answer characters", "question tokens", "answer tokens"), "length", "turns"),
    "rates.png": (("question characters a second", "answer characters a second"), "characters a second", "turns"),
}
"""Charts by file name: the measures, one panel each where there are any, and the labels of the axes."""


def draw_all(collected: Collected, folder: Path, context: int = 0) -> list[Path]:
    """Draw all charts that have data into `folder`; `context` is the model's, marked in the chart of columns."""
    files = []
    for name, (measures, x, y) in PANELS.items():
        present = [measure for measure in measures if measure in collected.samples]
        if present:
            files.append(_histograms(folder / name, collected, present, x, y))
    columns = [name for name in collected.samples if name.startswith("columns ")]
    if columns:
        files.append(_histograms(folder / "columns.png", collected, columns, "time steps of an example", "rows", context))
    files += [_codes(folder / f"codes-{codec}.png", codec, collected.use(codec)) for codec in collected.codes]
    return files


def _histograms(file: Path, collected: Collected, names: Sequence[str], x: str, y: str, limit: int = 0) -> Path:
    with drawn(file, len(names), 1, (8, 2.1 * len(names) + 0.5)) as axes:
        samples = [collected.samples[name] for name in names]
        top = max(_top(sample) for sample in samples) or 1.0
        whole = all(bool((sample.values == np.round(sample.values)).all()) for sample in samples)
        edges = _edges(top, whole)
        for i, (axis, name, sample) in enumerate(zip(axes[:, 0], names, samples, strict=True)):
            shown = np.clip(sample.values, None, edges[-1])  # larger values count in the last bar
            axis.hist(shown, edges, color=f"C{i}")
            middle = float(np.median(sample.values))
            axis.axvline(middle, color=INK, linewidth=1, linestyle="--")
            beyond = int((sample.values > edges[-1] * (1 + 1e-6)).sum())  # with tolerance: values are in single precision
            rest = f", the last bar holds {beyond} beyond it up to {sample.most:.4g}" if beyond else ""
            axis.set_title(f"{name}: {sample.count}, median {middle:.4g}{rest}")
            axis.set(ylabel=y, xlim=(edges[0], edges[-1]))
            if limit and limit <= edges[-1]:
                axis.axvline(limit, color="C3", linewidth=1.4)
        axes[-1, 0].set_xlabel(x + (f" (red: the decoder's context, {limit})" if limit and limit <= edges[-1] else ""))
    return file


def _top(sample: Sample) -> float:
    """End of the axis: the largest value, or the 99.5th percentile where the largest is more than 1.5 times that."""
    usual = float(np.percentile(sample.values, 99.5))
    return sample.most if sample.most <= 1.5 * usual else usual


def _edges(top: float, whole: bool) -> np.ndarray:
    """Edges of about fifty bars from 0 to `top`; for whole numbers, every bar covers equally many of them."""
    if not whole:
        return np.linspace(0, top, 51)
    step = max(1, math.ceil((top + 1) / 50))
    return np.arange(0, math.ceil((top + 1) / step) + 1) * step - 0.5


def _codes(file: Path, codec: str, streams: Sequence[StreamUse]) -> Path:
    """Draw the frequencies of each stream's codes, and their entropy."""
    with drawn(file, 1, 2, (10, 3.8)) as axes:
        left, right = axes[0]
        for i, use in enumerate(streams):
            if len(use.shares):
                label = f"audio{i}" if len(streams) <= 16 else None
                left.plot(np.arange(1, len(use.shares) + 1), use.shares, color=f"C{i}", label=label)
        left.set(xscale="log", yscale="log", xlabel="code, by frequency", ylabel="share of the frames")
        left.set_title(f"{codec}: how often each code occurs")
        places = np.arange(len(streams))
        most = [math.log2(max(2, len(use.counts))) for use in streams]
        right.bar(places, most, color=GRID, label="at most (log2 of the codebook)")
        right.bar(places, [use.entropy for use in streams], color=[f"C{i}" for i in places], width=0.6)
        right.set_xticks(places, [str(i) for i in places])
        right.set(xlabel="audio stream", ylabel="bits", ylim=(0, max(most) * 1.2))
        right.set_title("entropy of a code")
    return file
