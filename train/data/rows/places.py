"""Finds the Parquet files of rows in a folder here or in a store, and opens them; of a store's, none before it is needed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from omni.errors import UserError
from omni.stores.drivers import StoredObject, bare, read_range
from omni.stores.reading import PIECE, ObjectReader, listed, local_file, looked_up
from omni.utils.remote import check_there, find_address, shown

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SUFFIX, REPORT = ".parquet", "report.json"
AT_ONCE = 16
"""Files of a store that are looked at side by side."""

DataFile: TypeAlias = Path | StoredObject
"""A file of rows: here, or in a store. Its `name`, and its text for messages, are alike."""

Result = TypeVar("Result")


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
            alike = all(size_of(file) == size for file, (_, size) in zip(self.files, counts, strict=True))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return [rows for rows, _ in counts] if alike else None


def find_files(path: str | os.PathLike[str]) -> DataFiles:
    """Find the Parquet file at `path`, or those of the folder there, without opening any; a store's folder is listed once.
    UserError where there is none."""
    address = find_address(path)
    if address is not None:
        return _in_store(address)
    local = Path(path)
    files: list[DataFile] = [*sorted(local.glob(f"*{SUFFIX}"))] if local.is_dir() else [local]
    if not files:
        raise UserError(f"data folder {path} holds no {SUFFIX} file: prepare the data first")
    otherwise = f"data file {files[0]} does not exist: name a Parquet file of rows, or a folder of them"
    check_there(Path(str(files[0])), "data", otherwise, Path.is_file)
    return DataFiles(os.fspath(path), files, local if local.is_dir() else local.parent)


def _in_store(address: str) -> DataFiles:
    if bare(address).endswith(SUFFIX):
        return DataFiles(shown(address), [looked_up(address)], None)
    objects = listed(address)
    files: list[DataFile] = [entry for entry in objects if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")]
    if not files:
        raise UserError(f"data folder {shown(address)} holds no {SUFFIX} file: prepare the data first")
    beside = {entry.name: entry for entry in objects}
    return DataFiles(shown(address), files, None, beside.get(REPORT))


def opened(file: DataFile) -> Any:
    """Open a file for pyarrow: a local one by positions, one of a store by ranges; OSError where it cannot be opened."""
    import pyarrow as pa

    return pa.OSFile(os.fsencode(file)) if isinstance(file, Path) else ObjectReader(file)


def open_parquet(file: DataFile, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file: of a store, columns side by side are one request. No file is mapped (`memory_map`): one that gets
    shorter while it is read would end the process."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(opened(file), pre_buffer=not isinstance(file, Path), **options)


def size_of(file: DataFile) -> int:
    """Bytes of a file; OSError where it is not there."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def reading(file: DataFile) -> BinaryIO:
    """A file, open for reading from its start to its end: one of a store by large ranges."""
    return open(file, "rb") if isinstance(file, Path) else io.BufferedReader(ObjectReader(file), PIECE)


def brought(file: DataFile) -> str:
    """The path of a file here; one of a store is brought into the cache as a whole."""
    return str(file if isinstance(file, Path) else local_file(file))


def parallel_map(look: Callable[[DataFile], Result], files: Iterable[DataFile]) -> Iterator[Result]:
    """Yield the results of `look` for each file, in order; a store's files are looked at in threads."""
    files = list(files)
    if not any(isinstance(file, StoredObject) for file in files):
        yield from map(look, files)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(look, files)
