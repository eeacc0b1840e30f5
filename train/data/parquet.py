"""Rows in Parquet files: written beside and renamed, read by index through Hugging Face `datasets`.

`datasets` keeps an Arrow copy of the files in its cache folder (`HF_HOME`) and maps it into memory, so that any row is at hand
without reading the others, and all workers share the pages.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omni.errors import UserError
from train.data.row import Row, features, from_plain, to_plain

if TYPE_CHECKING:
    import datasets


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row], row_group: int = 256) -> int:
    """Write rows to a Parquet file, in groups of `row_group`; returns how many.

    The file appears when it is whole: until then it grows under another name in the same folder, and an error removes it.

    Raises:
        UserError: a row that breaks the format or whose reference leaves the folder (with its number), or no space left.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from train.data.row import inside

    target = Path(path)
    schema = features().arrow_schema
    count = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        with pq.ParquetWriter(name, schema) as writer:
            iterator = iter(rows)
            while group := list(itertools.islice(iterator, row_group)):
                plain = []
                for row in group:
                    try:
                        plain.append(to_plain(row))
                        for turn in plain[-1]["turns"]:
                            for sound in (turn["question_audio"], turn["answer_audio"]):
                                if sound and not sound["bytes"]:
                                    inside(target.parent, sound["path"] or "")
                    except UserError as error:
                        raise UserError(f"{target} row {count}: {error}") from error
                    count += 1
                writer.write_table(pa.Table.from_pylist(plain, schema=schema))
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left to write {target}: free some, or write elsewhere") from error
        raise
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return count


class StoredRows:
    """The rows of a Parquet file, or of all `*.parquet` files of a folder in the order of their names.

    Args:
        path: the file or folder.
        cache: folder for the Arrow copy; None for that of `datasets`.

    Raises:
        UserError: nothing there, a file that is no Parquet or of another format, or no rows.
    """

    def __init__(self, path: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path)
        self.files = sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]
        if not self.files:
            raise UserError(f"data folder {path} holds no .parquet file: prepare the data first")
        counts = [_count(file) for file in self.files]
        self._ends = list(itertools.accumulate(counts))
        if not self._ends[-1]:
            raise UserError(f"data {path} has no rows: prepare the data again")
        self._rows = _open(self.files, cache)

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, index: int) -> str:
        """File and row number within it, for errors."""
        file = bisect.bisect_right(self._ends, index)
        return f"{self.files[file]} row {index - (self._ends[file - 1] if file else 0)}"

    def __getitem__(self, index: int) -> Row:
        """Row `index`; UserError where it breaks the format."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return from_plain(self._rows[index], folder, self.where(index))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def _count(file: Path) -> int:
    """Rows of a file whose columns are checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise UserError(f"data file {file} does not exist: name a Parquet file of rows, or a folder of them")
    try:
        metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data file {file} is not a whole Parquet file ({_one_line(error)}): prepare it again") from error
    wanted = features().arrow_schema
    for field in wanted:
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
    return metadata.num_rows


def _open(files: list[Path], cache: str | os.PathLike[str] | None) -> datasets.Dataset:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    columns = features()
    try:
        with _quiet():
            return datasets.Dataset.from_parquet(
                [str(file) for file in files],
                features=columns,
                columns=list(columns),
                cache_dir=None if cache is None else str(cache),
            )
    except (DatasetGenerationError, OSError) as error:
        raise UserError(
            f"the Arrow copy of {files[0]} cannot be made ({_one_line(error.__cause__ or error)}): free some space or name "
            "another folder as data.cache; if the file is damaged, prepare it again"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of `datasets` while preparing: standard error belongs to the run."""
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
