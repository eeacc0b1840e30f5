"""Records of Parquet files and WebDataset shards, and the records of any file by its suffix.

A Parquet file is read from the start of a row group. WebDataset shards (.tar) and streams of either kind are read through
Hugging Face `datasets`, here or in a store, without a copy, from their start on: to go on at a record, those before it are read
and dropped. A record of a WebDataset shard has a field for each of its files, by what follows the first dot of the name
(`question.wav`, `txt`), and `__key__`; those of its `json` are fields too. They are known by the first five records of a shard:
what these lack is not read.
"""

from __future__ import annotations

import bisect
import fnmatch
import itertools
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni.errors import UserError
from omni.files import refuse_pointer
from omni.stores.cache import pointed_at
from omni.stores.drivers import StoredObject, bare, list_objects, parent
from omni.stores.reading import PIECE, ObjectReader, looked_up
from omni.utils.remote import check_there, find_address, shown
from train.data.readers.files import list_files
from train.data.readers.records import (
    JsonArray,
    JsonLines,
    Record,
    Records,
    TableRecords,
    Transcript,
    finite,
    open_binary,
)
from train.data.rows.files import one_line
from train.data.rows.reference import DataFile

if TYPE_CHECKING:
    import datasets


TAR, TRANSCRIPT = ".tar", ".trans.txt"
KINDS = (TAR, ".parquet")
LISTS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", *LISTS, TAR)
"""Suffixes of files whose fields may be lists, and of all that hold records."""

_DAMAGE = (tarfile.TarError, EOFError, zlib.error, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)
"""Errors of a shard's content; so is an OSError without a number, which is pyarrow's."""

_ABSENT = (FileNotFoundError, PermissionError, ConnectionError, TimeoutError)


class ShardError(UserError):
    """A shard that cannot be read now, whatever it holds; another try may read it."""


def find_shards(path: str) -> list[DataFile]:
    """The shards at `path`: a file, all in a folder and below it, or those that a pattern in the last part fits (`a-*.tar`).
    They are sorted by name. UserError where there are none, or of both kinds."""
    address = find_address(path)
    location, shards = shown(address) if address else path, list[DataFile]()
    name = (address or path).rstrip("/").rpartition("/")[2]
    pattern = name if any(c in name for c in "*[") and not (address is None and Path(path).exists()) else ""
    if address is not None:
        if not pattern and bare(address).endswith(KINDS):
            shards = [looked_up(address)]
        else:
            objects = list_objects(parent(address) if pattern else address, deep=not pattern)
            shards += (shard for shard in objects if not pattern or fnmatch.fnmatchcase(shard.name, pattern))
    elif pattern:
        shards += sorted(Path(path).parent.glob(pattern))
    else:
        check_there(path, "data", f"data {path} does not exist: name a shard, a folder of shards, or a pattern such as a-*.tar")
        shards += map(Path, list_files(path, KINDS)) if Path(path).is_dir() else [Path(path)]
    shards = [shard for shard in shards if shard.name.endswith(KINDS) and not shard.name.startswith(".")]
    kinds = {Path(shard.name).suffix for shard in shards}
    if len(kinds) != 1:
        held = "shards of both kinds" if kinds else "no shard"
        raise UserError(f"data {location} has {held} (.tar of WebDataset, .parquet): name those to read, such as by a-*.tar")
    return shards


def read_shard(shard: DataFile, start: int = 0) -> Iterator[Record]:
    """The records of a shard from number `start` on; where it is damaged, the last one has the error. ShardError: it cannot be
    read now, or is not any more what was listed."""
    number = start
    try:
        rows = _opened(shard)
        # One by one, a data set is shared by the workers of a torch loader; in batches, each reads it all.
        for batch in (rows.skip(start) if start else rows).iter(batch_size=1):
            yield Record(f"{shard} row {number}", finite(_flat({name: values[0] for name, values in batch.items()})))
            number += 1
    except UserError as error:
        raise ShardError(str(error)) from error
    except (*_DAMAGE, OSError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, _ABSENT) or (isinstance(error, OSError) and error.errno is not None):
            said = f"{shard} cannot be read ({said}): see that it is there, and run the same command again"
            raise ShardError(said) from error
        why = f"it and what follows in its file cannot be read ({said}): make the file again"
        yield Record(f"{shard} row {number}", {}, why)


def _opened(shard: DataFile) -> datasets.IterableDataset:
    """Open a shard; sounds come as they are stored."""
    from datasets import Features, Value

    if isinstance(shard, StoredObject):
        from omni.stores.filesystem import url_of

        url = url_of(shard)
    else:
        refuse_pointer(shard)
        url = str(shard.resolve()).replace("[", "[[]")
    # Its builders, since `load_dataset` sends a request to the hub for each.
    if shard.name.endswith(".parquet"):
        from datasets.packaged_modules.parquet.parquet import Parquet

        return Parquet(data_files={"train": [url]}, hash="").as_streaming_dataset("train").decode(False)
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    builder = WebDataset(data_files={"train": [url]}, hash="")
    features = builder.as_streaming_dataset("train").features or {}
    # What is typed as sound, `datasets` would encode again, for which it takes torchcodec; bytes stay as they are.
    builder.info.features = Features(
        {name: Value("binary") if hasattr(feature, "decode_example") else feature for name, feature in features.items()}
    )
    return builder.as_streaming_dataset("train")


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as readers take them: those of `json` beside the others, and bytes as recordings."""
    inner = fields.get("json")
    outer = {name: {"bytes": value, "path": None} if isinstance(value, bytes) else value for name, value in fields.items()}
    return {**inner, **outer} if isinstance(inner, Mapping) else outer


_BUFFER = 1 << 20
_BATCH = 16  # rows decoded at once


def open_records(path: Path) -> Records:
    """Open the records of a file by its suffix (and, for JSON, its first character); UserError for another suffix."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return ParquetRecords(path)
    if name.endswith((".csv", ".tsv")):
        return TableRecords(path)
    if name.endswith(TAR):
        return TarRecords(path)
    if name.endswith(TRANSCRIPT):
        return Transcript(path)
    if name.endswith((".json", ".jsonl")):
        start = b""
        with suppress(OSError, EOFError, zlib.error), open_binary(path) as file:
            start = file.read(256)
        return JsonArray(path) if start.decode("utf-8-sig", "replace").lstrip().startswith("[") else JsonLines(path)
    raise UserError(f"data file {path} is none of .parquet, .tar, .json, .jsonl, .csv, .tsv (or one of the latter with .gz)")


class TarRecords(Records):
    """The records of a WebDataset shard. Where it is damaged, the last one is an error."""

    def _raw(self, start: int) -> tuple[int, Iterator[Record]]:
        return 0, read_shard(self.path)

    def _record(self, raw: Record) -> Record:
        return raw


class ParquetRecords(Records):
    """The rows of a Parquet file. A damaged page makes the rows from there to the end of its row group broken, a value that
    cannot be read its own row."""

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        # Buffered, as otherwise a column of a row group is read whole; checksums are verified where the file has them.
        stored_object = pointed_at(self.path)
        if stored_object is None:
            refuse_pointer(self.path)
        file, buffer = (self.path, _BUFFER) if stored_object is None else (ObjectReader(stored_object), PIECE)
        return pq.ParquetFile(file, buffer_size=buffer, pre_buffer=False, page_checksum_verification=True)

    @cached_property
    def _footer(self) -> tuple[list[str], list[int], str]:
        """Names of the columns, row numbers at which the row groups end, and why the file cannot be opened (as one row)."""
        import pyarrow as pa

        try:
            with self._open() as file:
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                return file.schema_arrow.names, list(itertools.accumulate(sizes)), ""
        except (pa.ArrowException, OSError) as error:
            return [], [1], f"is no whole Parquet file ({one_line(error)}): download it again"

    def __len__(self) -> int:
        return [0, *self._footer[1]][-1]

    def columns(self) -> list[str]:
        return self._footer[0]

    def _raw(self, start: int) -> tuple[int, Iterator[_StoredRow]]:
        ends = [0, *self._footer[1]]
        group = min(bisect.bisect_right(ends, start), len(ends)) - 1
        return ends[group], self._rows(group)

    def _rows(self, group: int) -> Iterator[_StoredRow]:
        """Decode the rows from a group's first on, a few at a time; of a damaged part, the rows up to its group's end have the
        problem."""
        import pyarrow as pa

        _, ends, problem = self._footer
        if problem:
            yield from [_StoredRow(0, problem)][group:]
            return
        with self._open() as file:
            for number in range(group, len(ends)):
                row, end = [0, *ends][number], ends[number]
                try:
                    for batch in file.iter_batches(batch_size=_BATCH, row_groups=[number]):
                        plain = cache(partial(plain_rows, batch))  # rows that are skipped are not made plain
                        for index in range(min(len(batch), end - row)):
                            yield _StoredRow(row, "", plain, index)
                            row += 1
                except (pa.ArrowException, OSError) as error:
                    why = f"lies in or behind a damaged page of row group {number} ({one_line(error)})"
                else:
                    why = f"is missing from row group {number}, which promises more rows than it holds"
                yield from (_StoredRow(i, f"{why}: download the file again") for i in range(row, end))

    def _record(self, raw: _StoredRow) -> Record:
        where = str(self.path) if self._footer[2] else f"{self.path} row {raw.number}"
        data, problem = ({}, raw.problem) if raw.plain is None else raw.plain()[raw.offset]
        return Record(where, finite(data), problem)


class _StoredRow(NamedTuple):
    """A row of a Parquet file: its number, its batch as plain rows and its offset there, or why it cannot be read."""

    number: int
    problem: str
    plain: Callable[[], list[tuple[dict[str, Any], str]]] | None = None
    offset: int = 0


def plain_rows(batch: Any) -> list[tuple[dict[str, Any], str]]:
    """Rows of a batch as plain data, each with an error or "": a value that Python cannot represent breaks its own row only."""
    import pyarrow as pa

    unfit = (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError)  # no UTF-8, times out of range ...
    try:
        return [(data, "") for data in batch.to_pylist()]
    except unfit:
        return [_plain_row(batch.slice(row, 1), unfit) for row in range(len(batch))]


def _plain_row(batch: Any, unfit: tuple[type[Exception], ...]) -> tuple[dict[str, Any], str]:
    """The fields of a batch's one row, or none and the error."""
    data: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            data[name] = column[0].as_py()
        except unfit as error:
            problem = "holds a text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
            return {}, f"its column {name!r} {problem} ({one_line(error)}): fix or drop it"
    return data, ""
