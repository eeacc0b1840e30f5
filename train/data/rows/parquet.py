"""Rows in Parquet files: written under another name and renamed, read by index.

A file is read in place, a row group at a time, so that the first row of any data is available at once; this requires small
groups, which `write_rows` and `data prepare` make. A file of large groups is read through Hugging Face `datasets`, which keeps
an Arrow copy of it in its cache folder (`HF_HOME`) and maps that into memory.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from omni.errors import UserError
from omni.files import replacing, writing
from omni.remote import find_address
from train.data.rows.index import RowIndex, has_index
from train.data.rows.open_file import OpenFile, WholeFile
from train.data.rows.parquet_files import LARGE_BYTES, LARGE_ROWS, are_large, groups_of, look, one_line
from train.data.rows.parts import EVERYTHING, PARTS, LeafColumns, Needed
from train.data.rows.places import DataFile, DataFiles, brought, find_files, looked_at
from train.data.rows.reference import Reference
from train.data.rows.row import OPTIONAL, Row, features, from_plain, to_plain

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq


GroupTables: TypeAlias = "dict[LeafColumns, tuple[int, pa.Table]]"
"""Decoded columns of a row group: the number of its first row in its file, and the table."""

ROW_GROUP = 16
"""Rows of a row group: to read one row, its group is decoded."""

KEPT_FILES = 16
"""Number of open files that a process keeps of a stored source, those read last."""

KEPT_CHUNKS = 600_000
"""Column chunks whose metadata is kept of a stored source, a kilobyte each: those of 450,000 rows in groups of 16.

They are read anyway when the source is opened, and rows in shuffled order come from one file after another: to read a file's
metadata again takes several times as long as to read a row. Forked workers share them."""


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row], row_group: int = ROW_GROUP) -> int:
    """Write rows to a Parquet file, in groups of `row_group`; returns their number.

    The file appears when it is whole: until then it is written under another name in the same folder, and an error removes it.

    Raises:
        UserError: a row that breaks the format or whose reference leaves the folder (with its number), or no space left.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from train.data.rows.row import inside

    target = Path(path)
    schema = features().arrow_schema
    count = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target), replacing(target) as part, pq.ParquetWriter(part, schema, write_page_checksum=True) as writer:
        iterator = iter(rows)
        while group := list(itertools.islice(iterator, row_group)):
            plain = []
            for row in group:
                try:
                    plain.append(to_plain(row))
                    for turn in plain[-1]["turns"]:
                        for sound in (turn["question_audio"], turn["answer_audio"]):
                            if sound and not sound["bytes"] and Reference.read(sound["path"]) is None:
                                inside(target.parent, sound["path"] or "")
                except UserError as error:
                    raise UserError(f"{target} row {count}: {error}") from error
                count += 1
            writer.write_table(pa.Table.from_pylist(plain, schema=schema))
    return count


class Footers:
    """Parquet files whose footers have been read: as `RowIndex`, without an index.

    Files of a store are opened when their first row is read, where a report of `data prepare` beside them says how many rows
    each has, unless the numbers of rows of their groups are asked for.

    Args:
        by_group: read the numbers of rows of all groups.
    """

    def __init__(self, found: DataFiles, by_group: bool = False) -> None:
        self.files, known = found.files, None if by_group else found.counts()
        self._sizes: list[int] = []
        self._metadata: dict[int, pq.FileMetaData] = {}
        self._chunks = 0
        self.absent: list[set[str]] = []
        self.large, counts = False, []
        for number, (metadata, schema) in enumerate(looked_at(look, self.files if known is None else self.files[:1])):
            counts.append(metadata.num_rows)
            self.absent.append({name for name in OPTIONAL if name not in schema.names})
            self.large = self.large or are_large(groups_of(metadata))
            if by_group:
                self._sizes += (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            self._keep(number, metadata)
        self._ends = list(itertools.accumulate(counts if known is None else known))
        if not self._ends[-1]:
            raise UserError(f"data {found.path} has no rows: prepare the data again")
        if self.large:
            self._metadata = {}

    def _keep(self, number: int, metadata: pq.FileMetaData) -> None:
        """Keep a file's metadata, up to `KEPT_CHUNKS` in all."""
        chunks = metadata.num_row_groups * metadata.num_columns
        if number not in self._metadata and self._chunks + chunks <= KEPT_CHUNKS:
            self._metadata[number] = metadata
            self._chunks += chunks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_metadata": {}, "_chunks": 0}

    def __len__(self) -> int:
        return self._ends[-1]

    def group_sizes(self) -> np.ndarray:
        """Number of rows of each group, int64 [G]; only once, after which they are forgotten."""
        import numpy as np

        sizes, self._sizes = np.array(self._sizes, np.int64), []
        return sizes

    def place(self, row: int) -> tuple[int, int]:
        """Number of a row's file, and of the row in it."""
        file = bisect.bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)

    def file(self, number: int) -> DataFile:
        """A file."""
        return self.files[number]

    def open(self, number: int) -> OpenFile:
        """Open a file, and keep its metadata where there is room; UserError where it has another number of rows by now."""
        file = WholeFile(self.files[number], self._metadata.get(number))
        count = self._ends[number] - (self._ends[number - 1] if number else 0)
        if file.metadata.num_rows != count:
            raise UserError(
                f"data file {self.files[number]} has {file.metadata.num_rows} rows, and {count} when the run started, or by "
                "its report: copy it there again, with the report.json that was made with it"
            )
        self._keep(number, file.metadata)
        return file


class StoredRows:
    """The rows of a Parquet file, or of all `*.parquet` files of a folder in the order of their names.

    Files of a store are read by ranges.

    Args:
        path: the file or folder, or its address. A folder's index is used where it is here, see `train.data.rows.index`.
        cache: folder for Arrow copies, where one is needed; None for that of `datasets`.
        needed: parts of rows that are read, others come as if they were not there; None for all.
        by_group: rows will be read with their groups (`read`), of which the numbers of rows are needed.

    Raises:
        UserError: nothing there, a file that is no Parquet or of another format, no rows, or an index of other files; with
            `by_group`, large groups.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache: str | os.PathLike[str] | None = None,
        needed: Needed | None = None,
        by_group: bool = False,
    ) -> None:
        self.needed = needed
        self._files: RowIndex | Footers
        self._copied: datasets.Dataset | None = None
        if find_address(path) is None and has_index(Path(path)):
            self._files = RowIndex(Path(path))
            self._folder: Path | None = Path(path)
        else:
            found = find_files(path)
            self._folder = found.folder
            if found.index is not None:
                self._files = RowIndex(found)
                self._begin()
                return
            self._files = footers = Footers(found, by_group)
            if by_group and footers.large:
                raise UserError(
                    f"data {found.path} has row groups of more than {LARGE_ROWS} rows or {LARGE_BYTES >> 20} MiB, too large to "
                    "keep several of them: prepare the data, which makes small ones, or set order to random, which copies them"
                )
            self._copied = _open(footers.files, footers.absent, cache) if footers.large else None
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._open_files: OrderedDict[int, OpenFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": OrderedDict()}

    def whole(self) -> StoredRows:
        """The same rows, with all their parts."""
        out = copy.copy(self)
        out.needed = None
        return out

    def __len__(self) -> int:
        return len(self._files)

    def where(self, index: int) -> str:
        """File and row number within it, for errors."""
        file, row = self._files.place(index)
        return f"{self._files.file(file)} row {row}"

    def __getitem__(self, index: int) -> Row:
        """Row `index`; UserError where it breaks the format, or cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return from_plain(self._plain(index), self._folder, self.where(index))

    def group_sizes(self) -> np.ndarray:
        """Number of rows of each row group, in the order of the rows, [G]."""
        return self._files.group_sizes()

    @property
    def copied(self) -> bool:
        """True where rows are read from an Arrow copy, not from row groups."""
        return self._copied is not None

    def first_of(self, index: int, kept: GroupTables) -> int:
        """Number of the first row of the group that row `index` was read with."""
        first, _ = next(iter(kept.values()))
        return index - self._files.place(index)[1] + first

    def read(self, index: int, kept: GroupTables) -> Row:
        """As `self[index]`, with the row's group, whose tables are in `kept` or are added there."""
        return from_plain(self._plain(index, kept), self._folder, self.where(index))

    def _plain(self, index: int, kept: GroupTables | None = None) -> dict[str, Any]:
        """Read the needed parts of a row as plain data; others are null. An Arrow copy gives all parts."""
        if self._copied is not None:
            return self._copied[index]
        number, row = self._files.place(index)
        read = self._open(number).row if kept is None else partial(self._row_of, kept, number)
        if self.needed is None:
            return read(row, EVERYTHING)
        plain = read(row, self.needed.first)
        turns = plain["turns"] or ()
        while leaves := self.needed.next(plain):
            for turn, more in zip(turns, read(row, leaves)["turns"], strict=True):
                turn.update(more)
        for turn in turns:
            turn.update({part: None for part in PARTS if part not in turn})
        return plain

    def _row_of(self, kept: GroupTables, number: int, row: int, leaves: LeafColumns) -> dict[str, Any]:
        """Columns of a row in file `number`, of its group's tables; a file is opened only for those that are not there."""
        if leaves not in kept:
            kept[leaves] = self._open(number).table(row, leaves)
        first, table = kept[leaves]
        return table.slice(row - first, 1).to_pylist()[0]

    def _open(self, number: int) -> OpenFile:
        if self._process != os.getpid():  # after a fork: open files are not shared
            self._begin()
        if number not in self._open_files:
            self._open_files[number] = self._files.open(number)
            if len(self._open_files) > KEPT_FILES:
                self._open_files.popitem(last=False)
        self._open_files.move_to_end(number)
        return self._open_files[number]

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def _open(files: list[DataFile], absent: list[set[str]], cache: str | os.PathLike[str] | None) -> datasets.Dataset:
    """Open the files as Arrow copies; `absent` are the columns that each of them lacks, the same ones in all."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    columns = features()
    for name in set().union(*absent):
        if any(name not in one for one in absent):
            raise UserError(f"only some files of {str(files[0]).rpartition('/')[0]} have a column {name!r}: prepare them again")
        del columns[name]
    try:
        with _quiet():
            return datasets.Dataset.from_parquet(
                [brought(file) for file in files],
                features=columns,
                columns=list(columns),
                cache_dir=None if cache is None else str(cache),
            )
    except (DatasetGenerationError, OSError) as error:
        raise UserError(
            f"the Arrow copy of {files[0]} cannot be made ({one_line(error.__cause__ or error)}): free some space or name "
            "another folder as data.cache; if the file is damaged, prepare it again"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without the progress bars of `datasets`: standard error belongs to the run."""
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()
