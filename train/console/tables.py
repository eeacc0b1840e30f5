"""Prints tables on standard output."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 160
"""Characters of a line where there is no terminal."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output; columns of figures, other than the first, are right-aligned."""
    figures = [i for i in range(1, len(columns)) if all(not row[i] or row[i][0] in "-+0123456789" for row in rows)]
    table = new_table(title, columns, figures)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    show_table(table)


def new_table(title: str, columns: Sequence[str], figures: Container[int]) -> Table:
    """A table without rows; `figures` are the numbers of the columns that are right-aligned."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=any(columns))
    for i, column in enumerate(columns):
        right = i in figures
        table.add_column(column, justify="right" if right else "left", no_wrap=right or i == 0, overflow="fold")
    return table


def show_table(table: Table) -> None:
    """Print a table as wide as the terminal, or `WIDTH`."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)  # a title is not broken
    (console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=WIDTH)).print(table)
