"""Files and folders that appear under their name only when they are whole: written beside it and renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omni.errors import UserError
from omni.remote import refuse_remote

LONGEST = 255
"""Bytes of the longest name that file systems take."""


def check_path(path: object, what: str) -> None:
    """UserError for what is no path at all."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"{what} is {repr(path)[:80]}; give a path")


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
    name, end = place.name, f".part-{os.getpid()}-{id(owner):x}"
    while len(os.fsencode(f".{name}{end}")) > LONGEST:
        name = name[:-1]
    return place.with_name(f".{name}{end}")


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


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file through to the disk, then give it its name. Errors: those of `replacing`."""
    with replacing(path) as part, part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def real_place(folder: str | os.PathLike[str]) -> Path:
    """Where a folder that is to be written is, links followed; UserError where it has no name to be renamed to."""
    refuse_remote(folder, "folder", write=True)
    try:
        place = Path(folder).resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be followed ({error}); fix the link, or give another place") from error
    if not place.name:
        raise UserError(f"{folder} is the root of a disk; give a folder in it")
    return place


@contextmanager
def replacing_folder(target: str | os.PathLike[str], needed: int = 0) -> Iterator[Path]:
    """A new folder to fill, renamed to `target` when the block ends well; nothing is left when it does not.

    Where `target` is a symbolic link, what it points at is replaced, on its own disk; the link stays.

    Args:
        needed: bytes that will be written; a disk that is too small is refused before anything is.

    Raises:
        UserError: no space left, or a place that cannot be written.
    """
    place = real_place(target)
    folder = place.with_name(f".{place.name}.writing-{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.parent).free
        if needed > free:
            raise UserError(f"{target} needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; free some space")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        sync(folder)
        _replace(folder, place)
        flush(place.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "free some space and try again" if full else "choose a place that can be written"
        file = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
        reason = f"{file}{error.strerror or error}"
        raise UserError(f"{target} cannot be written ({reason}); {way_out}; nothing was left there") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(source: Path, target: Path) -> None:
    """Rename a folder onto another name; what was there is removed only after the new one is in place, and comes back where
    that fails."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    replaces = target.exists()
    if replaces:
        os.rename(target, old)
    try:
        os.rename(source, target)
    except OSError:
        if replaces:
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(folder: Path) -> None:
    """Wait until a folder and all in it are on the disk, so that a power cut leaves no name without its content."""
    for place in (*sorted(folder.rglob("*")), folder):
        flush(place)


def flush(place: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
