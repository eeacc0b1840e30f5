"""Charts in one style of matplotlib, in files that appear whole, and tables on terminals and in Markdown."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, GRID = "#333333", "#dddddd"
COLORS = (
    *("#1f6fb4", "#e07b00", "#2c9c4b", "#c23b3b", "#7d5fb2", "#8a5a44", "#d16ba5", "#6f6f6f", "#a8a018", "#169aa8"),
    *("#86b9e6", "#ffbe73", "#93d6a6", "#eb9a9a", "#c2b0e0", "#c9a793", "#efb6d6", "#b9b9b9", "#d9d36b", "#84d5de"),
)
"""Colours in their order: of lines that name none, and of `C0`, `C1` and so on."""
STYLE: Any = {
    "axes.prop_cycle": f"cycler('color', {[*COLORS]})",
    **{"axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "xtick.color": INK, "ytick.color": INK},
    **{"axes.titlelocation": "left", "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8},
    **{"legend.fontsize": 8, "legend.frameon": False, "lines.markersize": 4, "errorbar.capsize": 3},
}
BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
"""Place of a legend to the right of its axes."""
WIDTH = 160  # characters of a line of a table where there is no terminal


def printable(text: str, length: int = 90) -> str:
    """Make a text fit for a title: one line, at most `length` characters, nothing that matplotlib reads as a formula."""
    text = "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")
    return text if len(text) <= length else f"{text[:length]} ..."


@contextmanager
def drawn(
    file: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.0),
    legend: Mapping[str, Any] | None = None, **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """Context with the axes [rows, columns] of a chart, which gets its legends and is written at the end.

    Args:
        size: in inches.
        legend: options of the legends of axes that have labels and no legend yet.
        options: of `pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **options)
        try:
            yield axes
            for axis in figure.axes:
                if axis.get_legend_handles_labels()[0] and axis.get_legend() is None:
                    axis.legend(**(legend or {}))
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{file.stem}.writing{file.suffix}")
            figure.tight_layout()
            figure.savefig(beside, dpi=110)
            beside.replace(file)
        finally:
            pyplot.close(figure)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as wide as the terminal, or `WIDTH`; columns of figures, other than the first, are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=any(columns))
    for i, column in enumerate(columns):
        right = _of_figures(rows, i)
        table.add_column(column, justify="right" if right else "left", no_wrap=right or i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console(highlight=False, soft_wrap=True)  # a title is not broken
    (console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=WIDTH)).print(table)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; columns of figures, other than the first, are right-aligned."""
    rule = ["---:" if _of_figures(rows, i) else "---" for i in range(len(columns))]
    cells = [[" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *cells))


def _of_figures(rows: Sequence[Sequence[str]], column: int) -> bool:
    return column > 0 and all(not row[column] or row[column][0] in "-+>0123456789" for row in rows)
