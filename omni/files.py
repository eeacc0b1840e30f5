"""Writes files and folders atomically: under a temporary name beside the target, renamed when they are whole."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from omni.errors import UserError
from omni.utils.remote import refuse_remote

LONGEST = 255
"""Longest file name, in bytes, that file systems accept."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""System errors that mean that there is no room for a file."""
PASSING = (
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.EPIPE, errno.ECONNRESET),
    *(errno.ECONNREFUSED, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)
"""System errors of a disk, or a network, that may be over at another try."""
LFS = b"version https://git-lfs"
"""The start of a pointer file of Git LFS."""
AGAIN = "fetch or save the folder again"
"""Advice for a damaged file of a model's folder."""
LARGEST_JSON, DEEPEST = 100_000_000, 100
"""Most bytes, and most levels of nesting, of a JSON file."""
LOCK = ".lock"
"""Lock file in a folder that a process works in; names that process."""


def cache_folder() -> Path:
    """The folder for what may be lost: `OMNI_CACHE`, or `omni-speech` in `XDG_CACHE_HOME` or the system's usual place."""
    if os.environ.get("OMNI_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(os.environ["OMNI_CACHE"])))
    usual = {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(sys.platform, ".cache")
    return Path(os.path.abspath(os.environ.get("XDG_CACHE_HOME") or Path("~", usual).expanduser())) / "omni-speech"


def replaceable(path: str | os.PathLike[str]) -> Path:
    """Resolves the path of a file that is to be written or replaced, links followed (a link keeps pointing at its file).

    UserError for a folder, a device, or a name that no file can have.
    """
    try:
        resolved = Path(os.path.realpath(path))
        taken = resolved.exists() and not resolved.is_file()
    except (OSError, ValueError) as error:  # too long; a zero byte, or half of a surrogate pair
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{repr(os.fspath(path))[:200]} cannot be written: {reason}: give another name") from error
    if taken:
        raise UserError(f"{os.fspath(path)!r} is not a file that can be replaced (a folder or a device): name a file")
    return resolved


def beside(path: Path, owner: object) -> Path:
    """Temporary name in the folder of `path` for a file or folder that is being written; unique to owner and process."""
    name, end = path.name, f".part-{os.getpid()}-{id(owner):x}"
    while len(os.fsencode(f".{name}{end}")) > LONGEST:
        name = name[:-1]
    return path.with_name(f".{name}{end}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary name to write under, which is renamed to `path` when the block ends well.

    Otherwise what was written is removed, and what `path` was before stays.

    Raises:
        UserError: `path` is a folder or a device.
        OSError: it cannot be written.
    """
    target, owner = replaceable(path), object()
    part = beside(target, owner)
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a small file atomically, synced to the disk before it is renamed.

    Half of a surrogate pair, which a path in a text may hold, is written as JSON's escape.

    Raises:
        UserError: `path` is a folder or a device.
        OSError: it cannot be written.
    """
    with replacing(path) as part, part.open("wb") as file:
        file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str | os.PathLike[str], data: Any, indent: int | None = 2) -> None:
    """Write data as JSON, as `write_whole` does; a full disk is a UserError."""
    with writing(path):
        write_whole(path, json.dumps(data, indent=indent, ensure_ascii=False) + "\n")


def read_json(path: Path, otherwise: str = AGAIN, longest: int = LARGEST_JSON) -> dict[str, Any]:
    """Reads the object in a JSON file; UserError, which ends with the advice `otherwise`, where it is missing, damaged, longer
    than `longest` bytes, or nested more than `DEEPEST` deep."""
    refuse_pointer(path)
    try:
        if path.stat().st_size > longest:
            raise ValueError(f"it has {path.stat().st_size} bytes, and at most {longest} are read")
        data = json.loads(path.read_text(encoding="utf-8"))
        level = [data]
        for _ in range(DEEPEST + 1):
            inner = (value.values() if isinstance(value, dict) else value for value in level if isinstance(value, (dict, list)))
            level = [value for values in inner for value in values]
        if level:
            raise RecursionError
    except RecursionError:
        raise UserError(f"{path} cannot be read (it is nested more than {DEEPEST} deep): {otherwise}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): {otherwise}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no JSON object: {otherwise}")
    return data


def refuse_pointer(path: str | os.PathLike[str]) -> None:
    """UserError for a file that is a pointer of Git LFS, which stands for one that was not fetched.

    Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    """
    with suppress(OSError), open(path, "rb") as file:
        if file.read(len(LFS)) == LFS:
            raise UserError(f"{os.fspath(path)} is a pointer of Git LFS: `git lfs pull` there fetches what it stands for")


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager around code that writes `path`: turns the error of a full disk into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"no space left to write {os.fspath(path)}: free some and run the same command again; what is finished stays"
        ) from error


PAGE = 4096
"""Alignment, in bytes, of memory and of places in a file for writes past the page cache."""


def pages(size: int) -> mmap.mmap:
    """Memory of `size` bytes, rounded up to whole pages and starting at one: huge pages where the system has them."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    memory = mmap.mmap(-1, max(1, -(-size // PAGE)) * PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class LargeFile(AbstractContextManager["LargeFile"]):
    """A new file that is written from its beginning to its end, past the page cache (`O_DIRECT`) where the file system can.

    Data whose memory is aligned as its place in the file is go to the disk as they are, other data through a buffer. Closing
    does not sync: the file's size may not be on the disk yet.

    Args:
        size: bytes that will be written, about; small files are written through the page cache.
    """

    BUFFER, LEAST = 8 << 20, 1 << 18
    """Size of the buffer; and of data that are worth a write of their own."""

    def __init__(self, path: str | os.PathLike[str], size: int) -> None:
        flags, direct = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, getattr(os, "O_DIRECT", 0) if size >= self.BUFFER else 0
        try:
            self._file = os.open(path, flags | direct, 0o666)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._file, direct = os.open(path, flags, 0o666), 0
        self._flag, self._at, self._held = direct, 0, 0
        self._buffer = memoryview(pages(self.BUFFER)) if direct else memoryview(b"")

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if exc_type is None and self._flag:
                self._cached()
                self._put(self._buffer[: self._held])
        finally:
            os.close(self._file)

    def write(self, data: Any) -> None:
        """Write bytes, or a contiguous array of them."""
        import numpy as np

        view = memoryview(data).cast("B")
        while self._flag and len(view):
            address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
            direct = len(view) >= self.LEAST and (address - self._at - self._held) % PAGE == 0
            if direct and not self._held:
                whole = len(view) // PAGE * PAGE
                self._put(view[:whole])
                view = view[whole:]
                continue
            end = (self._held // PAGE + 1) * PAGE if direct else self.BUFFER
            count = min(len(view), end - self._held)
            self._buffer[self._held : self._held + count] = view[:count]
            self._held, view = self._held + count, view[count:]
            if self._held == end:
                self._held = 0
                self._put(self._buffer[:end])
        if len(view):
            self._put(view)

    def _put(self, view: memoryview) -> None:
        while len(view):
            try:
                count = os.write(self._file, view)
            except OSError as error:
                if not self._flag or error.errno != errno.EINVAL:
                    raise
                self._cached()  # a file system with pages of another size
                continue
            self._at, view = self._at + count, view[count:]
            if count % PAGE and len(view):
                self._cached()

    def _cached(self) -> None:
        """Goes on through the page cache."""
        import fcntl

        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~self._flag)
        self._flag = 0


def part_of(path: Path) -> Path:
    """The name of a file that is written in several steps, until `publish`; a later start replaces what a killed one left."""
    return path.with_name(f".{path.name}.part")


def publish(path: Path) -> None:
    """Sync the file at `part_of(path)` to the disk and rename it to `path`."""
    flush(part_of(path))
    os.replace(part_of(path), path)
    flush(path.parent)


@contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Locks `folder`, which is made if missing, for this process while the block runs. Another holder may take `wait` seconds
    to end.

    The lock is the operating system's: it ends with the process that holds it, however that ends, so there is nothing to clear
    up after a crash. Its file, `LOCK`, names the holder.

    Raises:
        UserError: another process holds it (it is named), or the file system has no locks.
    """
    from filelock import FileLock, Timeout

    path = folder / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=wait)
        try:
            lock.acquire()
            own = path.stat()
        except FileNotFoundError:  # the folder has just been renamed, or the file removed, by the process that finished it
            lock.release()
            continue
        except Timeout as error:
            holder = "another process"
            with suppress(OSError, ValueError, KeyError):
                data = read_json(path)
                holder = f"process {data['pid']} on {data['host']}, since {data['started']},"
            raise UserError(f"{folder} is in use: {holder} writes into it; wait for it, or choose another folder") from error
        except OSError as error:
            raise UserError(f"{path} cannot be locked ({error.strerror}): work on another file system") from error
        break
    try:
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # the folder may have been renamed, and a file of that name be another process's
            if os.path.samestat(own, path.stat()):
                path.unlink()
        lock.release()


def real_place(folder: str | os.PathLike[str]) -> Path:
    """Resolves the path of a folder that is to be written, links followed; UserError where it has no name to rename to."""
    refuse_remote(folder, "folder", write=True)
    try:
        resolved = Path(folder).resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be followed ({error}); fix the link, or give another place") from error
    if not resolved.name:
        raise UserError(f"{folder} is the root of a disk; give a folder in it")
    return resolved


def check_replaceable(
    target: Path, marks: Sequence[str], inputs: Iterable[Path] = (), *, overwrite: bool = False, kept: str | None = None
) -> None:
    """Refuses (UserError) a folder to write in whose place something would be lost.

    Args:
        marks: files one of which a folder that may be replaced holds.
        inputs: what is read meanwhile.
        kept: name of what a folder that is replaced may not hold.
    """
    real = real_place(target)
    for path in inputs:
        if path.exists() and path.resolve().is_relative_to(real):
            raise UserError(f"{target} holds {path}, which would be lost; give another name")
    if real.exists() and Path.cwd().is_relative_to(real):
        raise UserError(f"{target} is or holds the folder that you are in; leave it first, or give another name")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{target} exists; give another name, or --overwrite to replace it")
    if kept is not None and (target / kept).exists():
        raise UserError(f"{target} holds {kept}/, which would be lost; move it away, or give another name")
    if not any((target / name).is_file() for name in marks):
        raise UserError(f"{target} holds no {' or '.join(marks)}; only such a folder is overwritten: give another name")


@contextmanager
def replacing_folder(target: str | os.PathLike[str], needed: int = 0) -> Iterator[Path]:
    """Yields a new folder to fill, which is renamed to `target` when the block ends well and removed otherwise.

    Where `target` is a symbolic link, its target is replaced, on its own disk; the link stays.

    Args:
        needed: bytes that will be written; a disk that is too small is refused before anything is.

    Raises:
        UserError: no space left, or a place that cannot be written.
    """
    resolved = real_place(target)
    folder = resolved.with_name(f".{resolved.name}.writing-{os.getpid()}")
    try:
        resolved.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(resolved.parent).free
        if needed > free:
            raise UserError(f"{target} needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; free some space")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        sync(folder)
        _replace(folder, resolved)
        flush(resolved.parent)
    except OSError as error:
        way_out = "free some space and try again" if error.errno in FULL else "choose a place that can be written"
        file = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
        raise UserError(
            f"{target} cannot be written ({file}{error.strerror or error}); {way_out}; nothing was left there"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(source: Path, target: Path) -> None:
    """Rename a folder to a name that may exist: the old folder is removed only when the new one is in place, and restored if
    that fails."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if not target.exists():
        os.rename(source, target)
        return
    os.rename(target, old)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(folder: Path) -> None:
    """Sync a folder and all in it to the disk, so that a power cut leaves no name without its content."""
    for path in (*sorted(folder.rglob("*")), folder):
        flush(path)


def flush(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
