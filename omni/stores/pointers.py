"""Pointer files in the cache, which stand for objects of a data set that stay in their store, as in Git LFS.

    CACHE/stores/files/0123abcd…-pointers/pointers@1           the address, and the paths of all pointer files
    CACHE/stores/files/0123abcd…-pointers/NAME/clips/a.flac    a pointer file: the object's address, size and version
    CACHE/stores/files/0123abcd…-pointers/NAME/train.tsv       a file that came as it is

Readers see a folder of files. Only pointer files of this cache are followed, whatever else a data set holds.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

from omni.audio.decode import SUFFIXES
from omni.errors import UserError
from omni.stores.cache import own_cache
from omni.stores.drivers import StoredObject, join
from omni.stores.tries import StoreError

POINTERS = "pointers@1"
"""The file beside a folder in the cache that has pointer files (a name that no such folder has): its address, and their
paths, with NUL after each."""
POINTED = (".parquet", *SUFFIXES)
"""Ends of the names of files that pointer files may stand for: recordings, and Parquet."""


def write_pointers(entry: Path, folder: str, address: str, names: dict[str, StoredObject]) -> None:
    """Write pointer files for objects at `address`, by their paths, into a folder of a cache's entry, and the list of them."""
    for name, stored in names.items():
        target = entry / folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps([stored.address, stored.size, stored.version]), encoding="utf-8")
    (entry / POINTERS).write_bytes(b"\0".join([*map(os.fsencode, (address, *sorted(names))), b""]))


def pointed_at(path: str | os.PathLike[str]) -> StoredObject | None:
    """The object that a pointer file in the cache stands for; None for all other files.

    StoreError where the pointer file is damaged, or was removed.
    """
    file = os.fspath(path)
    if not file.lower().endswith(POINTED) or not has_pointers(file):
        return None
    try:
        address, size, version = json.loads(Path(file).read_bytes())
        return StoredObject(str(address), int(size), str(version))
    except FileNotFoundError:
        _check_removed(file)
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{file} in the cache is damaged ({error}): remove the folder {entry_of(file)}") from error


def _check_removed(file: str) -> None:
    """StoreError where a pointer file that came is not there any more."""
    entry = entry_of(file)
    name = file[len(entry) + 1 :].partition(os.sep)[2]
    try:
        came = b"\0" + os.fsencode(name) + b"\0" in Path(entry, POINTERS).read_bytes()
    except FileNotFoundError:
        came = True
    if came:
        raise StoreError(f"{file} was removed from the cache while it was read: run the same command again")


def address_of(folder: Path) -> str:
    """The address of a folder that was brought with pointer files, or of one in it, with a slash at its end; "" for others."""
    if not has_pointers(folder):
        return ""
    entry = entry_of(str(folder))
    inner = str(folder)[len(entry) + 1 :].partition(os.sep)[2]
    address = os.fsdecode(Path(entry, POINTERS).read_bytes().partition(b"\0")[0])
    return f"{join(address, inner).rstrip('/')}/"


def check_pointers(path: str | os.PathLike[str]) -> None:
    """StoreError where a folder with pointer files, or the one that a file is in, is not in the cache any more."""
    if not has_pointers(path):
        raise StoreError(f"{path} was removed from the cache while it was read: run the same command again")


def has_pointers(path: str | os.PathLike[str]) -> bool:
    """Whether a folder, or the one that a file is in, was brought with pointer files."""
    file = os.fspath(path)
    entry = entry_of(file) if "-pointers" in file else ""
    return bool(entry) and os.path.exists(os.path.join(entry, POINTERS))


def check_cache(folder: Path) -> None:
    """UserError where a folder that another process brought with pointer files lies outside of this process's cache."""
    if (folder.parent / POINTERS).is_file() and not has_pointers(folder):
        raise UserError(
            f"{folder} is not in the cache {own_cache().folder}: set OMNI_CACHE to the same folder for all processes"
        )


def stored_size(path: str | os.PathLike[str]) -> int:
    """Size of a file, in bytes, or of the object that it stands for; OSError where there is no such file."""
    stored = pointed_at(path)
    return os.stat(path).st_size if stored is None else stored.size


def entry_of(path: str) -> str:
    """The cache's entry that a path is in; "" for one that is elsewhere."""
    try:
        roots = _roots(str(own_cache().folder))
    except RuntimeError:  # there is no home folder, and so no cache
        return ""
    for root in roots:
        if path.startswith(root):
            return root + path[len(root) :].partition(os.sep)[0]
    return ""


@lru_cache(maxsize=8)
def _roots(folder: str) -> tuple[str, ...]:
    """How paths of whole files and folders in a cache start, as they are and with links resolved."""
    return tuple(
        dict.fromkeys(
            os.path.join(path, "") for path in (os.path.join(folder, "files"), os.path.realpath(os.path.join(folder, "files")))
        )
    )
