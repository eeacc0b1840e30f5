"""What the commands that look at rows have in common: their arguments, the bar, tables and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from omni.errors import UserError
from train.console.progress import Kind
from train.console.rates import Display
from train.data.inspect.scan import Found, Lost, Scan
from train.data.prepare.files import write_json


class Parser(jsonargparse.ArgumentParser):
    """Arguments of `python -m train data NAME`; what is wrong with them is one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"python -m train data {name}", description=description, exit_on_error=False, default_env=False)
        self._name = name

    def error(self, message: str, ex: BaseException | None = None) -> None:  # type: ignore[override]
        text = " ".join(str(message).split())
        raise UserError(f"data {self._name}: {text}; see python -m train data {self._name} --help") from ex

    def progress(self) -> None:
        """The option for what is shown."""
        self.add_argument("--progress", type=Literal["auto", "bar", "lines", "off"], default="auto", help="what is shown")

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """The arguments by name, dataclasses made."""
        return vars(self.instantiate(self.parse_args(list(argv))))


class RowDisplay(Display):
    """Rows done, rows a second, time left."""

    def pace(self) -> str:
        return ", ".join(part for part in super().pace().split(", ") if "real time" not in part)


def watched(scan: Scan, display: Display) -> Iterator[Found | Lost]:
    """The rows of a scan, each counted on the display once it is done with."""
    for item in scan:
        yield item
        display.tick(item.count if isinstance(item, Lost) else 1, 0.0)


def display_of(kind: Kind, *scans: Scan) -> RowDisplay:
    """A bar over all rows of some scans."""
    return RowDisplay(sum(len(scan) for scan in scans), kind=kind)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output; all columns but the first to the right where they hold figures."""
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


def save_report(path: Path, data: Any) -> None:
    """Data as a JSON file; its folder is made."""
    make_folder(path.parent)
    write_json(path, data)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; UserError where a file stands in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} lies in a file, or is one: name a folder") from error
