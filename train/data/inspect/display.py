"""Progress bar and report files of the commands that inspect rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import write_json
from train.console.command import Parser, check_least
from train.console.progress import Display, Kind
from train.data.executor import Processes, Result, imap
from train.data.inspect.scan import Scan


class RowDisplay(Display):
    """Shows rows done, rows a second and the time left."""

    def pace(self) -> str:
        return ", ".join(part for part in super().pace().split(", ") if "real time" not in part)


def over(
    scan: Scan, start: Callable[[], Callable[[range], Result]], processes: Processes, display: Display, most: int = sys.maxsize
) -> Generator[Result, None, None]:
    """Apply work (see `train.data.executor`) to pieces of a scan, of `most` rows at most; counts their rows on the display."""
    pieces = scan.pieces(most)
    with closing(imap(start, pieces, processes)) as results:
        for piece, result in zip(pieces, results, strict=True):
            yield result
            display.tick(len(piece), 0.0)


def display_of(kind: Kind, *scans: Scan) -> RowDisplay:
    """Make a display for all rows of some scans."""
    return RowDisplay(sum(map(len, scans)), kind=kind)


def add_processes(parser: Parser) -> None:
    """Add the options that say which processes work, see `chosen_processes`."""
    parser.add_argument("--workers", type=int, help="processes; 0 works in this one, by default one on every core")
    parser.add_argument("--ray", type=str, default="", help="a Ray cluster whose processes work, see `data prepare`")


def chosen_processes(chosen: Mapping[str, Any], device: str = "cpu") -> Processes:
    """The processes that the options name; UserError where their number is negative."""
    check_least(chosen, workers=0)
    return Processes(chosen["workers"], device=device, ray=chosen["ray"])


def save_report(path: Path, data: Any) -> None:
    """Write data to a JSON file, making its folder."""
    make_folder(path.parent)
    write_json(path, data)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; UserError where a file is in its place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} lies in a file, or is one: name a folder") from error
