"""Pictures of a run: the curves, and spectrograms of a question and its answer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.tasks import TASKS
from train.console.progress import duration
from train.trainer.logs import METRICS, VALIDATION, read_table

CURVES, SPECTROGRAMS = "curves.png", "spectrogram.png"

INK, GRID = "#333333", "#dddddd"
MEASURED = ("exact_match", "code_accuracy", "wer")
HIGHEST = 1.5
"""Top of the axis of errors and shares; what is above is drawn there, as a triangle."""
COLORS = (
    *("#1f6fb4", "#e07b00", "#2c9c4b", "#c23b3b", "#7d5fb2", "#8a5a44", "#d16ba5", "#6f6f6f", "#a8a018", "#169aa8"),
    *("#86b9e6", "#ffbe73", "#93d6a6", "#eb9a9a", "#c2b0e0", "#c9a793", "#efb6d6", "#b9b9b9", "#d9d36b", "#84d5de"),
)


def pyplot_quietly() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as pyplot

    return pyplot


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


def printable(text: str, length: int = 90) -> str:
    """A text as a title: one line, nothing that matplotlib would read as a formula."""
    text = "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")
    return text if len(text) <= length else f"{text[:length]} ..."


def save_figure(figure: Any, file: Path) -> Path:
    beside = file.with_name(f".{file.stem}.writing{file.suffix}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a script that the font lacks shows as boxes
        figure.tight_layout()
        figure.savefig(beside, dpi=110)
    pyplot_quietly().close(figure)
    beside.replace(file)
    return file
