"""An index beside the Parquet files of a folder, so that neither opening them nor reading a row reads a whole footer.

The file `rows.index`, little-endian, its sections aligned to 8 bytes:

    header           magic, versions, counts, CRC-32 of these and of all sections but the last
    files            size, time of the last change in ns, ends of rows and groups among those of all files, number of the shared
                     footer; in the order of the names
    names            of the files, and where each ends
    shared footers   what files of one writer have in common, see `footer`, and where each part ends
    groups           place of a group's bytes in its file, its first row in the file, and the length: 16 bytes a group

It is mapped into memory. Opening it compares names, sizes and times with those of the files, and opens none of them. A row is
found by two searches among sorted numbers, and read by a footer of its group alone. The index of a store's folder is brought
here; there, times are not compared.
"""

from __future__ import annotations

import bisect
import logging
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni.errors import UserError
from omni.stores.cache import CacheError
from omni.stores.drivers import StoredObject, read_range
from omni.stores.reading import local_file
from train.data.rows.footer import SharedFooter
from train.data.rows.open_file import ColumnPaths, GroupSpan, OpenFile, OpenGroup
from train.data.rows.parquet_files import one_line
from train.data.rows.places import INDEX, SUFFIX, DataFile, DataFiles, opened
from train.data.rows.row import ROW_VERSION

if TYPE_CHECKING:
    import numpy as np

LOG = logging.getLogger(__name__)

VERSION = 1

MAGIC = b"omnirows"
HEADER, CHECKSUM = struct.Struct("<8s2I6Q"), struct.Struct("<I")
START = HEADER.size + CHECKSUM.size


class IndexHeader(NamedTuple):
    """The header: versions, counts of files, groups, rows and shared footers, and of the bytes of names and shared footers."""

    magic: bytes
    version: int
    row_version: int
    files: int
    groups: int
    rows: int
    shared: int
    name_bytes: int
    shared_bytes: int

    def sections(self) -> dict[str, tuple[int, int, str]]:
        """Start, end and type of each section; the last is empty and at the end of the file."""
        sizes = {
            "sizes": ("<i8", self.files), "times": ("<i8", self.files), "row_ends": ("<i8", self.files),
            "group_ends": ("<i8", self.files), "shared_of": ("<u4", self.files), "name_ends": ("<i8", self.files),
            "shared_ends": ("<i8", 3 * self.shared), "names": ("u1", self.name_bytes), "shared": ("u1", self.shared_bytes),
            "places": ("<i8", self.groups), "firsts": ("<u4", self.groups), "lengths": ("<u4", self.groups), "end": ("u1", 0),
        }  # fmt: skip
        out, end = {}, START
        for name, (kind, count) in sizes.items():
            start = -(-end // 8) * 8
            end = start + int(kind[-1]) * count
            out[name] = start, end, kind
        return out


class RowIndex:
    """The rows of a folder's Parquet files, by its index. Opened in another process it is mapped again, not copied.

    Args:
        folder: of the files and the index, here or in a store.
        header: of the index as another process has opened it, which has compared the files; None to compare them.

    Raises:
        UserError: the index cannot be read, is damaged, of another version or of other files.
    """

    def __init__(self, folder: Path | DataFiles, header: bytes | None = None) -> None:
        import numpy as np

        self.folder = folder
        self.path: DataFile
        here: Path | bytes
        self._header: bytes
        self._stored: dict[str, StoredObject] = {}
        if isinstance(folder, Path):
            self.path, here = folder / INDEX, folder / INDEX
            self._again = f"run `omni-train data index {folder}`"
        else:
            assert folder.index is not None
            self.path, here = folder.index, _brought(folder.index)
            self._stored = {file.name: file for file in folder.files if isinstance(file, StoredObject)}
            self._again = "copy the folder there again with its index, or delete the index there"
        try:
            if isinstance(here, bytes):
                self._header = here[:START]
                self._read(np.frombuffer(here, np.uint8))
            else:
                with open(here, "rb") as file:
                    self._header, size = file.read(START), os.fstat(file.fileno()).st_size
                    self._read(np.asarray(np.memmap(file, np.uint8, "r")) if size else np.zeros(0, np.uint8))
            if header is None:
                self._compare()
        except OSError as error:
            raise UserError(f"index {self.path} cannot be read ({error.strerror or error}): {self._again}") from error
        if header not in (None, self._header):
            raise UserError(f"index {self.path} has changed since it was opened: start again")

    def _read(self, data: np.ndarray) -> None:
        """Check the header, and find the sections."""
        if self._header[: len(MAGIC)] != MAGIC:
            raise UserError(f"index {self.path} is no index of rows: {self._again}")
        if len(self._header) < START:
            raise UserError(f"index {self.path} is not whole: {self._again}")
        header = IndexHeader(*HEADER.unpack_from(self._header))
        if (header.version, header.row_version) != (VERSION, ROW_VERSION):
            found, this = f"{header.version}.{header.row_version}", f"{VERSION}.{ROW_VERSION}"
            raise UserError(f"index {self.path} is of version {found}, this is {this}: {self._again}")
        sections = header.sections()
        if sections["end"][0] != len(data):
            raise UserError(f"index {self.path} is not whole: {self._again}")
        if CHECKSUM.unpack_from(self._header, HEADER.size)[0] != checksum(self._header, data, sections):
            raise UserError(f"index {self.path} is damaged: {self._again}")
        if not header.rows:
            raise UserError(f"data {_shown(self.folder)} has no rows: prepare the data again")
        self._rows = header.rows
        self._table = {name: data[start:end].view(kind) for name, (start, end, kind) in sections.items()}
        self._shared: dict[int, tuple[SharedFooter, ColumnPaths]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return RowIndex, (self.folder, self._header)

    def __len__(self) -> int:
        return self._rows

    def _compare(self) -> None:
        """Compare the files' names, sizes and times with the index."""
        ends = self._table["name_ends"].tolist()
        text = self._table["names"].tobytes()
        known = [os.fsdecode(text[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        found: dict[str, StoredObject | os.DirEntry[str]]
        if isinstance(self.folder, Path):
            with os.scandir(self.folder) as entries:
                found = {entry.name: entry for entry in entries if entry.name.endswith(SUFFIX)}
        else:
            found = {**self._stored}
        for name in known:
            if name not in found:
                raise self._other(self._inside(name), "is not there any more")
        for name in sorted(found.keys() - set(known)):
            raise self._other(self._inside(name), "is not among them")
        for number, name in enumerate(known):
            self._check(number, found[name])

    def _inside(self, name: str) -> str:
        return f"{_shown(self.folder).rstrip('/')}/{name}"

    def _check(self, number: int, file: DataFile | os.DirEntry[str]) -> None:
        """UserError where a file is another than when it was indexed."""
        size, time = int(self._table["sizes"][number]), int(self._table["times"][number])
        if isinstance(file, StoredObject):
            now, when = file.size, time
        else:
            try:
                status = file.stat()
            except OSError as error:
                raise self._other(_name(file), f"cannot be found ({error.strerror})") from error
            now, when = status.st_size, status.st_mtime_ns
        if now != size:
            raise self._other(_name(file), f"has {now:,} bytes now, not {size:,}")
        if when != time:
            raise self._other(_name(file), "has been written or copied since")

    def _other(self, file: str, what: str) -> UserError:
        return UserError(f"index {self.path} is of other files: {file} {what}: {self._again}")

    def counts(self) -> list[int]:
        """Number of rows of each file."""
        import numpy as np

        return [int(count) for count in np.diff(self._table["row_ends"], prepend=0)]

    def group_sizes(self) -> np.ndarray:
        """Number of rows of each group, uint32 [G]."""
        import numpy as np

        firsts, ends = self._table["firsts"], self._table["group_ends"]
        sizes = np.empty(len(firsts), np.uint32)
        np.subtract(firsts[1:], firsts[:-1], out=sizes[:-1])
        some = np.diff(ends, prepend=0) > 0
        last = ends[some] - 1
        sizes[last] = np.diff(self._table["row_ends"], prepend=0)[some] - firsts[last]
        return sizes

    def place(self, row: int) -> tuple[int, int]:
        """Number of a row's file, and of the row in it."""
        ends = self._table["row_ends"]
        number = bisect.bisect_right(ends, row)
        return number, row - (int(ends[number - 1]) if number else 0)

    def file(self, number: int) -> DataFile:
        """A file."""
        start, end = _span(self._table["name_ends"], number)
        name = os.fsdecode(self._table["names"][start:end].tobytes())
        return self.folder / name if isinstance(self.folder, Path) else self._stored[name]

    def open(self, number: int) -> OpenFile:
        """Open a file; UserError where it has changed since it was indexed."""
        file, shared = self.file(number), int(self._table["shared_of"][number])
        self._check(number, file)
        if shared not in self._shared:
            spans = (_span(self._table["shared_ends"], 3 * shared + part) for part in range(3))
            footer = SharedFooter(*(self._table["shared"][start:end].tobytes() for start, end in spans))
            self._shared[shared] = footer, ColumnPaths()
        first, end = _span(self._table["group_ends"], number)
        start, stop = _span(self._table["row_ends"], number)
        groups = IndexedGroups(*(self._table[name][first:end] for name in ("places", "firsts", "lengths")))
        return IndexedFile(self, file, *self._shared[shared], groups, stop - start)

    def wrong(self, file: DataFile, error: BaseException) -> UserError:
        """The error of a file that has no row group where the index says."""
        return UserError(f"data file {file} has no row group where {self.path} says ({one_line(error)}): {self._again}")


class IndexedGroups(NamedTuple):
    """Places of the row groups' bytes in their file, numbers of their first rows, and lengths of the bytes, [G]."""

    places: np.ndarray
    firsts: np.ndarray
    lengths: np.ndarray


class IndexedFile(OpenFile):
    """A file of `rows` rows, whose groups are read each by a footer of its own."""

    def __init__(
        self, index: RowIndex, file: DataFile, shared: SharedFooter, columns: ColumnPaths, groups: IndexedGroups, rows: int
    ) -> None:
        import pyarrow as pa

        super().__init__(file)
        self._index, self._shared, self._columns, self._indexed, self._rows = index, shared, columns, groups, rows
        self._far = isinstance(file, StoredObject)
        try:
            self._source = pa.PythonFile(opened(file), "r") if self._far else opened(file)
        except OSError as error:
            raise UserError(f"data file {file} cannot be read ({one_line(error)})") from error

    def find(self, row: int) -> GroupSpan:
        firsts = self._indexed.firsts
        group = bisect.bisect_right(firsts, row) - 1  # the last that begins here: those before it are empty
        end = int(firsts[group + 1]) if group + 1 < len(firsts) else self._rows
        return GroupSpan(group, int(firsts[group]), end)

    def open_group(self, place: GroupSpan) -> OpenGroup:
        import pyarrow as pa

        from train.data.rows.group_file import GroupFile

        rows = place.end - place.first
        try:
            start, length = int(self._indexed.places[place.group]), int(self._indexed.lengths[place.group])
            group = self._source.read_at(length, start) if start + length <= self._source.size() else b""
            if len(group) != length:
                raise OSError("the file ends before it")
            metadata = GroupFile(self._shared.file(group, rows), self._columns).metadata
            if metadata.row_group(0).num_rows != rows:
                raise OSError(f"it has {metadata.row_group(0).num_rows} rows, not {rows}")
        except (pa.ArrowException, OSError) as error:
            raise self._index.wrong(self.file, error) from error
        return OpenGroup(GroupFile(self._source, self._columns, metadata, self._far), 0, self._columns, {})


def _brought(index: StoredObject) -> Path | bytes:
    """The index of a store's folder, in the cache; its bytes where that takes nothing."""
    try:
        return local_file(index)
    except CacheError as error:
        LOG.warning("%s; until then every process holds it in memory", error)
        return read_range(index, 0, index.size)


def has_index(folder: Path) -> bool:
    """True where a folder has an index, of whatever kind."""
    return os.path.lexists(folder / INDEX)


def checksum(header: bytes, data: np.ndarray, sections: dict[str, tuple[int, int, str]]) -> int:
    """CRC-32 of the header and of all sections before those of the groups."""
    return zlib.crc32(data[sections["sizes"][0] : sections["places"][0]].data, zlib.crc32(header[: HEADER.size]))


def _shown(folder: Path | DataFiles) -> str:
    return str(folder) if isinstance(folder, Path) else folder.path


def _name(file: DataFile | os.DirEntry[str]) -> str:
    return str(file) if isinstance(file, StoredObject) else os.fspath(file)


def _span(ends: np.ndarray, number: int) -> tuple[int, int]:
    """Start and end of element `number`, where each starts at the end of the one before."""
    return int(ends[number - 1]) if number else 0, int(ends[number])
