"""Files that appear under their name only when they are whole: written beside it and renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omni.errors import UserError


def replaceable(path: str | os.PathLike[str]) -> Path:
    """Where a file of that name is, links followed: a link keeps pointing at its file. UserError for a folder or a device."""
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise UserError(f"{os.fspath(path)!r} is not a file that can be replaced (a folder or a device): name a file")
    return place


def beside(place: Path, owner: object) -> Path:
    """A name in the folder of `place` for what is still being written; each owner of each process has its own."""
    return place.with_name(f".{place.name}.part-{os.getpid()}-{id(owner):x}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The name to write under: it becomes `path` where the block ends well; otherwise nothing stays, and what was there does.

    Raises:
        UserError: `path` is a folder or a device.
        OSError: it cannot be written.
    """
    place, owner = replaceable(path), object()
    part = beside(place, owner)
    try:
        yield part
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
