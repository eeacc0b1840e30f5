"""Pictures of the balance: weights, gradient norms and cosines of the tasks over the steps."""

from __future__ import annotations

from pathlib import Path

from train.trainer.logs import BALANCE, read_table
from train.trainer.plots import COLORS, GRID, INK, pyplot_quietly, save_figure

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
