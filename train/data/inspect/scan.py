"""Reads the rows of Parquet files in their order, a few at a time, in any number of processes, and goes on after damaged parts;
and the options of the commands that do so.

`train.data.rows.parquet.StoredRows` refuses damaged files, as training must; a scan reports them.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.checkpoint.places import TOKENIZER
from omni.config import ModelConfig, preset
from omni.errors import UserError
from omni.utils.process import importing
from train.console.command import Parser, check_least, given_model, given_path
from train.console.progress import Display
from train.data.executor import Processes, Result, imap
from train.data.readers.containers import plain_rows
from train.data.rows.files import check_columns, find_files, footer, one_line, opened, parallel_map
from train.data.rows.reference import DataFile, reading
from train.data.rows.row import Row, from_plain, row_schema

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from omni.text import Tokenizer


BATCH = 16
"""Rows in memory at once, besides the pages they are read from."""

PIECE = 512
"""Rows that a process looks at before it gives back what it has found."""


@dataclass(frozen=True)
class FoundRow:
    """A row of a file, or several that cannot be read; `index` and `where` are those of the first.

    Attributes:
        plain: the stored data; None of rows that cannot be read.
        row: the row made of them, None where they break the format.
        why: how they do, or the error.
        count: number of rows; 0 where an unreadable file does not say.
    """

    index: int
    where: str
    plain: dict[str, Any] | None
    row: Row | None = None
    why: str = ""
    count: int = 1


class Scan:
    """The rows of a Parquet file, or of all `*.parquet` files of a folder in the order of their names, here or in a store.

    A store's files are read by ranges. Where a report tells how many rows each file has, none is opened before its rows are
    asked for. UserError: there is nothing at `path`, or no Parquet file in it.

    Attributes:
        path: the file or folder, or its address, for messages.
        folder: that references in rows are relative to; None in a store.
        report: reads the report of a preparation beside the files, see `DataFiles.described`.
        start, stop: row groups that begin from row `start` on and before `stop` are iterated over.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        listed = find_files(path)
        self.path, self.folder, self.files, self.report = (listed.path, listed.folder, listed.files, listed.described)
        self.schema = row_schema()
        counts = listed.counts()
        self._footers: dict[int, tuple[pq.FileMetaData | None, str]] = {}
        if counts is None:
            counts = [metadata.num_rows if metadata else 0 for metadata, _ in parallel_map(self._head, self.files)]
        self._ends = list(itertools.accumulate(counts))
        self._firsts = [0, *self._ends[:-1]]
        self.start, self.stop = 0, sys.maxsize

    def __len__(self) -> int:
        """Number of all rows, by the files' metadata."""
        return self._ends[-1]

    def where(self, index: int) -> str:
        """File of a row, and its number there."""
        number = bisect.bisect_right(self._ends, index)
        return f"{self.files[number]} row {index - self._firsts[number]}"

    def index(self, name: str, row: int) -> int:
        """Number, in all files together, of row `row` of the file `name`; UserError where there is no such row."""
        number = [file.name for file in self.files].index(name)
        count = self._ends[number] - self._firsts[number]
        if row >= count:
            raise UserError(f"{self.files[number]} has no row {row}: it has {count}, counted from 0")
        return self._firsts[number] + row

    def __iter__(self) -> Iterator[FoundRow]:
        for number in self.numbers():
            yield from self._file(number)

    def numbers(self) -> range:
        """Numbers of the files that have rows of the part that is looked at, or begin within it."""
        first = min(bisect.bisect_left(self._firsts, self.start), bisect.bisect_right(self._ends, self.start))
        return range(first, bisect.bisect_left(self._firsts, self.stop))

    def pieces(self, most: int = sys.maxsize) -> list[range]:
        """Ranges of at most `PIECE` rows, or of `most`, which processes can look at side by side."""
        size = min(most, PIECE)
        return [range(first, min(first + size, len(self))) for first in range(0, len(self), size)] or [range(0)]

    def part(self, rows: range) -> Scan:
        """Some of the rows: iterates over the row groups that begin within them."""
        part = copy.copy(self)
        part.start, part.stop = rows.start, rows.stop if rows.stop < len(self) else sys.maxsize
        return part

    def begins(self, number: int) -> bool:
        """True where a file begins within the part that is looked at."""
        return self.start <= self._firsts[number] < self.stop

    def at(self, index: int) -> FoundRow:
        """Read row `index` alone; UserError where there is none, or it cannot be read."""
        if not 0 <= index < len(self):
            raise UserError(f"data {self.path} has no row {index}: it has {len(self)}, counted from 0")
        number = bisect.bisect_right(self._ends, index)
        for item in self._file(number, only=index - self._firsts[number]):
            if item.index <= index < item.index + item.count:
                if item.plain is None:
                    raise UserError(f"{item.where}: {item.why}")
                return item
        raise UserError(f"{self.where(index)} is not there: the file has changed while it was read")

    def _footer(self, number: int) -> tuple[pq.FileMetaData | None, str]:
        """Metadata of a file, kept for the next part of it, and why its rows cannot be read, or ""."""
        if number not in self._footers:
            metadata, why = self._head(self.files[number])
            known = self._ends[number] - self._firsts[number]
            if metadata and not why and metadata.num_rows != known:
                why = f"has {metadata.num_rows} rows, and {known} by its report: prepare it again"
            self._footers.clear()
            self._footers[number] = metadata, why
        return self._footers[number]

    def _head(self, file: DataFile) -> tuple[pq.FileMetaData | None, str]:
        """Metadata of a file, None of one that is not whole, and the error of the file as a whole, or ""."""
        metadata = None
        try:
            metadata, schema = footer(file)
            check_columns(file, schema)
        except UserError as error:
            return metadata, str(error).removeprefix(f"data file {file}").lstrip(": ")
        return metadata, ""

    def _file(self, number: int, only: int | None = None) -> Iterator[FoundRow]:
        """Iterate over the rows of a file; with `only`, over those of that row's row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file, first = self.files[number], self._firsts[number]
        metadata, why = self._footer(number)
        if why:
            if only is None and not self.begins(number):
                return
            yield FoundRow(first, str(file), None, None, why, self._ends[number] - first)
            return
        # Page checksums are verified where the file has them; pages are read as needed, not a whole row group at once.
        options: Any = {"metadata": metadata, "page_checksum_verification": True, "pre_buffer": False, "buffer_size": 1 << 18}
        with pq.ParquetFile(opened(file) if isinstance(file, Path) else reading(file), **options) as parquet:
            start = 0
            for group in range(parquet.num_row_groups):
                end = start + parquet.metadata.row_group(group).num_rows
                if not (self.start <= first + start < self.stop if only is None else start <= only < end):
                    start = end
                    continue
                done = start
                try:
                    columns = [name for name in self.schema.names if name in parquet.schema_arrow.names]
                    for batch in parquet.iter_batches(BATCH, row_groups=[group], columns=columns, use_threads=False):
                        for plain, why in plain_rows(batch):
                            row, where = None, f"{file} row {done}"
                            try:
                                row = None if why else from_plain(plain, self.folder, where)
                            except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:  # the last: torch's
                                why = one_line(error).removeprefix(where).lstrip(": ")
                            yield FoundRow(first + done, where, plain, row, why)
                            done += 1
                except (pa.ArrowException, OSError) as error:
                    lost = f"{file} row group {group}, rows {done} to {end - 1}"
                    why = f"has damaged pages ({one_line(error)}): prepare it again"
                    yield FoundRow(first + done, lost, None, None, why, end - done)
                start = end


def over(
    scan: Scan, start: Callable[[], Callable[[range], Result]], processes: Processes, display: Display, most: int = sys.maxsize
) -> Generator[Result, None, None]:
    """Apply work (see `train.data.executor`) to pieces of a scan, of `most` rows at most; counts their rows on the display."""
    pieces = scan.pieces(most)
    with closing(imap(start, pieces, processes)) as results:
        for piece, result in zip(pieces, results, strict=True):
            yield result
            display.tick(len(piece), 0.0)


# --- options ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The model that rows are for: configuration (without the alignment head, which takes no columns) and tokenizer."""

    config: ModelConfig
    tokenizer: Tokenizer


def add_target(parser: Parser) -> None:
    """Add the options that name a model, see `chosen_target`."""
    parser.add_argument("--model", type=given_model, help="the model folder that the rows are for")
    parser.add_argument("--preset", type=str, help="or the preset of the model, such as nano")
    parser.add_argument("--tokenizer", type=given_path, help="tokenizer.json of a preset that does not read bytes")


def chosen_target(chosen: Mapping[str, Any]) -> Target | None:
    """Load configuration and tokenizer of the named model; None where none is named; UserError where they cannot be read."""
    folder, name, file = chosen["model"], chosen["preset"], chosen["tokenizer"]
    if folder is not None and name is not None:
        raise UserError(f"--model {folder} and --preset {name} are both given: name one")
    if folder is None and name is None:
        if file is not None:
            raise UserError(f"--tokenizer {file} is given without a model: name one with --model or --preset")
        return None
    with importing():
        from omni.checkpoint.folder import read_config
        from omni.text import Tokenizer

    config = preset(str(name)) if folder is None else read_config(folder)
    file = folder / TOKENIZER if file is None and folder is not None else file
    tokenizer, size = Tokenizer.bytes() if file is None else Tokenizer.from_file(file), config.layout.text.size
    if file is None and size != len(tokenizer):
        raise UserError(
            f"the preset {name} has a text stream of {size} ids, so bytes will not do: give the model's tokenizer.json with "
            "--tokenizer"
        )
    if len(tokenizer) > size:
        raise UserError(f"the tokenizer has {len(tokenizer)} ids, the layout's text stream {size}; use the model's own")
    return Target(replace(config, ctc=0, ctc_sounds=0, turn=False), tokenizer)


def add_processes(parser: Parser) -> None:
    """Add the options that say which processes work, see `chosen_processes`."""
    parser.add_argument("--workers", type=int, help="processes; 0 works in this one, by default one on every core")
    parser.add_argument("--ray", type=str, default="", help="a Ray cluster whose processes work, see `data prepare`")


def chosen_processes(chosen: Mapping[str, Any], device: str = "cpu") -> Processes:
    """The processes that the options name; UserError where their number is negative."""
    check_least(chosen, workers=0)
    return Processes(chosen["workers"], device=device, ray=chosen["ray"])
