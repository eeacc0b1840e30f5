"""Lists the files below a folder, in memory that does not grow with their number.

Folders are read entry by entry. A folder of up to `HELD` entries is sorted in memory, a larger one by SQLite in a temporary
file. A `FolderListing` keeps what it has found in another (Arrow, compressed), from which any range is read. Both are in
`TMPDIR`. Links to folders are not followed, and folders that may not be read are left out, as by `Path.rglob`.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omni.errors import UserError

HELD = 1 << 16
"""Entries of a folder that are held in memory."""
BATCH = 1 << 12
"""Names that are written, and read, at once."""

_FOLDER, _FILE, _OTHER = "\0d", "\0f", "\0o"
"""Ends of sorted entries: NUL is less than any character of a name, so the order is that of the names."""


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


def sorted_walk(
    folder: str | os.PathLike[str], hidden: bool = True, as_text: bool = False
) -> Iterator[tuple[str, bool]]:  # fmt: skip
    """Iterate as `walk`, in the order of paths: over relative paths, and whether each is a file (or a link to one).

    Args:
        as_text: the order is that of the paths as texts, in which `a.b` comes before `a/b`; `Path` sorts by parts.

    Raises:
        UserError: there is no room for a temporary file.
    """
    top = os.fspath(folder)
    open_folders = [("", _sorted(top, hidden, as_text))]
    while open_folders:
        place, found = open_folders[-1]
        entry = next(found, None)
        if entry is None:
            open_folders.pop()
        elif entry.endswith(_FOLDER):
            inner = f"{place}{entry.partition(chr(0))[0].rstrip('/')}/"
            open_folders.append((inner, _sorted(os.path.join(top, inner), hidden, as_text)))
        else:
            yield place + entry[:-2], entry.endswith(_FILE)


def _sorted(folder: str, hidden: bool, as_text: bool) -> Iterator[str]:
    """Entries of one folder, sorted: their names, and what they are."""
    held: list[str] = []
    database: sqlite3.Connection | None = None
    try:
        for entry in entries(folder):
            folder_here = is_folder(entry)
            if (hidden or not entry.name.startswith(".")) and not (folder_here and entry.is_symlink()):
                held.append(_marked(entry, folder_here, as_text))
            if len(held) >= HELD:
                if database is None:
                    database = sqlite3.connect("")  # a temporary file
                    database.execute("create table entries (name blob)")
                _insert(database, held)
                held = []
        if database is None:
            held.sort()
            yield from held
            return
        _insert(database, held)
        for (name,) in database.execute("select name from entries order by name"):
            yield name.decode("utf-8", "surrogatepass")
    except sqlite3.OperationalError as error:
        raise UserError(f"{tempfile.gettempdir()} has no room to sort the names in {folder} ({error}): set TMPDIR") from error
    finally:
        if database is not None:
            database.close()


def _insert(database: sqlite3.Connection, names: list[str]) -> None:
    """Add names, in an encoding whose bytes sort as Python sorts texts."""
    database.executemany("insert into entries values (?)", ((name.encode("utf-8", "surrogatepass"),) for name in names))


def _marked(entry: os.DirEntry[str], folder: bool, as_text: bool) -> str:
    if folder:
        return entry.name + ("/" if as_text else "") + _FOLDER
    return entry.name + (_FILE if is_file(entry) else _OTHER)


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


class FolderListing:
    """The files below a folder that a function takes by name, sorted as paths: their number, and any range of them.

    The folder is listed when it is first asked for. The listing can be pickled; a process that cannot see its temporary file,
    such as one of another machine, lists the folder again.

    Args:
        takes: whether a name of a file counts; it can be pickled.
    """

    def __init__(self, folder: Path, takes: Callable[[str], bool], hidden: bool = False) -> None:
        self.folder, self._takes, self._hidden = folder, takes, hidden
        self._file, self._count, self._sum = "", 0, 0
        self._reader: Any = None
        self._last: tuple[int, list[bytes]] = (-1, [])

    def __len__(self) -> int:
        if not self._file:
            self._list()
        return self._count

    def names(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """Iterate over the relative paths of files `start` to `stop`; UserError where the folder has changed meanwhile."""
        stop = len(self) if stop is None else min(stop, len(self))
        while start < stop:
            number = start // BATCH
            batch = self._batch(number)[start % BATCH : stop - number * BATCH]
            yield from map(os.fsdecode, batch)
            start += len(batch)

    def _batch(self, number: int) -> list[bytes]:
        if self._last[0] != number:
            import pyarrow as pa

            if self._reader is None:
                there = os.path.exists(self._file)
                if not there:
                    self._again()
                self._reader = pa.ipc.open_file(pa.memory_map(self._file))
                if not there:
                    _remove(self._file, os.getpid())
            self._last = number, self._reader.get_batch(number).column(0).to_pylist()
        return self._last[1]

    def _again(self) -> None:
        """List the folder in a process that cannot see the file of another one, which may be killed: its own has no name."""
        count, total = self._count, self._sum
        self._list()
        if (self._count, self._sum) != (count, total):
            raise UserError(
                f"{self.folder} had {count} files when it was listed, and has others now ({self._count}): it has changed while "
                "it was read; remove what is half made and start again"
            )

    def _list(self) -> None:
        import pyarrow as pa

        schema = pa.schema([("name", pa.binary())])
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        handle, file = tempfile.mkstemp(".arrow", "omni-listing-")
        weakref.finalize(self, _remove, file, os.getpid())
        self._count = self._sum = 0
        try:
            with os.fdopen(handle, "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
                batch: list[bytes] = []
                for name, there in sorted_walk(self.folder, self._hidden):
                    if there and self._takes(name):
                        batch.append(os.fsencode(name))
                    if len(batch) == BATCH:
                        self._write(writer, batch)
                        batch = []
                self._write(writer, batch)
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}), the list of files: set TMPDIR") from error
        self._file, self._reader, self._last = file, None, (-1, [])

    def _write(self, writer: Any, batch: list[bytes]) -> None:
        import pyarrow as pa

        self._count += len(batch)
        self._sum = zlib.crc32(b"\0".join((*batch, b"")), self._sum)
        writer.write_batch(pa.record_batch([pa.array(batch, pa.binary())], names=["name"]))

    def __getstate__(self) -> dict[str, Any]:
        len(self)
        return {**self.__dict__, "_reader": None, "_last": (-1, [])}


def _remove(file: str, process: int) -> None:
    """Remove a temporary file, in the process that made it."""
    if os.getpid() == process:
        with suppress(OSError):
            os.unlink(file)
