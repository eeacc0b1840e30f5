"""Prints tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output; columns of figures, other than the first, are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        figures = i > 0 and all(not row[i] or row[i][0] in "-0123456789" for row in rows)
        table.add_column(column, justify="right" if figures else "left", no_wrap=figures or i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)
