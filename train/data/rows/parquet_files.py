"""Parquet files of rows: whether they are whole, their columns those of rows, their groups small; and samples of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from omni.errors import UserError
from omni.files import refuse_pointer
from omni.tasks import find_task
from train.data.rows.places import DataFile, find_files, open_parquet, opened
from train.data.rows.row import OPTIONAL, Row, features, from_plain

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


LARGE_ROWS, LARGE_BYTES = 64, 32 << 20
"""A group beyond these is too large to be decoded for one row: the file is copied to Arrow."""

JUDGED_GROUPS = 4
"""Number of groups, the first of a file, by which it is judged whether its groups are large."""


def footer(file: DataFile) -> tuple[pq.FileMetaData, pa.Schema]:
    """Read the metadata and the schema of a file."""
    import pyarrow.parquet as pq

    with whole(file):
        metadata = pq.read_metadata(opened(file))
        return metadata, metadata.schema.to_arrow_schema()


def look(file: DataFile) -> tuple[pq.FileMetaData, pa.Schema]:
    """Read the metadata and the schema of a file, and check its columns."""
    metadata, schema = footer(file)
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
        actual = schema.field(field.name).type
        if actual != field.type:
            raise UserError(
                f"data file {file}: column {field.name!r} is {actual}, not {field.type}: its rows are of another format, "
                "convert them first"
            )


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
        if isinstance(file, Path):
            refuse_pointer(file)
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


FILES, GROUPS, ROWS = 5, 5, 20
"""Numbers of files in the sample, of row groups of each, and about the number of rows of each file."""


def sample_rows(path: str) -> list[Row]:
    """Read the first rows of evenly spaced row groups of evenly spaced files, without those that cannot be read. UserError:
    there is no such file, or one of another format."""
    rows: list[Row] = []
    data_files = find_files(path)
    files = data_files.files
    for file in (files[i] for i in evenly(len(files), FILES)):
        groups = evenly(look(file)[0].num_row_groups, GROUPS)
        for group in groups:
            with suppress(UserError), readable(file):
                batches = open_parquet(file).iter_batches(-(-ROWS // len(groups)), row_groups=[group])
                for batch in itertools.islice(batches, 1):
                    for plain in batch.to_pylist():
                        with suppress(UserError):
                            rows.append(from_plain(plain, data_files.folder, str(file)))
    return rows


def evenly(size: int, count: int) -> list[int]:
    """Indices of `count` of `size` things, evenly spaced and ascending; of all where there are fewer."""
    count = min(count, size)
    return [i * size // count for i in range(count)]


def missing_parts(
    rows: Sequence[Row], mixtures: Iterable[Mapping[str, float]], heard_only: bool = False
) -> dict[str, dict[str, int]]:
    """Count, for each task with a weight in the mixtures, the rows with a turn that lacks a part which the task needs. A row
    that names its own task counts for that one only. For `heard_only` see `RowTurn.lacks`."""
    tasks = {find_task(name).name for mixture in mixtures for name, weight in mixture.items() if weight > 0}
    out: dict[str, dict[str, int]] = {}
    for row in rows:
        for name in [row.task] if row.task else sorted(tasks):
            missing = {turn.lacks(find_task(name), heard_only) for turn in row.turns} - {None}
            for part in missing:
                of = out.setdefault(find_task(name).name, {})
                of[str(part)] = of.get(str(part), 0) + 1
    return out
