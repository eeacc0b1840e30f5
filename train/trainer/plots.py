"""Draws pictures of a run: its curves, the balance of its tasks, and spectrograms of a question and its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.tasks import TASKS
from omni.utils.charts import COLORS, GRID, INK, printable, pyplot_quietly, save_figure
from train.console.progress import duration
from train.trainer.logs import BALANCE, METRICS, VALIDATION, read_table

CURVES, SPECTROGRAMS = "curves.png", "spectrogram.png"

MEASURED = ("exact_match", "code_accuracy", "wer")
HIGHEST = 1.5
"""Top of the axis of errors and shares; values above are drawn there, as triangles."""


def curves(folder: Path) -> Path | None:
    """Draw `curves.png` from a run folder's tables: losses, also of held-out rows, learning rate and validation over time. None
    before there is a row."""
    metrics, validation = read_table(folder / METRICS), read_table(folder / VALIDATION)
    if not metrics and not validation:
        return None
    pyplot = pyplot_quietly()
    from matplotlib.ticker import PercentFormatter

    figure, axes = pyplot.subplots(3, 1, figsize=(9.5, 9), sharex=True, height_ratios=(3, 1, 2))
    longest = max(row["seconds"] for row in [*metrics, *validation])
    scale, unit = (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")
    names = [name for name in (metrics[0] if metrics else {}) if name.startswith("loss/")]
    for i, name in enumerate(names):
        label = name.removeprefix("loss/")
        style = "--" if label in TASKS else "-"
        _line(axes[0], metrics, name, scale, COLORS[i % len(COLORS)], label, width=1.0, style=style)
    _line(axes[0], metrics, "loss", scale, "black", "objective", width=1.6)
    for i, name in enumerate(("loss/text", "loss/audio"), len(names)):
        color = COLORS[(names.index(name) if name in names else i) % len(COLORS)]
        _line(axes[0], validation, name, scale, color, f"held out: {name.removeprefix('loss/')}", marker="o", style=":")
    axes[0].set_ylabel("loss (nats per target)")
    values = [row[n] for row in metrics for n in ("loss", *names) if row[n] > 0]
    if values and max(values) > 20 * min(values):
        axes[0].set_yscale("log")
    _line(axes[1], metrics, "lr", scale, COLORS[0], "")
    axes[1].set_ylabel("learning rate")
    axes[1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    shown = [name for name in (validation[0] if validation else {}) if name.split("/")[0] in MEASURED]
    for i, name in enumerate(shown):
        style, label = ":" if "/" in name else "-", name.replace("_", " ")
        inside = [{**row, name: min(row[name], HIGHEST)} for row in validation]  # word errors can exceed the words
        _line(axes[2], inside, name, scale, COLORS[i % len(COLORS)], label, marker="o", style=style)
        above = [row["seconds"] / scale for row in validation if row[name] > HIGHEST]
        axes[2].plot(above, [HIGHEST] * len(above), "^", color=COLORS[i % len(COLORS)], markersize=7)
    highest = max([row[n] for row in validation for n in shown if row[n] == row[n]], default=0.0)
    axes[2].set_ylim(-0.03, min(HIGHEST, max(1.0, highest)) + 0.03)
    axes[2].yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes[2].set_ylabel("validation")
    axes[2].set_xlabel(unit)
    for axis in axes:
        axis.grid(color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    last = max(row["step"] for row in [*metrics, *validation])
    title = f"{folder.resolve().name}: {last:.0f} steps in {duration(longest)}"
    axes[0].set_title(title, fontsize=11, loc="left")
    return save_figure(figure, folder / CURVES)


def _line(
    axis: Any, rows: list[dict[str, float]], name: str, scale: float, color: str, label: str, *, width: float = 1.4,
    marker: str = "", style: str = "-",
) -> None:  # fmt: skip
    points = [(row["seconds"] / scale, row[name]) for row in rows if name in row and row[name] == row[name]]
    if points:
        x, y = zip(*points, strict=True)
        axis.plot(x, y, style, color=color, label=label, linewidth=width, marker=marker, markersize=3.5)


def spectrograms(file: Path, question: tuple[Tensor, int] | None, answer: tuple[Tensor, int], asked: str, said: str) -> Path:
    """Draw the spectrograms of a question and its answer, one above the other on the same axes.

    Args:
        question: samples [S] and their rate in Hz; None where it was asked in writing.
        asked, said: the texts, for the titles.
    """
    pyplot = pyplot_quietly()
    sounds = [("question", asked, question), ("answer", said, answer)]
    present = [(kind, text, sound) for kind, text, sound in sounds if sound is not None]
    figure, axes = pyplot.subplots(len(present), 1, figsize=(8, 2.6 * len(present) + 0.4), sharex=True, squeeze=False)
    top = min(8000, max(rate // 2 for _, _, (_, rate) in present))
    longest = max(len(samples) / rate for _, _, (samples, rate) in present)
    for axis, (kind, text, (samples, rate)) in zip(axes[:, 0], present, strict=True):
        power, seconds = spectrogram(samples, rate)
        axis.imshow(
            power, origin="lower", aspect="auto", cmap="magma", vmin=power.max() - 70, vmax=power.max(),
            extent=(0, seconds, 0, rate / 2 / 1000),
        )  # fmt: skip
        axis.set_facecolor("black")
        axis.set_title(f"{kind}: {printable(text)}", fontsize=10, loc="left")
        axis.set_ylabel("kHz")
        axis.set_ylim(0, top / 1000)
        axis.set_xlim(0, longest)
    axes[-1, 0].set_xlabel("seconds")
    return save_figure(figure, file)


def spectrogram(samples: Tensor, rate: int, window: float = 0.025, hop: float = 0.010) -> tuple[np.ndarray, float]:
    """Power in dB [bins, frames] of a sound [S] (Hann window of 25 ms every 10 ms), and its length in seconds."""
    size, step = round(window * rate), round(hop * rate)
    samples = samples.detach().float().cpu()
    padded = torch.nn.functional.pad(samples, (0, max(0, size - len(samples))))
    spectrum = torch.stft(padded, n_fft=size, hop_length=step, window=torch.hann_window(size), return_complex=True)
    power = 10 * torch.log10(spectrum.abs().square() + 1e-10)
    return power.numpy(), len(samples) / rate


PICTURE = "balance.png"


PANELS = {"weight": "weight", "norm": "gradient norm", "cosine": "cosine"}


def balance(folder: Path) -> Path | None:
    """Draw `balance.png` from a folder's `balance.csv`; a panel for each kind of figure that it has. None before there is a
    row."""
    rows = read_table(folder / BALANCE)
    kinds = [kind for kind in PANELS if rows and any(name.startswith(f"{kind}/") for name in rows[0])]
    if not kinds:
        return None
    pyplot = pyplot_quietly()
    figure, axes = pyplot.subplots(len(kinds), 1, figsize=(8, 2.6 * len(kinds) + 0.4), sharex=True, squeeze=False)
    for kind, axis in zip(kinds, axes[:, 0], strict=True):
        names = [name for name in rows[0] if name.startswith(f"{kind}/")]
        for i, name in enumerate(names):
            points = [(row["step"], row[name]) for row in rows if row[name] == row[name]]
            if points:
                label = name.removeprefix(f"{kind}/").replace("/", " and ")
                marker = "o" if len(points) == 1 else ""
                axis.plot(*zip(*points, strict=True), color=COLORS[i % len(COLORS)], label=label, linewidth=1.2, marker=marker)
        values = [row[name] for row in rows for name in names if row[name] > 0]
        if kind == "norm" and values and max(values) > 20 * min(values):
            axis.set_yscale("log")
        if kind == "cosine":
            axis.set_ylim(-1.05, 1.05)
            axis.axhline(0, color=INK, linewidth=0.6)
        axis.set_ylabel(PANELS[kind])
        axis.grid(color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK)
        axis.legend(fontsize=8, ncols=3, frameon=False)
    axes[-1, 0].set_xlabel("step")
    axes[0, 0].set_title(f"{folder.resolve().name}: balance of the tasks", fontsize=11, loc="left")
    return save_figure(figure, folder / PICTURE)


def pictures(folder: Path) -> dict[str, Path]:
    """Redraws the curves; returns the pictures that exist, by name."""
    curves(folder)
    balance(folder)
    files = {"curves": CURVES, "spectrogram": SPECTROGRAMS, "balance": PICTURE}
    found = {name: folder / file for name, file in files.items()}
    return {name: file for name, file in found.items() if file.exists()}
