"""A Parquet file of which one row group is read: opened for each, without what `pyarrow` works out of its columns each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from train.data.rows.open_file import ColumnPaths


class GroupFile(pq.ParquetFile):
    """A file of one row group.

    Args:
        columns: of all files of the same columns; filled by the first of them.
        metadata: of the one group; None to read the file's own.
        far: the columns that are read are fetched together.
    """

    def __init__(
        self, source: pa.NativeFile, columns: ColumnPaths, metadata: pq.FileMetaData | None = None, far: bool = False
    ) -> None:
        self._columns = columns
        super().__init__(source, metadata=metadata, page_checksum_verification=True, pre_buffer=far)

    def _build_nested_paths(self) -> dict[str, list[int]]:
        """Overrides an inner method of `pyarrow`, which takes as long as the rest of opening the file; without it nothing is
        wrong, but slower."""
        if self._columns.nested is None:
            self._columns.nested = super()._build_nested_paths()
        return self._columns.nested
