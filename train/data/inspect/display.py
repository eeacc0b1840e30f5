"""What the commands that look at rows have in common: the bar and reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import write_json
from train.console.progress import Display, Kind
from train.data.inspect.scan import FoundRow, Lost, Scan


class RowDisplay(Display):
    """Rows done, rows a second, time left."""

    def pace(self) -> str:
        return ", ".join(part for part in super().pace().split(", ") if "real time" not in part)


def watched(scan: Scan, display: Display) -> Iterator[FoundRow | Lost]:
    """The rows of a scan, each counted on the display once it is done with."""
    for item in scan:
        yield item
        display.tick(item.count if isinstance(item, Lost) else 1, 0.0)


def display_of(kind: Kind, *scans: Scan) -> RowDisplay:
    """A bar over all rows of some scans."""
    return RowDisplay(sum(len(scan) for scan in scans), kind=kind)


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
