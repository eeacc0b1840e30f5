"""Rows of Parquet files in their order, a few at a time, going on behind what is damaged.

`train.data.rows.parquet.StoredRows` refuses files that are not whole, as training must; here they are what is looked for.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.remote import check_there
from train.data.readers.records import plain_rows
from train.data.rows.row import OPTIONAL, ROW_VERSION, Row, features, from_plain

BATCH = 16
"""Rows in memory at once, besides the pages they are read from."""


@dataclass(frozen=True)
class FoundRow:
    """A row that could be read from its file.

    Attributes:
        index: its number in the whole data.
        where: its file, and its number there.
        plain: what is stored.
        row: the same, None where it breaks the format.
        why: in which way.
    """

    index: int
    where: str
    plain: dict[str, Any]
    row: Row | None
    why: str = ""


@dataclass(frozen=True)
class Lost:
    """Rows that could not be read.

    Attributes:
        index: number of the first.
        where: the file, with the row group and rows where it is not all of it.
        count: how many; 0 where a file does not say.
        why: in which way.
    """

    index: int
    where: str
    count: int
    why: str


class Scan:
    """The rows of a Parquet file, or of all `*.parquet` files of a folder in the order of their names.

    Attributes:
        files: the files.
        folder: where references in rows start.

    Raises:
        UserError: there is nothing at `path`, or no Parquet file in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        check_there(path, "data", f"data {path} does not exist: name a Parquet file of rows, or a folder of them")
        self.files = sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]
        if not self.files:
            raise UserError(f"data folder {path} holds no .parquet file: prepare the data first")
        self._schema = features().arrow_schema
        heads = [self._head(file) for file in self.files]
        self._whys = [why for _, why in heads]
        self._ends = list(itertools.accumulate(rows for rows, _ in heads))

    def __len__(self) -> int:
        """Rows in all, as the files say."""
        return self._ends[-1]

    def where(self, index: int) -> str:
        """File of a row, and its number there."""
        file, row = self.place(index)
        return f"{file} row {row}"

    def place(self, index: int) -> tuple[Path, int]:
        """File of a row, and its number there."""
        number = bisect.bisect_right(self._ends, index)
        return self.files[number], index - self._first(number)

    def index(self, name: str, row: int) -> int:
        """Number in the whole data of a row of the file of that name; UserError where it has no such row."""
        number = [file.name for file in self.files].index(name)
        count = self._ends[number] - self._first(number)
        if row >= count:
            raise UserError(f"{self.files[number]} has no row {row}: it has {count}, counted from 0")
        return self._first(number) + row

    def __iter__(self) -> Iterator[FoundRow | Lost]:
        return (item for number in range(len(self.files)) for item in self._file(number))

    def at(self, index: int) -> FoundRow:
        """Row `index` alone; UserError where there is none, or it cannot be read."""
        if not 0 <= index < len(self):
            raise UserError(f"data {self.path} has no row {index}: it has {len(self)}, counted from 0")
        number = bisect.bisect_right(self._ends, index)
        for item in self._file(number, only=index - self._first(number)):
            if item.index <= index < item.index + (item.count if isinstance(item, Lost) else 1):
                if isinstance(item, Lost):
                    raise UserError(f"{item.where}: {item.why}")
                return item
        raise UserError(f"{self.where(index)} is not there: the file has changed while it was read")

    def _first(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _head(self, file: Path) -> tuple[int, str]:
        """How many rows a file has, and what is wrong with it as a whole."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            metadata = pq.read_metadata(file)
            schema = metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            return 0, f"is not a whole Parquet file ({one_line(error)}): prepare it again"
        for field in self._schema:
            if field.name not in schema.names and field.name in OPTIONAL:
                continue
            if field.name not in schema.names:
                return metadata.num_rows, f"has no column {field.name!r}: its rows are of another format, convert them first"
            if schema.field(field.name).type != field.type:
                return metadata.num_rows, (
                    f"has a column {field.name!r} of another type than rows of version {ROW_VERSION}: "
                    "prepare the data again, or convert its rows"
                )
        return metadata.num_rows, ""

    def _file(self, number: int, only: int | None = None) -> Iterator[FoundRow | Lost]:
        """The rows of a file; with `only`, of the row group that this row of it stands in."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file, first = self.files[number], self._first(number)
        if self._whys[number]:
            yield Lost(first, str(file), self._ends[number] - first, self._whys[number])
            return
        # Page checksums are compared where the file has any; pages are read as they are needed, not a row group at once.
        with pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 18) as opened:
            start = 0
            for group in range(opened.num_row_groups):
                end = start + opened.metadata.row_group(group).num_rows
                if only is not None and not start <= only < end:
                    start = end
                    continue
                done = start
                try:
                    columns = [name for name in self._schema.names if name in opened.schema_arrow.names]
                    for batch in opened.iter_batches(BATCH, row_groups=[group], columns=columns, use_threads=False):
                        for plain, why in plain_rows(batch):
                            yield self._found(first + done, f"{file} row {done}", None if why else plain, why)
                            done += 1
                except (pa.ArrowException, OSError) as error:
                    lost = f"{file} row group {group}, rows {done} to {end - 1}"
                    yield Lost(first + done, lost, end - done, f"has damaged pages ({one_line(error)}): prepare it again")
                start = end

    def _found(self, index: int, where: str, plain: dict[str, Any] | None, why: str) -> FoundRow:
        if plain is None:
            return FoundRow(index, where, {}, None, why)
        try:
            return FoundRow(index, where, plain, from_plain(plain, self.folder, where))
        except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:  # the last is torch's
            return FoundRow(index, where, plain, None, one_line(error).removeprefix(where).lstrip(": "))


def one_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
