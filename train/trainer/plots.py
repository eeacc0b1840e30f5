"""Draws pictures of a run: its curves, the balance of its tasks, and spectrograms of a question and its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.tasks import TASKS
from omni.utils.charts import BESIDE, INK, drawn, printable
from train.console.progress import duration
from train.trainer.logs import BALANCE, METRICS, VALIDATION, read_table

Rows = list[dict[str, float]]
CURVES, SPECTROGRAMS, PICTURE = "curves.png", "spectrogram.png", "balance.png"
PANELS = {"weight": "weight", "norm": "gradient norm", "cosine": "cosine"}
"""Kinds of figures of the balance that are drawn, with the names of their axes."""
MEASURED = ("exact_match", "code_accuracy", "wer")
HIGHEST = 1.5
"""Top of the axis of errors and shares; values above are drawn there, as triangles."""


def curves(folder: Path) -> Path | None:
    """Draw `curves.png` from a run folder's tables: losses, also of held-out rows, learning rate and validation over time. None
    before there is a row."""
    from matplotlib.ticker import PercentFormatter

    metrics, validation = read_table(folder / METRICS), read_table(folder / VALIDATION)
    if not metrics and not validation:
        return None
    longest = max(row["seconds"] for row in [*metrics, *validation])
    scale, unit = (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")
    for row in [*metrics, *validation]:
        row[unit] = row["seconds"] / scale
    with drawn(folder / CURVES, 3, 1, (9.5, 9), BESIDE, sharex=True, height_ratios=(3, 1, 2)) as axes:
        losses, rate, figures = axes[:, 0]
        _draw_losses(losses, metrics, validation, unit)
        _line(rate, metrics, unit, "lr", color="C0")
        rate.set_ylabel("learning rate")
        rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        shown = [name for name in (validation[0] if validation else {}) if name.split("/")[0] in MEASURED]
        for i, name in enumerate(shown):
            inside = [{**row, name: min(row[name], HIGHEST)} for row in validation]  # word errors can exceed the words
            style = {"color": f"C{i}", "label": name.replace("_", " "), "linestyle": ":" if "/" in name else "-"}
            _line(figures, inside, unit, name, marker="o", **style)
            above = [row[unit] for row in validation if row[name] > HIGHEST]
            figures.plot(above, [HIGHEST] * len(above), "^", color=f"C{i}", markersize=7)
        highest = max([row[n] for row in validation for n in shown if row[n] == row[n]], default=0.0)
        figures.set(ylim=(-0.03, min(HIGHEST, max(1.0, highest)) + 0.03), ylabel="validation", xlabel=unit)
        figures.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        last = max(row["step"] for row in [*metrics, *validation])
        losses.set_title(f"{folder.resolve().name}: {last:.0f} steps in {duration(longest)}")
    return folder / CURVES


def _draw_losses(axis: Any, metrics: Rows, validation: Rows, unit: str) -> None:
    names = [name for name in (metrics[0] if metrics else {}) if name.startswith("loss/")]
    for i, name in enumerate(names):
        label = name.removeprefix("loss/")
        _line(axis, metrics, unit, name, color=f"C{i}", label=label, linewidth=1.0, linestyle="--" if label in TASKS else "-")
    _line(axis, metrics, unit, "loss", color="black", label="objective", linewidth=1.6)
    for i, name in enumerate(("loss/text", "loss/audio", "loss/alignment"), len(names)):
        color = f"C{names.index(name) if name in names else i}"
        label = f"held out: {name.removeprefix('loss/')}"
        _line(axis, validation, unit, name, color=color, label=label, marker="o", linestyle=":")
    axis.set_ylabel("loss (nats per target)")
    _log_if_wide(axis, [row[n] for row in metrics for n in ("loss", *names) if row[n] > 0])


def _log_if_wide(axis: Any, values: list[float]) -> None:
    if values and max(values) > 20 * min(values):
        axis.set_yscale("log")


def _line(axis: Any, rows: Rows, x: str, name: str, **style: Any) -> None:
    """Draws a figure over another where a row has it."""
    points = [(row[x], row[name]) for row in rows if name in row and row[name] == row[name]]
    if points:
        axis.plot(*zip(*points, strict=True), **{"linewidth": 1.4, "markersize": 3.5, **style})


def spectrograms(file: Path, question: tuple[Tensor, int] | None, answer: tuple[Tensor, int], asked: str, said: str) -> Path:
    """Draw the spectrograms of a question (samples [S] and their rate; None where it was asked in writing) and its answer,
    one above the other on the same axes, titled by their texts."""
    sounds = [("question", asked, question), ("answer", said, answer)]
    present = [(side, text, sound) for side, text, sound in sounds if sound is not None]
    top = min(8000, max(rate // 2 for _, _, (_, rate) in present))
    longest = max(len(samples) / rate for _, _, (samples, rate) in present)
    with drawn(file, len(present), 1, (8, 2.6 * len(present) + 0.4), sharex=True) as axes:
        for axis, (side, text, (samples, rate)) in zip(axes[:, 0], present, strict=True):
            power, seconds = spectrogram(samples, rate)
            axis.imshow(
                power, origin="lower", aspect="auto", cmap="magma", vmin=power.max() - 70, vmax=power.max(),
                extent=(0, seconds, 0, rate / 2 / 1000),
            )  # fmt: skip
            axis.grid(False)
            axis.set(facecolor="black", ylabel="kHz", ylim=(0, top / 1000), xlim=(0, longest))
            axis.set_title(f"{side}: {printable(text)}")
        axes[-1, 0].set_xlabel("seconds")
    return file


def spectrogram(samples: Tensor, rate: int, window: float = 0.025, hop: float = 0.010) -> tuple[np.ndarray, float]:
    """Power in dB [bins, frames] of a sound [S] (Hann window of 25 ms every 10 ms), and its length in seconds."""
    size, step = round(window * rate), round(hop * rate)
    samples = samples.detach().float().cpu()
    padded = torch.nn.functional.pad(samples, (0, max(0, size - len(samples))))
    spectrum = torch.stft(padded, n_fft=size, hop_length=step, window=torch.hann_window(size), return_complex=True)
    power = 10 * torch.log10(spectrum.abs().square() + 1e-10)
    return power.numpy(), len(samples) / rate


def balance(folder: Path) -> Path | None:
    """Draw `balance.png` from a folder's `balance.csv`; a panel for each kind of figure. None before there is a row."""
    rows = read_table(folder / BALANCE)
    figures = [figure for figure in PANELS if rows and any(name.startswith(f"{figure}/") for name in rows[0])]
    if not figures:
        return None
    size = (8, 2.6 * len(figures) + 0.4)
    with drawn(folder / PICTURE, len(figures), 1, size, {"ncols": 3}, sharex=True) as axes:
        for figure, axis in zip(figures, axes[:, 0], strict=True):
            names = [name for name in rows[0] if name.startswith(f"{figure}/")]
            for i, name in enumerate(names):
                label, marker = name.removeprefix(f"{figure}/").replace("/", " and "), "o" if len(rows) == 1 else ""
                _line(axis, rows, "step", name, color=f"C{i}", label=label, linewidth=1.2, marker=marker)
            if figure == "norm":
                _log_if_wide(axis, [row[name] for row in rows for name in names if row[name] > 0])
            if figure == "cosine":
                axis.set_ylim(-1.05, 1.05)
                axis.axhline(0, color=INK, linewidth=0.6)
            axis.set_ylabel(PANELS[figure])
        axes[-1, 0].set_xlabel("step")
        axes[0, 0].set_title(f"{folder.resolve().name}: balance of the tasks")
    return folder / PICTURE


def pictures(folder: Path) -> dict[str, Path]:
    """Redraws the curves; returns the pictures that exist, by name."""
    curves(folder)
    balance(folder)
    files = [folder / name for name in (CURVES, SPECTROGRAMS, PICTURE)]
    return {file.stem: file for file in files if file.exists()}
