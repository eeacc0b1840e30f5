"""What can be said of a command line before anything heavy is imported: its command, its options, its files and folders."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from omni.errors import UserError
from omni.remote import refuse_remote


def check_command(name: str, known: Iterable[str], of: str = "") -> None:
    """UserError, with the closest name, where there is no such one: of `data`, `edit`, or `python -m train` itself."""
    names = list(known)
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"{of} command {name!r} is unknown; {hint}known: {', '.join(names)}".strip())


def check_config(file: Path) -> None:
    """UserError, with the closest name, where a configuration's file is not there."""
    refuse_remote(file, "configuration")
    if file.exists() and not file.is_file():
        raise UserError(f"configuration {file} is a folder, a pipe or a device; give a YAML file such as configs/nano.yaml")
    if not file.is_file():
        near = sorted(str(p) for p in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        close = get_close_matches(str(file), near, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}?" if close else "give a YAML file such as configs/nano.yaml"
        raise UserError(f"configuration {file} does not exist; {hint}")


def check_folder_to_be(folder: Path, key: str) -> None:
    """UserError where a folder cannot be made, since a file is in its place."""
    taken = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if taken is not None and not taken.is_dir():
        raise UserError(f"{key} {folder}: {taken} is a file where a folder belongs; name another folder")
