"""An open Parquet file, of which single rows are read: the row's group is decoded, only the columns that are asked for."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from train.data.rows.parquet_files import check_columns, readable
from train.data.rows.parts import LeafColumns
from train.data.rows.places import DataFile, how, opened

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

KEPT_GROUPS = 4
"""Number of decoded groups that are kept, those read last."""


class GroupSpan(NamedTuple):
    """A row group: its number in the file, its first row, and the row after its last."""

    group: int
    first: int
    end: int


@dataclass
class ColumnPaths:
    """What is worked out once of the paths of columns, for all files of the same columns.

    Attributes:
        nested: numbers of the columns below each path, as `pyarrow` lists them.
        selected: paths of the leaf columns, by what has been asked for.
    """

    nested: dict[str, list[int]] | None = None
    selected: dict[LeafColumns, list[str]] = field(default_factory=dict)

    def select(self, leaves: LeafColumns, file: pq.ParquetFile) -> list[str]:
        """Paths of the leaf columns in `file`."""
        if leaves not in self.selected:
            self.selected[leaves] = leaves.paths(file.metadata)
        return self.selected[leaves]


class OpenGroup(NamedTuple):
    """A row group that is being read: the group number `number` of `parquet`, with its columns, and its tables so far."""

    parquet: pq.ParquetFile
    number: int
    columns: ColumnPaths
    tables: dict[LeafColumns, pa.Table]


class OpenFile:
    """Decodes groups and keeps some; how a group is found and opened is the subclass's."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self._groups: OrderedDict[int, OpenGroup] = OrderedDict()

    def find(self, row: int) -> GroupSpan:
        """The group of a row."""
        raise NotImplementedError

    def open_group(self, place: GroupSpan) -> OpenGroup:
        """Open a group."""
        raise NotImplementedError

    def table(self, row: int, leaves: LeafColumns) -> tuple[int, pa.Table]:
        """Read the selected columns of a row's group, which is not kept: its first row, and the table."""
        place = self.find(row)
        with readable(self.file, f" (rows {place.first} to {place.end - 1})"):
            return place.first, _decode(self.open_group(place), leaves)

    def row(self, row: int, leaves: LeafColumns) -> dict[str, Any]:
        """Read the selected columns of a row; UserError where they cannot be read."""
        place = self.find(row)
        with readable(self.file, f" (rows {place.first} to {place.end - 1})"):
            group = self._groups.get(place.group) or self.open_group(place)
            if leaves not in group.tables:
                group.tables[leaves] = _decode(group, leaves)
        self._groups[place.group] = group
        self._groups.move_to_end(place.group)
        if len(self._groups) > KEPT_GROUPS:
            self._groups.popitem(last=False)
        return group.tables[leaves].slice(row - place.first, 1).to_pylist()[0]


def _decode(group: OpenGroup, leaves: LeafColumns) -> pa.Table:
    paths = group.columns.select(leaves, group.parquet)
    return group.parquet.read_row_group(group.number, columns=paths, use_threads=False)


class WholeFile(OpenFile):
    """A file whose footer is read as a whole; `metadata` is the file's, where it has been read already."""

    def __init__(self, file: DataFile, metadata: pq.FileMetaData | None = None) -> None:
        import pyarrow.parquet as pq

        super().__init__(file)
        with readable(file):
            self._parquet = pq.ParquetFile(opened(file), metadata=metadata, page_checksum_verification=True, **how(file))
        check_columns(file, self._parquet.schema_arrow)
        self.metadata = self._parquet.metadata
        counts = (self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups))
        self._ends = list(itertools.accumulate(counts))
        self._columns = ColumnPaths()

    def find(self, row: int) -> GroupSpan:
        group = bisect.bisect_right(self._ends, row)
        return GroupSpan(group, self._ends[group - 1] if group else 0, self._ends[group])

    def open_group(self, place: GroupSpan) -> OpenGroup:
        return OpenGroup(self._parquet, place.group, self._columns, {})
