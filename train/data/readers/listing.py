"""Lists the files below a folder, in memory: about 100 bytes for each.

Links to folders are not followed, and folders that may not be read are left out, as by `Path.rglob`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress


def entries(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """Iterate over the entries of a folder, in no order; over none where it cannot be read."""
    with suppress(OSError), os.scandir(folder) as found:
        yield from found


def walk(folder: str | os.PathLike[str], hidden: bool = True) -> Iterator[os.DirEntry[str]]:
    """Iterate over everything below a folder that is no folder, in no order.

    Args:
        hidden: also over what has a name, or lies in a folder with a name, that starts with a dot.
    """
    open_folders = [entries(folder)]
    while open_folders:
        entry = next(open_folders[-1], None)
        if entry is None:
            open_folders.pop()
        elif hidden or not entry.name.startswith("."):
            if not is_folder(entry):
                yield entry
            elif not entry.is_symlink():
                open_folders.append(entries(entry.path))


def sorted_walk(folder: str | os.PathLike[str], hidden: bool = True) -> list[tuple[str, bool]]:
    """List as `walk`, in the order of paths (by their parts): relative paths, and whether each is a file (or a link to one)."""
    top = len(os.path.join(folder, ""))
    found = [(entry.path[top:], is_file(entry)) for entry in walk(folder, hidden)]
    return sorted(found, key=lambda one: one[0].split("/"))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder, and for a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_file(entry: os.DirEntry[str]) -> bool:
    """True for a file, and for a link to one."""
    try:
        return entry.is_file()
    except OSError:
        return False
