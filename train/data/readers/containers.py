"""Records of Parquet files and WebDataset shards, here or in a store, and the records of any file by its suffix.

A Parquet file is read from the start of a row group, a WebDataset shard (.tar) from its start on: to go on at a record, those
before it are read and dropped. A record of a shard has a field for each of its files, by what follows the first dot of the name
(`question.wav`, `txt`), and `__key__`; those of its `json` are fields too. Both are read without `datasets`, whose readers end
at the first broken row (so that those behind it are not counted) and take two to three times as long.
"""

from __future__ import annotations

import bisect
import fnmatch
import io
import itertools
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import refuse_pointer
from omni.stores.cache import pointed_at
from omni.stores.drivers import bare, list_objects, parent
from omni.stores.reading import PIECE, ObjectReader, looked_up
from omni.utils.remote import check_there, find_address, shown
from train.data.readers.files import list_files
from train.data.readers.records import JsonArray, JsonLines, Record, Records, TableRecords, Transcript, finite, open_binary
from train.data.rows.files import one_line
from train.data.rows.reference import DataFile, reading

TAR, TRANSCRIPT = ".tar", ".trans.txt"
KINDS = (TAR, ".parquet")
LISTS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", *LISTS, TAR)
"""Suffixes of files whose fields may be lists, and of all that hold records."""


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
    """The records of a shard from number `start` on. ShardError: it cannot be read now, or is not any more what was listed."""
    try:
        if isinstance(shard, Path):
            os.stat(shard)
        yield from (ParquetRecords if shard.name.endswith(".parquet") else TarRecords)(shard).iterate(start)
    except UserError as error:
        raise ShardError(str(error)) from error
    except OSError as error:
        why = f"{shard} cannot be read ({error}): see that it is there, and run the same command again"
        raise ShardError(why) from error


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
    """The records of a WebDataset shard: the files that follow one another under one name up to its first dot. A file that
    cannot be decoded breaks its own record; from a damaged place in the archive on, one record has the error."""

    def _raw(self, start: int) -> tuple[int, Iterator[tuple[int, tuple[str, dict[str, bytes]]]]]:
        return 0, enumerate(self._samples())

    def _samples(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Iterate over the names of records and their files; without files, why what follows cannot be read."""
        if isinstance(self.path, Path):
            refuse_pointer(self.path)
        key, files = "", dict[str, bytes]()
        try:
            with reading(self.path) as stream, tarfile.open(fileobj=stream) as archive:
                tar: Any = archive
                while (member := tar.next()) is not None:
                    tar.members.clear()
                    named = _MEMBER.fullmatch(member.name) if member.isfile() else None
                    if named is None:
                        continue
                    if files and (key != named[1] or named[2] in files):
                        yield key, files
                        files = {}
                    key = named[1]
                    files[named[2]] = tar.extractfile(member).read()
                tar.fileobj.seek(tar.offset)  # `next` ends at whatever is no header
                if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError(f"at byte {tar.offset} is neither a file nor the archive's end")
        except (tarfile.TarError, EOFError, zlib.error) as error:
            key, files = f"it and what follows in its file cannot be read ({one_line(error)}): make the file again", {}
        if key:
            yield key, files

    def _record(self, raw: tuple[int, tuple[str, dict[str, bytes]]]) -> Record:
        number, (key, files) = raw
        where = f"{self.path} row {number}"
        if not files:
            return Record(where, {}, key)
        data: dict[str, Any] = {}
        for field, content in files.items():
            try:
                data[field] = _DECODERS.get(field.rpartition(".")[2].lower(), bytes)(content)
            except (ValueError, RecursionError, EOFError) as error:
                return Record(where, {}, f"its file {field!r} cannot be read ({one_line(error)}): fix or drop it")
        inner = data.get("json")
        return Record(where, finite({**(inner if isinstance(inner, dict) else {}), **data, "__key__": key}))


_MEMBER = re.compile(r"((?:.*/)?(?!__)[^./]+)\.([^/]*)")
"""A file's name: that of its record, and its field. Hidden files are left out."""


def _load_npy(content: bytes) -> Any:
    import numpy as np

    return np.load(io.BytesIO(content), allow_pickle=False)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _load_npy,
}
"""What becomes of a shard's files, by the end of their names; others stay as they are."""


_StoredRow = tuple[int, Callable[[], tuple[dict[str, Any], str]]]
"""A row of a Parquet file: its number, and what makes its fields, or says why it cannot be read."""


class ParquetRecords(Records):
    """The rows of a Parquet file. A damaged page makes the rows from there to the end of its row group broken, a value that
    cannot be read its own row."""

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        # Buffered, as otherwise a column of a row group is read whole; checksums are verified where the file has them.
        options: Any = {"pre_buffer": False, "page_checksum_verification": True}
        stored_object = pointed_at(self.path) if isinstance(self.path, Path) else self.path
        if stored_object is not None:
            return pq.ParquetFile(ObjectReader(stored_object), buffer_size=PIECE, **options)
        refuse_pointer(str(self.path))
        return pq.ParquetFile(self.path, buffer_size=_BUFFER, **options)

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
            yield from [(0, lambda: ({}, problem))][group:]
            return
        with self._open() as file:
            for number in range(group, len(ends)):
                row, end = [0, *ends][number], ends[number]
                try:
                    for batch in file.iter_batches(batch_size=_BATCH, row_groups=[number]):
                        plain = cache(partial(plain_rows, batch))  # rows that are skipped are not made plain
                        for index in range(min(len(batch), end - row)):
                            yield row, partial(lambda rows, index: rows()[index], plain, index)
                            row += 1
                except (pa.ArrowException, OSError) as error:
                    why = f"lies in or behind a damaged page of row group {number} ({one_line(error)})"
                else:
                    why = f"is missing from row group {number}, which promises more rows than it holds"
                yield from ((i, lambda why=why: ({}, f"{why}: download the file again")) for i in range(row, end))

    def _record(self, raw: _StoredRow) -> Record:
        number, plain = raw
        where = str(self.path) if self._footer[2] else f"{self.path} row {number}"
        data, problem = plain()
        return Record(where, finite(data), problem)


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
