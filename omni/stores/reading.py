"""Reads what is at addresses: a file or folder in the cache, or an object that is open for reading at any position.

`local_path("runs/nano/model")` is that path; `local_path("s3://bucket/model")` is a folder in the cache with what is there.
With `pointers`, what is large in a data set stays in its store.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from omni.errors import UserError
from omni.files import flush
from omni.stores.cache import POINTED, POINTERS, entry_of, key_of, own_cache, write_pointers
from omni.stores.drivers import (
    SCHEMES,
    StoredObject,
    bare,
    inner_name,
    join,
    list_objects,
    look_up,
    look_up_all,
    parent,
    read_range,
    scheme_of,
)
from omni.stores.hub import parse_hub, snapshot
from omni.stores.tries import MissingError, StoreError
from omni.utils.remote import find_address, shown

LOG = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Bytes of a block of an object that is read in place: the unit of the cache."""
PIECE, THREADS = 8 << 20, 8
"""Most bytes of a request, and requests at a time for a whole file or folder."""
CONFIG = "config.json"
"""The file of a model folder that lists the others."""
NAME = 60
"""Most characters of an address's last part in the name of its folder in the cache."""


# --- whole files and folders --------------------------------------------------------------------------------------------

_fetched: dict[tuple[str, bool], Path] = {}


def local_path(path: str | os.PathLike[str], again: bool = False, pointers: bool = False) -> Path:
    """The path itself, or, where it is an address, that of what is there, in the cache (of models at the hub, in the hub's).
    UserError: nothing is there, it cannot be read, or the cache has no room for it.

    An address is looked at once in a process, so that all of a run reads the same version.

    Args:
        again: look whether it has changed since.
        pointers: of a folder, bring no recordings and no Parquet files, but pointer files (`pointed_at`).
    """
    address = find_address(path)
    if address is None:
        return Path(path)
    known = _fetched.get((address, pointers))
    if again or known is None or not known.exists():
        model = parse_hub(address)
        known = fetch(address, _objects(address), pointers) if model is None else snapshot(model)
        _fetched[address, pointers] = known
    return known


def _objects(address: str) -> list[StoredObject]:
    """The objects at an address. A web server lists no folders: one of a model is known by the files that its `config.json`
    names."""
    if SCHEMES[scheme_of(address)].lists or "." in bare(address).rpartition("/")[2]:
        return look_up_all(address)
    try:
        names = json.loads(read_whole(join(address, CONFIG)))["files"]
    except MissingError:
        return look_up_all(address)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shown(join(address, CONFIG))} does not list the model's files: copy the folder here") from error
    return [look_up(join(address, str(name))) for name in (CONFIG, *names)]


listed, looked_up = cache(list_objects), cache(look_up)
"""`list_objects` and `look_up` (`omni.stores.drivers`), which ask for an address once in a process."""


def fetch(address: str, objects: Sequence[StoredObject], pointers: bool = False) -> Path:
    """Bring the objects in a folder of addresses, or the one at `address`, into the cache; returns the folder or the file. With
    `pointers`, as `local_path`."""
    single = len(objects) == 1 and objects[0].address == address
    base = parent(address) if single else address
    names = _names(objects, base)
    stay = {name: item for name, item in names.items() if pointers and not single and name.lower().endswith(POINTED)}
    come = {name: item for name, item in names.items() if name not in stay}
    kept, size = own_cache(), sum(item.size for item in come.values())
    key = key_of(address, *((item.address, item.size, item.version) for item in objects)) + ("-pointers" if stay else "")
    last = "".join(c for c in bare(address).rpartition("/")[2] if c.isalnum() or c in "._-")[-NAME:] or "files"
    inner = next(iter(names)) if single else last
    while True:
        with kept.filling(key, size, shown(address)) as folder:
            if folder is not None:
                LOG.info("fetching %s (%.1f MB)", shown(address), size / 1e6)
                _fill(folder if single else folder / last, come)
                if stay:
                    write_pointers(folder, last, address, stay)
        entry = kept.hold(key)
        if entry is not None:
            _check(entry, entry if single else entry / last, come, bool(stay))
            return entry / inner


def _names(objects: Sequence[StoredObject], base: str) -> dict[str, StoredObject]:
    """Objects by the paths of their files in a folder; UserError where two would be one."""
    names: dict[str, StoredObject] = {}
    for stored in objects:
        other = names.setdefault(inner_name(stored.address, base), stored)
        if other is not stored:
            raise UserError(f"{stored} and {other} would be the same file here: rename one of them")
    return names


def _check(entry: Path, folder: Path, come: dict[str, StoredObject], pointers: bool) -> None:
    """StoreError where files of an entry of the cache were cut, or removed, since they came."""
    try:
        whole = all((folder / name).stat().st_size == stored.size for name, stored in come.items())
    except OSError:
        whole = False
    if not whole or (pointers and not (entry / POINTERS).is_file()):
        raise StoreError(f"the cache's folder {entry} is damaged: remove it, and run the same command again")


def content_key(path: Path) -> str:
    """Key of the content of a store's file or folder: a hash of its objects' names, sizes and versions.

    Args:
        path: where `local_path` has brought it.
    """
    return os.path.basename(entry_of(str(path))).removesuffix("-pointers")


def download(address: str, objects: Sequence[StoredObject], folder: Path) -> None:
    """Write the objects in a folder of addresses to a folder here, without the cache. UserError: they cannot be read. OSError:
    the folder cannot be written."""
    _fill(folder, {inner_name(stored.address, address): stored for stored in objects})


def _fill(folder: Path, names: dict[str, StoredObject]) -> None:
    """Write objects to a folder, by several requests at a time, and sync them to the disk."""
    with ThreadPoolExecutor(THREADS) as pool:
        works = []
        for name, stored in names.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
            works += [pool.submit(_copy, stored, start, target) for start in range(0, stored.size, PIECE)]
        try:
            for work in works:
                work.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for name in names:
        flush(folder / name)


def _copy(stored: StoredObject, start: int, target: Path) -> None:
    data = read_range(stored, start, min(stored.size, start + PIECE))
    with target.open("r+b") as file:
        file.seek(start)
        file.write(data)


@contextmanager
def naming(path: str | os.PathLike[str], here: Path) -> Iterator[None]:
    """A context in which errors about a file in the cache name the address that it came from."""
    address = find_address(path)
    try:
        yield
    except UserError as error:
        if address is None or str(here) not in str(error):
            raise
        error.args = (str(error).replace(str(here), shown(address)),)
        raise


def read_whole(address: str) -> bytes:
    """The bytes of a small object, as it is now; they are not kept. MissingError where there is none."""
    stored = look_up(address)
    return read_range(stored, 0, stored.size)


# --- at any place -------------------------------------------------------------------------------------------------------


class ObjectReader(io.RawIOBase):
    """An object, open for reading at any place: by blocks, which the cache keeps. Blocks side by side are one request.
    ChangedError: in `read`, where the object is not any more what was listed. UserError: in `read`, where it cannot be read."""

    def __init__(self, of: StoredObject) -> None:
        super().__init__()
        self.of = of
        self._at = 0
        self._last: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.of.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.of.size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        first, last = self._at // BLOCK, (self._at + size - 1) // BLOCK
        data = b"".join(self._blocks(first, last))
        start = self._at - first * BLOCK
        self._at += size
        return data[start : start + size]

    def _blocks(self, first: int, last: int) -> list[bytes]:
        kept, of = own_cache(), self.of
        key = partial(key_of, of.address, of.size, of.version)
        blocks = {n: self._last[1] if self._last[0] == n else kept.read_block(key(n, BLOCK)) for n in range(first, last + 1)}
        lacking = [n for n, data in blocks.items() if data is None]
        while lacking:
            run = [n for i, n in enumerate(lacking) if n == lacking[0] + i][: PIECE // BLOCK]
            lacking = lacking[len(run) :]
            data = read_range(of, run[0] * BLOCK, min(of.size, (run[-1] + 1) * BLOCK))
            for i, n in enumerate(run):
                blocks[n] = data[i * BLOCK : (i + 1) * BLOCK]
                kept.write_block(key(n, BLOCK), blocks[n] or b"")
        self._last = (last, blocks[last] or b"")
        return [data or b"" for data in blocks.values()]


class _Guarded(ObjectReader):
    """An object for a library in C, through which no exception passes: it ends where it cannot be read; `failure` says why."""

    failure: Exception | None = None

    def read(self, size: int | None = -1) -> bytes:
        try:
            return super().read(size)
        except Exception as error:
            self.failure = error
            return b""


@contextmanager
def guarded(stored: StoredObject) -> Iterator[BinaryIO]:
    """A context with an object that is open at any place, for a library in C, such as libsndfile. StoreError: at the end of the
    context, where a part could not be read: whatever the library made of it."""
    raw = _Guarded(stored)
    try:
        yield io.BufferedReader(raw)
    finally:
        if raw.failure is not None:
            raise raw.failure
