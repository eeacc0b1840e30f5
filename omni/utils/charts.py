"""Shared parts of all charts: colours, matplotlib without a display, printable titles, and files that appear whole."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

INK, GRID = "#333333", "#dddddd"


COLORS = (
    *("#1f6fb4", "#e07b00", "#2c9c4b", "#c23b3b", "#7d5fb2", "#8a5a44", "#d16ba5", "#6f6f6f", "#a8a018", "#169aa8"),
    *("#86b9e6", "#ffbe73", "#93d6a6", "#eb9a9a", "#c2b0e0", "#c9a793", "#efb6d6", "#b9b9b9", "#d9d36b", "#84d5de"),
)


def pyplot_quietly() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as pyplot

    return pyplot


def printable(text: str, length: int = 90) -> str:
    """Make a text fit for a title: one line, at most `length` characters, nothing that matplotlib reads as a formula."""
    text = "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")
    return text if len(text) <= length else f"{text[:length]} ..."


def save_figure(figure: Any, file: Path) -> Path:
    beside = file.with_name(f".{file.stem}.writing{file.suffix}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
        figure.tight_layout()
        figure.savefig(beside, dpi=110)
    pyplot_quietly().close(figure)
    beside.replace(file)
    return file
