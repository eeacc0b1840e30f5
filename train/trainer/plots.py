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
    longest = max(row["seconds"] for row in [*metrics, *validation])
    scale, unit = (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")
    with drawn(folder / CURVES, 3, 1, (9.5, 9), BESIDE, sharex=True, height_ratios=(3, 1, 2)) as axes:
        losses, rate, figures = axes[:, 0]
        _losses(losses, metrics, validation, scale)
        _line(rate, metrics, "lr", scale, "C0", "")
        rate.set_ylabel("learning rate")
        rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        _validation(figures, validation, scale)
        figures.set_xlabel(unit)
        last = max(row["step"] for row in [*metrics, *validation])
        losses.set_title(f"{folder.resolve().name}: {last:.0f} steps in {duration(longest)}")
    return folder / CURVES


def _losses(axis: Any, metrics: list[dict[str, float]], validation: list[dict[str, float]], scale: float) -> None:
    names = [name for name in (metrics[0] if metrics else {}) if name.startswith("loss/")]
    for i, name in enumerate(names):
        label = name.removeprefix("loss/")
        _line(axis, metrics, name, scale, f"C{i}", label, width=1.0, style="--" if label in TASKS else "-")
    _line(axis, metrics, "loss", scale, "black", "objective", width=1.6)
    for i, name in enumerate(("loss/text", "loss/audio"), len(names)):
        color = f"C{names.index(name) if name in names else i}"
        _line(axis, validation, name, scale, color, f"held out: {name.removeprefix('loss/')}", marker="o", style=":")
    axis.set_ylabel("loss (nats per target)")
    _log_if_wide(axis, [row[n] for row in metrics for n in ("loss", *names) if row[n] > 0])


def _validation(axis: Any, validation: list[dict[str, float]], scale: float) -> None:
    from matplotlib.ticker import PercentFormatter

    shown = [name for name in (validation[0] if validation else {}) if name.split("/")[0] in MEASURED]
    for i, name in enumerate(shown):
        inside = [{**row, name: min(row[name], HIGHEST)} for row in validation]  # word errors can exceed the words
        style = ":" if "/" in name else "-"
        _line(axis, inside, name, scale, f"C{i}", name.replace("_", " "), marker="o", style=style)
        above = [row["seconds"] / scale for row in validation if row[name] > HIGHEST]
        axis.plot(above, [HIGHEST] * len(above), "^", color=f"C{i}", markersize=7)
    highest = max([row[n] for row in validation for n in shown if row[n] == row[n]], default=0.0)
    axis.set(ylim=(-0.03, min(HIGHEST, max(1.0, highest)) + 0.03), ylabel="validation")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _log_if_wide(axis: Any, values: list[float]) -> None:
    if values and max(values) > 20 * min(values):
        axis.set_yscale("log")


def _line(
    axis: Any, rows: list[dict[str, float]], name: str, scale: float, color: str, label: str, *, width: float = 1.4,
    marker: str = "", style: str = "-",
) -> None:  # fmt: skip
    points = [(row["seconds"] / scale, row[name]) for row in rows if name in row and row[name] == row[name]]
    if points:
        x, y = zip(*points, strict=True)
        axis.plot(x, y, style, color=color, label=label, linewidth=width, marker=marker, markersize=3.5)


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


PICTURE = "balance.png"


PANELS = {"weight": "weight", "norm": "gradient norm", "cosine": "cosine"}


def balance(folder: Path) -> Path | None:
    """Draw `balance.png` from a folder's `balance.csv`; a panel for each kind of figure that it has. None before there is a
    row."""
    rows = read_table(folder / BALANCE)
    figures = [figure for figure in PANELS if rows and any(name.startswith(f"{figure}/") for name in rows[0])]
    if not figures:
        return None
    size = (8, 2.6 * len(figures) + 0.4)
    with drawn(folder / PICTURE, len(figures), 1, size, {"ncols": 3}, sharex=True) as axes:
        for figure, axis in zip(figures, axes[:, 0], strict=True):
            names = [name for name in rows[0] if name.startswith(f"{figure}/")]
            for i, name in enumerate(names):
                points = [(row["step"], row[name]) for row in rows if row[name] == row[name]]
                if points:
                    label, marker = name.removeprefix(f"{figure}/").replace("/", " and "), "o" if len(points) == 1 else ""
                    axis.plot(*zip(*points, strict=True), color=f"C{i}", label=label, linewidth=1.2, marker=marker)
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
    files = {"curves": CURVES, "spectrogram": SPECTROGRAMS, "balance": PICTURE}
    paths = {name: folder / file for name, file in files.items()}
    return {name: file for name, file in paths.items() if file.exists()}
