"""Parquet files of rows: whether they are whole, their columns those of rows, and their groups small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from train.data.rows.places import DataFile, opened, parquet_open_kwargs
from train.data.rows.row import OPTIONAL, features

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

LARGE_ROWS, LARGE_BYTES = 64, 32 << 20
"""A group beyond these is too large to be decoded for one row: the file is copied to Arrow."""

JUDGED_GROUPS = 4
"""Number of groups, the first of a file, by which it is judged whether its groups are large."""


def look(file: DataFile) -> tuple[pq.FileMetaData, pa.Schema]:
    """Read the metadata and the schema of a file, and check its columns."""
    import pyarrow.parquet as pq

    with whole(file):
        metadata = pq.read_metadata(opened(file))
        schema = metadata.schema.to_arrow_schema()
    check_columns(file, schema)
    return metadata, schema


@cache
def _row_schema() -> pa.Schema:
    return features().arrow_schema


def check_columns(file: DataFile, schema: pa.Schema) -> None:
    """UserError where a file lacks a column of rows, or has one of another type."""
    for field in _row_schema():
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

    with readable(file):
        batches = pq.ParquetFile(opened(file), **parquet_open_kwargs(file)).iter_batches(count, row_groups=[group])
        batch = next(batches, None)  # None for a group without rows
        return [] if batch is None else batch.to_pylist()


def has_large_groups(metadata: pq.FileMetaData) -> bool:
    """True where the first groups of a file are too large to decode one for a single row."""
    groups = (metadata.row_group(i) for i in range(min(metadata.num_row_groups, JUDGED_GROUPS)))
    return any(group.num_rows > LARGE_ROWS or group.total_byte_size > LARGE_BYTES for group in groups)


@contextmanager
def whole(file: DataFile) -> Iterator[None]:
    """Context in which a file's footer is read; errors of that are UserErrors."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data file {file} is not a whole Parquet file ({one_line(error)}): prepare it again") from error


@contextmanager
def readable(file: DataFile, part: str = "") -> Iterator[None]:
    """Context in which rows of a file are read; errors of that are UserErrors."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data file {file}{part} cannot be read ({one_line(error)}): prepare it again") from error


def one_line(error: BaseException) -> str:
    """First line of an error's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
