"""Files that appear under their name only when they are whole: written beside it and renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omni.errors import UserError


def replaceable(path: str | os.PathLike[str]) -> Path:
    """Where a file of that name is, links followed: a link keeps pointing at its file. UserError for a folder, a device, or a
    name that no file can have."""
    try:
        place = Path(os.path.realpath(path))
        taken = place.exists() and not place.is_file()
    except (OSError, ValueError) as error:  # too long; a zero byte, or half of a surrogate pair
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{repr(os.fspath(path))[:200]} cannot be written: {reason}: give another name") from error
    if taken:
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
