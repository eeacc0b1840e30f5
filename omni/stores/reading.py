"""What callers need of addresses: a file or folder here, read through the cache; an object open for reading at any place.

`local_path("runs/nano/model")` is that path; `local_path("s3://bucket/model")` is a folder in the cache with what is there.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import flush
from omni.remote import find_address, shown
from omni.stores.cache import StoreCache, key_of
from omni.stores.drivers import StoredObject, inner_name, join, list_objects, lists, look_up, look_up_all, parent, read_range
from omni.stores.hub import parse_hub, snapshot
from omni.stores.tries import MissingError

LOG = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Bytes of a block of an object that is read in place: the unit of the cache."""
PIECE, THREADS = 8 << 20, 8
"""Most bytes of a request, and requests at a time for a whole file or folder."""
CONFIG = "config.json"
"""The file of a model folder that lists the others."""
NAME = 60
"""Most characters of an address's last part in the name of its folder in the cache."""


@lru_cache(maxsize=8)
def cache(process: int, folder: str) -> StoreCache:
    """The cache of a process; another one after a fork, whose locks are not shared."""
    return StoreCache(Path(folder))


def own_cache() -> StoreCache:
    """The cache of this process."""
    from omni.files import cache_folder

    return cache(os.getpid(), str(cache_folder() / "stores"))


# --- whole files and folders --------------------------------------------------------------------------------------------

_fetched: dict[str, Path] = {}
_listed: dict[str, list[StoredObject]] = {}


def local_path(path: str | os.PathLike[str], again: bool = False) -> Path:
    """The path itself, or, where it is an address, that of what is there, in the cache (of models at the hub, in the hub's).

    An address is looked at once in a process, so that all of a run reads the same version.

    Args:
        again: look whether it has changed since.

    Raises:
        UserError: nothing is there, it cannot be read, or the cache has no room for it.
    """
    address = find_address(path)
    if address is None:
        return Path(path)
    if again or address not in _fetched or not _fetched[address].exists():
        model = parse_hub(address)
        _fetched[address] = fetch(address, _objects(address)) if model is None else snapshot(model)
    return _fetched[address]


def _objects(address: str) -> list[StoredObject]:
    """The objects at an address. A web server lists no folders: one of a model is known by the files that its `config.json`
    names."""
    if lists(address) or "." in address.partition("?")[0].rpartition("/")[2]:
        return look_up_all(address)
    try:
        names = json.loads(read_whole(join(address, CONFIG)))["files"]
    except MissingError:
        return look_up_all(address)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shown(join(address, CONFIG))} does not list the model's files: copy the folder here") from error
    return [look_up(join(address, str(name))) for name in (CONFIG, *names)]


def listed(address: str) -> list[StoredObject]:
    """The objects in a folder, looked at once in a process; see `omni.stores.drivers.list_objects`."""
    if address not in _listed:
        _listed[address] = list_objects(address)
    return _listed[address]


def looked_up(address: str) -> StoredObject:
    """An object, looked at once in a process; see `omni.stores.drivers.look_up`."""
    if address not in _listed:
        _listed[address] = [look_up(address)]
    return _listed[address][0]


def local_file(one: StoredObject) -> Path:
    """An object that was listed, as a file in the cache."""
    return fetch(one.address, [one])


def fetch(address: str, objects: Sequence[StoredObject]) -> Path:
    """Bring the objects in a folder of addresses, or the one at `address`, into the cache; returns the folder or the file."""
    single = len(objects) == 1 and objects[0].address == address
    base = parent(address) if single else address
    names = {inner_name(one.address.partition("?")[0], base): one for one in objects}
    kept, size = own_cache(), sum(one.size for one in objects)
    key = key_of(address, *((one.address, one.size, one.version) for one in objects))
    last = "".join(c for c in address.partition("?")[0].rpartition("/")[2] if c.isalnum() or c in "._-")[-NAME:] or "files"
    inner = next(iter(names)) if single else last
    while True:
        with kept.filling(key, size, shown(address)) as folder:
            if folder is not None:
                LOG.info("fetching %s (%.1f MB)", shown(address), size / 1e6)
                _fill(folder if single else folder / last, names)
        place = kept.hold(key)
        if place is not None:
            return place / inner


def download(address: str, objects: Sequence[StoredObject], folder: Path) -> None:
    """Write the objects in a folder of addresses to a folder here, without the cache.

    Raises:
        UserError: they cannot be read.
        OSError: the folder cannot be written.
    """
    _fill(folder, {inner_name(one.address, address): one for one in objects})


def _fill(folder: Path, names: dict[str, StoredObject]) -> None:
    """Write objects to a folder, by several requests at a time, and sync them to the disk."""
    with ThreadPoolExecutor(THREADS) as pool:
        works = []
        for name, one in names.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
            works += [pool.submit(_copy, one, start, target) for start in range(0, one.size, PIECE)]
        try:
            for work in works:
                work.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for name in names:
        flush(folder / name)


def _copy(one: StoredObject, start: int, target: Path) -> None:
    data = read_range(one, start, min(one.size, start + PIECE))
    with target.open("r+b", buffering=0) as file:
        file.seek(start)
        view = memoryview(data)
        while len(view):
            view = view[file.write(view) :]


@contextmanager
def naming(given: str | os.PathLike[str], here: Path) -> Iterator[None]:
    """A context in which errors about a file in the cache name the address that it came from."""
    address = find_address(given)
    try:
        yield
    except UserError as error:
        if address is None or str(here) not in str(error):
            raise
        error.args = (str(error).replace(str(here), shown(address)),)
        raise


def read_whole(address: str) -> bytes:
    """The bytes of a small object, as it is now; they are not kept. MissingError where there is none."""
    one = look_up(address)
    return read_range(one, 0, one.size)


# --- at any place -------------------------------------------------------------------------------------------------------


class ObjectReader(io.RawIOBase):
    """An object, open for reading at any place: by blocks, which the cache keeps. Blocks side by side are one request.

    Raises:
        ChangedError: in `read`, where the object is not any more what was listed.
        UserError: in `read`, where it cannot be read.
    """

    def __init__(self, of: StoredObject) -> None:
        super().__init__()
        self.of = of
        self._at = 0
        self._last: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

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
        kept = own_cache()
        found = {n: self._last[1] if self._last[0] == n else kept.read_block(self._key(n)) for n in range(first, last + 1)}
        lacking = [n for n, data in found.items() if data is None]
        while lacking:
            run = [n for i, n in enumerate(lacking) if n == lacking[0] + i][: PIECE // BLOCK]
            lacking = lacking[len(run) :]
            data = read_range(self.of, run[0] * BLOCK, min(self.of.size, (run[-1] + 1) * BLOCK))
            for i, n in enumerate(run):
                found[n] = data[i * BLOCK : (i + 1) * BLOCK]
                kept.write_block(self._key(n), found[n] or b"")
        self._last = (last, found[last] or b"")
        return [data or b"" for data in found.values()]

    def _key(self, number: int) -> str:
        return key_of(self.of.address, self.of.size, self.of.version, number, BLOCK)
