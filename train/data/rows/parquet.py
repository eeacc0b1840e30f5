"""Rows in Parquet files: written under another name and renamed, read by index.

A file is read in place, a row group at a time, so that the first row of any data is available at once; this requires small
groups, which `write_rows` and `data prepare` make. A file of large groups is read through Hugging Face `datasets`, which keeps
an Arrow copy of it in its cache folder (`HF_HOME`) and maps that into memory.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import replacing, writing
from train.data.rows.places import DataFile, brought, find_files, how, looked_at, opened
from train.data.rows.row import OPTIONAL, Row, features, from_plain, to_plain

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq


ROW_GROUP = 16
"""Rows of a row group: to read one row, its group is decoded."""

LARGE_ROWS, LARGE_BYTES = 64, 32 << 20
"""A group beyond these is too large to be decoded for one row: the file is copied to Arrow."""

KEPT_FILES, KEPT_GROUPS = 16, 4
"""Numbers of open files, and of the groups read last in each, that a process keeps of a stored source."""

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
                            if sound and not sound["bytes"]:
                                inside(target.parent, sound["path"] or "")
                except UserError as error:
                    raise UserError(f"{target} row {count}: {error}") from error
                count += 1
            writer.write_table(pa.Table.from_pylist(plain, schema=schema))
    return count


def files_of(path: str | os.PathLike[str]) -> list[DataFile]:
    """List the Parquet file at `path`, or those of the folder there, sorted by name, without opening any.

    UserError where there is none.
    """
    return find_files(path).files


class StoredRows:
    """The rows of a Parquet file, or of all `*.parquet` files of a folder in the order of their names.

    Files of a store are read by ranges, and opened when their first row is read, where a report of `data prepare` beside them
    says how many rows each has.

    Args:
        path: the file or folder, or its address.
        cache: folder for Arrow copies, where one is needed; None for that of `datasets`.

    Raises:
        UserError: nothing there, a file that is no Parquet or of another format, or no rows.
    """

    def __init__(self, path: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None) -> None:
        found = find_files(path)
        self.files, self.folder, known = found.files, found.folder, found.counts()
        self._metadata: dict[int, pq.FileMetaData] = {}
        self._chunks = 0
        counts, absent, large = [], [], False
        for number, (metadata, schema) in enumerate(looked_at(look, self.files if known is None else self.files[:1])):
            counts.append(metadata.num_rows)
            absent.append({name for name in OPTIONAL if name not in schema.names})
            large = large or _large(metadata)
            self._keep(number, metadata)
        self._ends = list(itertools.accumulate(counts if known is None else known))
        if not self._ends[-1]:
            raise UserError(f"data {path} has no rows: prepare the data again")
        self._copied = _open(self.files, absent, cache) if large else None
        if large:
            self._metadata = {}
        self._begin()

    def _keep(self, number: int, metadata: pq.FileMetaData) -> None:
        """Keep a file's metadata, up to `KEPT_CHUNKS` in all."""
        chunks = metadata.num_row_groups * metadata.num_columns
        if number not in self._metadata and self._chunks + chunks <= KEPT_CHUNKS:
            self._metadata[number] = metadata
            self._chunks += chunks

    def _begin(self) -> None:
        self._process = os.getpid()
        self._open_files: OrderedDict[int, _GroupedFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": OrderedDict(), "_metadata": {}, "_chunks": 0}

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, index: int) -> tuple[int, int]:
        """Number of the file, and of the row in it."""
        file = bisect.bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)

    def where(self, index: int) -> str:
        """File and row number within it, for errors."""
        file, row = self._place(index)
        return f"{self.files[file]} row {row}"

    def __getitem__(self, index: int) -> Row:
        """Row `index`; UserError where it breaks the format, or cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return from_plain(self._plain(index), self.folder, self.where(index))

    def _plain(self, index: int) -> dict[str, Any]:
        if self._copied is not None:
            return self._copied[index]
        if self._process != os.getpid():  # after a fork: open files are not shared
            self._begin()
        number, row = self._place(index)
        if number not in self._open_files:
            self._open_files[number] = self._open_file(number)
            self._keep(number, self._open_files[number].metadata)
            if len(self._open_files) > KEPT_FILES:
                self._open_files.popitem(last=False)
        self._open_files.move_to_end(number)
        return self._open_files[number].row(row)

    def _open_file(self, number: int) -> _GroupedFile:
        file = _GroupedFile(self.files[number], self._metadata.get(number))
        count = self._ends[number] - (self._ends[number - 1] if number else 0)
        if file.metadata.num_rows != count:
            raise UserError(
                f"data file {self.files[number]} has {file.metadata.num_rows} rows, and {count} when the run started, or by "
                "its report: copy it there again, with the report.json that was made with it"
            )
        return file

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


class _GroupedFile:
    """An open Parquet file; `row` decodes the row's group. `metadata` is the file's, where it has been read already."""

    def __init__(self, file: DataFile, metadata: pq.FileMetaData | None = None) -> None:
        import pyarrow.parquet as pq

        self.file = file
        with _readable(file):
            self.parquet = pq.ParquetFile(opened(file), **how(file), metadata=metadata, page_checksum_verification=True)
            self.metadata = self.parquet.metadata
        check_columns(self.parquet.schema_arrow, file)
        present = self.parquet.schema_arrow.names
        self.names = [name for name in features() if name in present]
        counts = (self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups))
        self.ends = list(itertools.accumulate(counts))
        self.groups: OrderedDict[int, Any] = OrderedDict()

    def row(self, row: int) -> dict[str, Any]:
        group = bisect.bisect_right(self.ends, row)
        if group not in self.groups:
            with _readable(self.file, f" (rows {self.ends[group - 1] if group else 0} to {self.ends[group] - 1})"):
                self.groups[group] = self.parquet.read_row_group(group, columns=self.names, use_threads=False)
            if len(self.groups) > KEPT_GROUPS:
                self.groups.popitem(last=False)
        return self.groups[group].slice(row - (self.ends[group - 1] if group else 0), 1).to_pylist()[0]


@contextmanager
def _readable(file: DataFile, part: str = "") -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data file {file}{part} cannot be read ({_one_line(error)}): prepare it again") from error


def look(file: DataFile) -> tuple[pq.FileMetaData, pa.Schema]:
    """Read the metadata and the schema of a file, and check its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(opened(file))
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data file {file} is not a whole Parquet file ({_one_line(error)}): prepare it again") from error
    check_columns(schema, file)
    return metadata, schema


def check_columns(schema: pa.Schema, file: DataFile) -> None:
    """Refuse (UserError) a file without a column of the format, or with one of another type."""
    wanted = features().arrow_schema
    for field in wanted:
        if field.name not in schema.names and field.name in OPTIONAL:
            continue
        if field.name not in schema.names:
            raise UserError(
                f"data file {file} has no column {field.name!r}: its rows are of another format, convert them first"
            )
        found = schema.field(field.name).type
        if found != field.type:
            raise UserError(
                f"data file {file}: column {field.name!r} is {found}, not {field.type}: its rows are of another format, "
                "convert them first"
            )


def first_rows(file: DataFile, group: int, count: int) -> list[dict[str, Any]]:
    """Read the first rows of a group as plain data, without reading all of it; UserError where they cannot be read."""
    import pyarrow.parquet as pq

    with _readable(file):
        batches = pq.ParquetFile(opened(file), **how(file)).iter_batches(count, row_groups=[group])
        batch = next(batches, None)  # None for a group without rows
        return [] if batch is None else batch.to_pylist()


def _large(metadata: pq.FileMetaData) -> bool:
    """True where a file's row groups are too large to decode one for a single row."""
    groups = (metadata.row_group(i) for i in range(min(metadata.num_row_groups, 4)))
    return any(group.num_rows > LARGE_ROWS or group.total_byte_size > LARGE_BYTES for group in groups)


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
            f"the Arrow copy of {files[0]} cannot be made ({_one_line(error.__cause__ or error)}): free some space or name "
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


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
