"""Parquet files of rows in a folder here or in a store: finds and opens them, of a store's none before it is needed; checks
their columns, and reads samples of their rows."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import refuse_pointer
from omni.stores.drivers import StoredObject, bare, read_range
from omni.stores.reading import ObjectReader, listed, looked_up
from omni.tasks import find_task
from omni.utils.remote import check_there, find_address, shown
from train.data.executor import Result, in_threads
from train.data.rows.reference import DataFile
from train.data.rows.row import OPTIONAL, Row, from_plain, row_schema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIX, REPORT = ".parquet", "report.json"
NOT_WHOLE = "is not a whole Parquet file"


@dataclass(frozen=True)
class DataFiles:
    """The Parquet files at a path, in the order of their names.

    Attributes:
        path: the file or folder, or its address, for messages.
        folder: that references in rows are relative to; None in a store.
        report: what `data prepare` says of the files of a store, where it is beside them.
    """

    path: str
    files: list[DataFile]
    folder: Path | None
    report: StoredObject | None = None

    def described(self) -> dict[str, Any]:
        """Read the report of `data prepare` beside the files; empty where there is none that can be read."""
        try:
            if self.folder is not None:
                report = json.loads((self.folder / REPORT).read_text(encoding="utf-8"))
            else:
                report = json.loads(read_range(self.report, 0, self.report.size)) if self.report is not None else {}
        except (OSError, ValueError):
            return {}
        return report if isinstance(report, dict) else {}

    def counts(self) -> list[int] | None:
        """Numbers of rows of each file by the report, so that none need be opened; None where it does not fit the files."""
        try:
            known = {shard["file"]: (int(shard["rows"]), int(shard["bytes"])) for shard in self.described()["shards"]}
            counts = [known[file.name] for file in self.files]
            sizes = [file.stat().st_size if isinstance(file, Path) else file.size for file in self.files]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return [rows for rows, _ in counts] if sizes == [size for _, size in counts] else None


def find_files(path: str | os.PathLike[str]) -> DataFiles:
    """Find the Parquet file at `path`, or those of the folder there, without opening any; a store's folder is listed once.
    UserError where there is none."""
    address, beside, folder = find_address(path), dict[str, StoredObject](), Path(path)
    files: list[DataFile]
    if address is None:
        files = [*sorted(folder.glob(f"*{SUFFIX}"))] if folder.is_dir() else [folder]
        folder = folder if folder.is_dir() else folder.parent
    elif bare(address).endswith(SUFFIX):
        files = [looked_up(address)]
    else:
        beside = {entry.name: entry for entry in listed(address)}
        files = [entry for name, entry in beside.items() if name.endswith(SUFFIX) and not name.startswith(".")]
    shown_path = os.fspath(path) if address is None else shown(address)
    if not files:
        raise UserError(f"data folder {shown_path} holds no {SUFFIX} file: prepare the data first")
    if address is None:
        otherwise = f"data file {files[0]} does not exist: name a Parquet file of rows, or a folder of them"
        check_there(Path(str(files[0])), "data", otherwise, Path.is_file)
    return DataFiles(shown_path, files, folder if address is None else None, beside.get(REPORT))


def opened(file: DataFile) -> Any:
    """Open a file for pyarrow: a local one by positions, one of a store by ranges; OSError where it cannot be opened."""
    import pyarrow as pa

    return pa.OSFile(os.fsencode(file)) if isinstance(file, Path) else ObjectReader(file)


def open_parquet(file: DataFile, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file: of a store, columns side by side are one request. No file is mapped (`memory_map`): one that gets
    shorter while it is read would end the process."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(opened(file), pre_buffer=not isinstance(file, Path), **options)


def parallel_map(look: Callable[[DataFile], Result], files: Sequence[DataFile]) -> Iterator[Result]:
    """Iterate over the results of `look` for each file, in order; a store's files are looked at in threads."""
    return (in_threads if any(isinstance(file, StoredObject) for file in files) else map)(look, files)


# --- what is in them --------------------------------------------------------------------------------------------

LARGE_ROWS, LARGE_BYTES = 64, 32 << 20
"""A group beyond these is too large to be decoded for one row: the file is copied to Arrow."""

JUDGED_GROUPS = 4
"""Number of groups, the first of a file, by which it is judged whether its groups are large."""


def footer(file: DataFile) -> tuple[pq.FileMetaData, pa.Schema]:
    """Read the metadata and the schema of a file."""
    import pyarrow.parquet as pq

    with readable(file, NOT_WHOLE):
        metadata = pq.read_metadata(opened(file))
        return metadata, metadata.schema.to_arrow_schema()


def look(file: DataFile) -> tuple[pq.FileMetaData, pa.Schema]:
    """Read the metadata and the schema of a file, and check its columns."""
    metadata, schema = footer(file)
    check_columns(file, schema)
    return metadata, schema


def check_columns(file: DataFile, schema: pa.Schema) -> None:
    """UserError where a file lacks a column of rows, or has one of another type."""
    advice = "its rows are of another format, convert them first"
    for field in row_schema():
        if field.name not in schema.names and field.name in OPTIONAL:
            continue
        if field.name not in schema.names:
            raise UserError(f"data file {file} has no column {field.name!r}: {advice}")
        actual = schema.field(field.name).type
        if actual != field.type:
            raise UserError(f"data file {file}: column {field.name!r} is {actual}, not {field.type}: {advice}")


@contextmanager
def readable(file: DataFile, trouble: str = "cannot be read") -> Iterator[None]:
    """Context in which a file is read; errors of that are UserErrors."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(file, Path):
            refuse_pointer(file)
        raise UserError(f"data file {file} {trouble} ({one_line(error)}): prepare it again") from error


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
) -> Counter[tuple[str, str]]:
    """Count, for each task with a weight in the mixtures, and each part that it needs, the rows with a turn that lacks it. A
    row that names its own task counts for that one only. For `heard_only` see `RowTurn.lacks`."""
    tasks = {find_task(name).name for mixture in mixtures for name, weight in mixture.items() if weight > 0}
    out = Counter[tuple[str, str]]()
    for row in rows:
        for task in map(find_task, [row.task] if row.task else sorted(tasks)):
            out.update((task.name, part) for part in {turn.lacks(task, heard_only) for turn in row.turns} if part)
    return out
