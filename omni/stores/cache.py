"""Read-through cache of data from stores, in the user's cache folder, with a limit to its size.

    CACHE/stores/blocks/ab/abcdef…        bytes of an object, then their CRC-32
    CACHE/stores/files/0123abcd…/NAME     a file, or a folder of files, as a whole
    CACHE/stores/files/0123abcd….used     locked by each process that reads it
    CACHE/stores/files/0123abcd…-pointers/pointers@1           the address, and the paths of all pointer files
    CACHE/stores/files/0123abcd…-pointers/NAME/clips/a.flac    a pointer file: an object's address, size and version
    CACHE/stores/files/0123abcd…-pointers/NAME/train.tsv       a file that came as it is

The name of an entry is a hash of its address, size and version, so that an object that changes is another entry. Entries appear
whole, by a rename; the oldest use goes first. fsspec's caches (`filecache`, `simplecache`, `blockcache`) have no limit, do not
have the version in the key, and their list of files is not written safely by several processes.

Pointer files stand for objects of a data set that stay in their store, as in Git LFS: readers see a folder of files. Only those
of this cache are followed, whatever else a data set holds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from omni.audio.decode import SUFFIXES
from omni.errors import UserError
from omni.files import FULL, cache_folder, replacing
from omni.stores.drivers import StoredObject, join
from omni.stores.tries import StoreError, number_of

try:
    import fcntl
except ImportError:  # Windows: an entry in use may be deleted, and is fetched again
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger(__name__)

DEFAULT_GB = 50.0  # limit of the cache in GB, without `OMNI_CACHE_GB`
LEFT = 0.9  # share of the limit that is left when the oldest entries are deleted
LOOKS = 20  # a process looks at the size of the whole cache after each of so many parts of the limit that it has written
TOUCHED = 60.0  # seconds within which an entry's use is noted once
RECENT = 16  # blocks that a process keeps in memory where the disk keeps none
CHECKSUM = 4  # bytes of a block's CRC-32


class CacheError(UserError):
    """The cache has no room, or cannot be written."""


def limit_bytes() -> int:
    """Most bytes of the cache: `OMNI_CACHE_GB`, in GB; with 0 no data are kept, and what comes as a whole is refused."""
    return int(number_of("OMNI_CACHE_GB", DEFAULT_GB, lambda value: 0 <= value < 1e9, "gigabytes") * 1e9)


def _amount(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size:,} bytes"


def key_of(*parts: object) -> str:
    """Name of an entry, from all that it depends on."""
    return hashlib.sha256("\n".join(map(str, parts)).encode(errors="surrogatepass")).hexdigest()[:40]


class StoreCache:
    """The cache of a process. Threads and processes may use it together.

    Attributes:
        roots: how paths of whole files and folders start, as they are and with links resolved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, files = folder, os.path.join(folder, "files", "")
        self.roots = files, os.path.join(os.path.realpath(files), "")
        self._lock = threading.Lock()
        self._unlooked: int | None = None  # bytes written since the size was looked at; None before the first look
        self._warned = False
        self._held: dict[Path, int] = {}
        self._recent: dict[str, bytes] = {}

    # --- blocks ---------------------------------------------------------------------------------------------------------

    def read_block(self, key: str) -> bytes | None:
        """The bytes of a block; None where it is not kept, or damaged."""
        path = self.folder / "blocks" / key[:2] / key
        try:
            data = path.read_bytes()
        except OSError:
            return self._recent.get(key)
        if zlib.crc32(data[:-CHECKSUM]).to_bytes(CHECKSUM, "little") != data[-CHECKSUM:]:
            return None
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > TOUCHED:
                os.utime(path)
        return data[:-CHECKSUM]

    def write_block(self, key: str, data: bytes) -> None:
        """Keep a block; where that fails, a line in the log says so once, and data are read without the cache. Of blocks that
        the disk does not keep, memory keeps a few: a recording is read several times, one after another."""
        try:
            if len(data) <= limit_bytes():
                path = self.folder / "blocks" / key[:2] / key
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as part:
                    part.write_bytes(data + zlib.crc32(data).to_bytes(CHECKSUM, "little"))
                self.written(len(data))
                return
        except OSError as error:
            if not self._warned:
                way = "free some space, or set OMNI_CACHE to a folder on another disk, or OMNI_CACHE_GB to less"
                LOG.warning(
                    "the cache %s cannot be written (%s): data are read without it; %s", self.folder, error.strerror, way
                )
            self._warned = True
        with self._lock:
            self._recent = dict([*self._recent.items(), (key, data)][-RECENT:])

    # --- whole files and folders ----------------------------------------------------------------------------------------

    @contextmanager
    def filling(self, key: str, needed: int, address: str) -> Iterator[Path | None]:
        """Yields a new folder to fill, which becomes the entry `key` when the block ends well; None where there is one.
        CacheError: it is larger than the cache may be, or the disk is full, or the cache cannot be written.

        Of several processes one fills it, and the others wait. `hold` must follow, in a loop: the entry may be deleted between.

        Args:
            needed: bytes that will be written.
            address: for messages.
        """
        from filelock import FileLock

        if needed > limit_bytes():
            raise CacheError(
                f"{address} has {_amount(needed)}, and the cache {self.folder} may have {_amount(limit_bytes())}: set "
                "OMNI_CACHE_GB to more"
            )
        target = self.entry(key)
        part = target.with_name(f"{key}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_name(f"{key}.lock")):
                if target.is_dir():
                    yield None
                    return
                shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
                if needed > shutil.disk_usage(target.parent).free:
                    self.shrink(max(0, limit_bytes() - needed))
                part.mkdir()
                try:
                    yield part
                    os.rename(part, target)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
        except OSError as error:
            why = (
                "no space left" if error.errno in FULL else f"{error.strerror or error}: {Path(error.filename or '').name[:99]}"
            )
            raise CacheError(
                f"{address} cannot be kept in the cache {self.folder} ({why}; it needs {_amount(needed)}): free some "
                "space, or set OMNI_CACHE to a folder on another disk"
            ) from error
        self.hold(key)  # before older entries, or those that others use, make it go
        self.written(needed)

    def entry(self, key: str) -> Path:
        """Where the entry `key` of a whole file or folder is."""
        return self.folder / "files" / key

    def hold(self, key: str) -> Path | None:
        """Keeps an entry from being deleted as long as this process lives; None where there is no such entry."""
        path = self.entry(key)
        with self._lock:
            if path not in self._held and fcntl is not None and path.is_dir():
                handle = os.open(path.with_name(f"{key}.used"), os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH)
                except OSError:  # a file system without locks
                    os.close(handle)
                else:
                    self._held[path] = handle
        try:
            os.utime(path)
        except OSError:  # it was deleted
            return None
        return path

    # --- the limit ------------------------------------------------------------------------------------------------------

    def written(self, size: int) -> None:
        """Count bytes that were written, and delete the oldest entries where the cache may have become too large."""
        limit = limit_bytes()
        with self._lock:
            self._unlooked = None if self._unlooked is None else self._unlooked + size
            if self._unlooked is not None and self._unlooked < limit / LOOKS:
                return
            self._unlooked = 0
        self.shrink(limit)

    def shrink(self, limit: int) -> None:
        """Where the cache is larger than `limit` bytes, delete what was not used for longest until it is `LEFT` of that.
        Entries in use stay. Where another process is about it, nothing is done."""
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.folder / "shrinking.lock", timeout=0):
                entries = sorted(self._entries())
                total = sum(size for _, size, _ in entries)
                if total <= limit:
                    return
                for _, size, path in entries:
                    if total <= LEFT * limit:
                        break
                    if _delete(path):
                        total -= size
        except (OSError, Timeout):
            return

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, size and path of each entry."""
        for path in (*self.folder.glob("blocks/*/*"), *self.folder.glob("files/*")):
            with suppress(OSError):  # deleted by another process
                state = path.stat()
                if not path.is_dir():
                    if not path.name.endswith((".lock", ".used")):
                        yield state.st_mtime, state.st_size, path
                    continue
                if not path.name.endswith(".part"):
                    yield state.st_mtime, sum(p.stat().st_size for p in path.rglob("*") if p.is_file()), path


def _delete(path: Path) -> bool:
    """Deletes an entry; False where a process uses it."""
    if path.is_file():
        path.unlink(missing_ok=True)
        return True
    used = path.with_name(f"{path.name}.used")
    handle = os.open(used, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        away = path.with_name(f"{path.name}.part")
        os.rename(path, away)  # so that a half-deleted entry is never taken for whole
        shutil.rmtree(away, ignore_errors=True)
        return True
    finally:
        os.close(handle)


_caches = lru_cache(maxsize=8)(lambda process, folder: StoreCache(Path(folder)))


def own_cache() -> StoreCache:
    """The cache of this process; another one after a fork, whose locks are not shared."""
    return _caches(os.getpid(), str(cache_folder() / "stores"))


# --- pointer files --------------------------------------------------------------------------------------------------------

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
    """The object that a pointer file in the cache stands for; None for all other files, and where there is none. StoreError
    where the pointer file is damaged."""
    file = os.fspath(path)
    if not file.lower().endswith(POINTED) or not has_pointers(file):
        return None
    try:
        address, size, version = json.loads(Path(file).read_bytes())
        return StoredObject(str(address), int(size), str(version))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{file} in the cache is damaged ({error}): remove the folder {entry_of(file)}") from error


def address_of(folder: Path) -> str:
    """The address of a folder that was brought with pointer files, or of one in it, with a slash at its end; "" for others."""
    if not has_pointers(folder):
        return ""
    entry = entry_of(str(folder))
    inner = str(folder)[len(entry) + 1 :].partition(os.sep)[2]
    address = os.fsdecode(Path(entry, POINTERS).read_bytes().partition(b"\0")[0])
    return f"{join(address, inner).rstrip('/')}/"


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
        roots = own_cache().roots
    except RuntimeError:  # there is no home folder, and so no cache
        return ""
    for root in roots:
        if path.startswith(root):
            return root + path[len(root) :].partition(os.sep)[0]
    return ""
