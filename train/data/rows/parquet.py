"""Rows in Parquet files: written under another name and renamed, read by index, in part or whole.

A file is read in place, a row group at a time, so that the first row of any data is available at once; this requires small
groups and short footers, which `write_rows` and `data prepare` make. A file of large groups is read through Hugging Face
`datasets`, which keeps an Arrow copy of it in its cache folder (`HF_HOME`) and maps that into memory.

Parts of a turn that are large have Parquet columns of their own, and are read where examples of some tasks need them:

    question_audio    tasks with a spoken question
    answer_codes      tasks with a spoken answer
    answer_audio      the same, where a turn has no codes
    words             where answers are cut
    question_frames   in place of question_audio, where a run takes them (a column beside `turns`)

Everything else of a row is small and always read. What the tasks of a source need is read of every row at once; what only the
task needs that a row names itself, or a turn without codes, is read after it.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni.errors import UserError
from omni.files import replacing, writing
from omni.stores.reading import fetch
from omni.tasks import TASKS
from train.data.rows.files import (
    JUDGED_GROUPS,
    LARGE_BYTES,
    LARGE_ROWS,
    NOT_WHOLE,
    check_columns,
    evenly,
    find_files,
    look,
    one_line,
    open_parquet,
    parallel_map,
    readable,
)
from train.data.rows.reference import DataFile, Reference
from train.data.rows.row import OPTIONAL, Row, features, from_plain, has_codes, inside, row_schema, to_plain
from train.data.seeding import WindowDraw, Windows

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq


FRAMES = "question_frames"
PARTS = frozenset({"question_audio", "answer_audio", "answer_codes", "words", FRAMES})
REST = "rest"
"""Stands for the columns that are no part's."""


def leaf_paths(metadata: pq.FileMetaData, parts: frozenset[str]) -> list[str]:
    """Paths of the leaf columns of these parts in a file, such as `turns.list.element.answer_audio.bytes`. Other columns than
    those of rows are left out. What lists call their elements differs between writers."""
    out = []
    for number in range(metadata.num_columns):
        path = metadata.schema.column(number).path
        names = path.split(".")
        if names[0] in row_schema().names and next((name for name in names if name in PARTS), REST) in parts:
            out.append(path)
    return out


@dataclass(frozen=True)
class Needed:
    """The columns that examples need of a source's rows.

    Attributes:
        tasks: names of tasks that rows are used for, unless they name one themselves.
        words: answers are cut.
        frames: those kept with the rows are read in place of the questions' sound.
    """

    tasks: frozenset[str]
    words: bool = False
    heard_only: bool = False
    frames: bool = False

    @cached_property
    def first(self) -> frozenset[str]:
        """The parts that are read of every row."""
        return self._parts(self.tasks) | {REST} | ({FRAMES} if self.frames else set())

    def next(self, plain: Mapping[str, Any]) -> frozenset[str]:
        """The parts still to be read of a row whose first parts are `plain`."""
        wanted = self._parts([plain["task"]] if plain["task"] else self.tasks)
        turns = plain["turns"] or ()
        lacking = frozenset(part for part in wanted if not all(part in turn for turn in turns))
        if not lacking and "answer_codes" in wanted and not all(has_codes(turn["answer_codes"]) for turn in turns):
            lacking = frozenset({"answer_audio"} - {name for turn in turns for name in turn})
        return lacking

    def _parts(self, names: Iterable[str]) -> frozenset[str]:
        tasks = [TASKS[name] for name in names if name in TASKS]  # an unknown one is refused where the example is made
        wanted = {
            "question_audio": any(task.question == "audio" for task in tasks) and not self.frames,
            "answer_codes": any(task.audio for task in tasks) and not self.heard_only,
            "words": self.words and not self.heard_only,
        }
        return frozenset(part for part, needed in wanted.items() if needed)


ROW_GROUP = 16
"""Rows of a row group: to read one row, its group is decoded."""

PIECE = 32
"""Rows, one after another in a file, that are read together in the order `sequential`: whole row groups."""

KEPT_FILES, KEPT_CHUNKS = 32, 20_000
"""Open files that a process keeps of a source, those read last, and column chunks in their footers, a kilobyte each."""

KEPT_GROUPS = 4
"""Decoded row groups that a process keeps of a source whose rows are read alone, those decoded last."""


_CODES = "turns.list.element.answer_codes.frames.list.element.list.element"
WRITTEN_AS: dict[str, Any] = {"write_page_checksum": True, "write_statistics": False, "use_dictionary": [_CODES]}
"""How `pyarrow.parquet.ParquetWriter` writes rows: a footer without what nobody asks it is read in half the time."""


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row], row_group: int = ROW_GROUP) -> int:
    """Write rows to a Parquet file, in groups of `row_group`; returns their number. The file appears when it is whole: until
    then it is written under another name in the same folder, and an error removes it. UserError: a row that breaks the format
    or whose reference leaves the folder (with its number), or no space left."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = Path(path)
    count = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target), replacing(target) as part, pq.ParquetWriter(part, row_schema(), **WRITTEN_AS) as writer:
        iterator = iter(rows)
        while group := list(itertools.islice(iterator, row_group)):
            plain = []
            for row in group:
                try:
                    plain.append(to_plain(row))
                    for turn in plain[-1]["turns"]:
                        for sound in (turn["question_audio"], turn["answer_audio"]):
                            if sound and not sound["bytes"] and Reference.read(sound["path"]) is None:
                                inside(target.parent, sound["path"] or "")
                except UserError as error:
                    raise UserError(f"{target} row {count}: {error}") from error
                count += 1
            writer.write_table(pa.Table.from_pylist(plain, schema=row_schema()))
    return count


class KeptGroup(NamedTuple):
    """Columns of a row group: the number of its file, of which parts, its first row in the file, and the table."""

    file: int
    parts: frozenset[str]
    first: int
    table: pa.Table


class OpenFile:
    """An open file, whose footer has been read; UserError where it is none, or has not `count` rows."""

    def __init__(self, file: DataFile, count: int) -> None:
        self.file = file
        with readable(file, NOT_WHOLE):
            self.parquet = open_parquet(file, page_checksum_verification=True)
        check_columns(file, self.parquet.schema_arrow)
        metadata = self.parquet.metadata
        if metadata.num_rows != count:
            raise UserError(
                f"data file {file} has {metadata.num_rows} rows, and {count} when the run started, or by its report: copy it "
                "there again, with the report.json that was made with it"
            )
        self.chunks = metadata.num_row_groups * metadata.num_columns
        self.ends = list(itertools.accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))

    def read(self, row: int, parts: frozenset[str]) -> tuple[int, pa.Table]:
        """Decode the selected columns of a row's group: its first row, and the table; UserError where they cannot be read."""
        group = bisect.bisect_right(self.ends, row)
        first = self.ends[group - 1] if group else 0
        with readable(self.file, f"(rows {first} to {self.ends[group] - 1}) cannot be read"):
            paths = leaf_paths(self.parquet.metadata, parts)
            return first, self.parquet.read_row_group(group, columns=paths, use_threads=False)


class StoredRows:
    """The rows of a Parquet file, or of all `*.parquet` files of a folder in the order of their names; a source of a mixture.

    `stored[i]` is row i of all, `row(i)` of those that are not held out. Where a report of `data prepare` or `data filter`
    beside them says how many rows each file has, a file is opened when its first row is read; otherwise the footers of all are
    read now. Files of a store are read by ranges. UserError: nothing there, a file that is no Parquet or of another format, no
    rows, or none that are not held out.

    Args:
        path: the file or folder, or its address; or several of them, one after another.
        cache: folder for Arrow copies, where one is needed; None for that of `datasets`.
        needed: parts of rows that are read, others come as if they were not there; None for all.
        held_out: number of rows that are left out, evenly spaced, the first of as many equal parts: `held_out_indices`.
        window: rows are read in pieces (`PIECE`), and each packer keeps about so many; None where they are read one by one.

    Attributes:
        size: number of rows that are not held out.
        windows: the order of these where they are read in pieces, else None.
    """

    repeats = False

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str],
        cache: str | os.PathLike[str] | None = None,
        needed: Needed | None = None,
        held_out: int = 0,
        window: int | None = None,
    ) -> None:
        self.needed = needed
        self.name = str(path) if isinstance(path, (str, os.PathLike)) else ", ".join(path)
        self._files, counted = list[DataFile](), list[int]()
        large, absent = False, list[set[str]]()
        for location in [path] if isinstance(path, (str, os.PathLike)) else path:
            data_files, seen = find_files(location), list[int]()
            counts = data_files.counts()
            for metadata, schema in parallel_map(look, data_files.files if counts is None else data_files.files[:1]):
                seen.append(metadata.num_rows)
                absent.append({name for name in OPTIONAL if name not in schema.names})
                groups = map(metadata.row_group, range(min(metadata.num_row_groups, JUDGED_GROUPS)))
                large = large or any(g.num_rows > LARGE_ROWS or g.total_byte_size > LARGE_BYTES for g in groups)
            self._files += data_files.files
            counted += seen if counts is None else counts
            if not sum(counted[-len(data_files.files) :]):
                raise UserError(f"data {data_files.path} has no rows: prepare the data again")
        self._ends = list(itertools.accumulate(counted))
        self._copied = _arrow_copy(self._files, absent, cache) if large else None
        if held_out >= len(self):
            raise UserError(f"held_out is {held_out}, but {self.name} has {len(self)} rows: hold out fewer, none would be left")
        self._held_out, self.size = range(held_out), len(self) - held_out
        self.windows = None if window is None else Windows(self._pieces(), -(-window // PIECE))
        self._open_files: OrderedDict[tuple[int, int], OpenFile] = OrderedDict()  # by process: a fork shares no open file
        self._recent: list[KeptGroup] = []
        self._of_window: dict[int, tuple[tuple[int, int], list[KeptGroup]]] = {}  # by packer: its window, and groups in it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": OrderedDict(), "_recent": [], "_of_window": {}}

    def whole(self) -> StoredRows:
        """The same rows, with all their parts."""
        out = copy.copy(self)
        out.needed, out._recent, out._of_window = None, [], {}
        return out

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Number of a row's file, and of the row in it."""
        file = bisect.bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)

    def _pieces(self) -> np.ndarray:
        """Where pieces of `PIECE` rows of a file, or of what is left at its end, start, and the number of all rows, int64; of
        the rows that are not held out."""
        import numpy as np

        starts = [range(first, end, PIECE) for first, end in itertools.pairwise([0, *self._ends])]
        pieces = np.fromiter(itertools.chain(*starts, self._ends[-1:]), np.int64)
        return pieces - np.array([self._place(k) for k in self._held_out], np.int64).searchsorted(pieces)

    def where(self, index: int) -> str:
        """File and row number within it, for errors."""
        file, row = self.locate(index)
        return f"{self._files[file]} row {row}"

    def __getitem__(self, index: int) -> Row:
        """Row `index`; UserError where it breaks the format, or cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self._read(index, self._recent)
        del self._recent[:-KEPT_GROUPS]
        return row

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int, draw: WindowDraw | None = None) -> Row:
        """Read row `index` of those that are not held out; its group is kept until the window of the draw ends, if any."""
        # Held-out row k is at place(k), after place(k) - k other rows: the index skips all held-out rows before this one.
        number = index + bisect.bisect_right(self._held_out, index, key=lambda k: self._place(k) - k)
        if draw is None:
            return self[number]
        if draw.packer not in self._of_window or self._of_window[draw.packer][0] != draw.window:
            self._of_window[draw.packer] = draw.window, []
        return self._read(number, self._of_window[draw.packer][1])

    def held_out_indices(self, count: int) -> list[int]:
        """Numbers of `count` of the held-out rows, evenly spaced, or of all where there are fewer."""
        return [self._place(k) for k in evenly(len(self._held_out), count)]

    def _place(self, k: int) -> int:
        return k * len(self) // len(self._held_out)

    def _read(self, index: int, kept: list[KeptGroup]) -> Row:
        """Row `index` of all, with its group, which is in `kept` or is added there."""
        file = self._files[self.locate(index)[0]]  # the folder that references are relative to is None in a store
        return from_plain(self._plain(index, kept), file.parent if isinstance(file, Path) else None, self.where(index))

    def _plain(self, index: int, kept: list[KeptGroup]) -> dict[str, Any]:
        """Read the needed parts of a row as plain data; others are null. An Arrow copy gives all parts."""
        if self._copied is not None:
            return self._copied[index]
        number, row = self.locate(index)
        if self.needed is None:
            return self._columns(number, row, PARTS | {REST}, kept)
        plain = self._columns(number, row, self.needed.first, kept)
        turns = plain["turns"] or ()
        while parts := self.needed.next(plain):
            for turn, more in zip(turns, self._columns(number, row, parts, kept)["turns"], strict=True):
                turn.update(more)
        for turn in turns:
            turn.update({part: None for part in PARTS if part not in turn})
        return plain

    def _columns(self, number: int, row: int, parts: frozenset[str], kept: list[KeptGroup]) -> dict[str, Any]:
        """Columns of a row in file `number`, of its group; a file is opened only for groups that are not kept."""
        for group in kept:
            if group.file == number and 0 <= row - group.first < len(group.table) and group.parts == parts:
                break
        else:
            files, place = self._open_files, (os.getpid(), number)
            if place not in files:
                files[place] = OpenFile(self._files[number], self._ends[number] - (self._ends[number - 1] if number else 0))
                chunks = sum(file.chunks for file in files.values())
                while len(files) > 1 and (len(files) > KEPT_FILES or chunks > KEPT_CHUNKS):
                    chunks -= files.popitem(last=False)[1].chunks
            files.move_to_end(place)
            group = KeptGroup(number, parts, *files[place].read(row, parts))
            kept.append(group)
        return group.table.slice(row - group.first, 1).to_pylist()[0]


def _arrow_copy(files: list[DataFile], absent: list[set[str]], cache: str | os.PathLike[str] | None) -> datasets.Dataset:
    """Open the files as Arrow copies; `absent` are the columns that each of them lacks, the same ones in all."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    columns = features()
    for name in set().union(*absent):
        if any(name not in missing for missing in absent):
            raise UserError(f"only some files of {str(files[0]).rpartition('/')[0]} have a column {name!r}: prepare them again")
        del columns[name]
    try:
        datasets.disable_progress_bars()  # standard error belongs to the run
        paths = [str(file if isinstance(file, Path) else fetch(file.address, [file])) for file in files]
        return datasets.Dataset.from_parquet(paths, features=columns, columns=list(columns), cache_dir=cache and str(cache))
    except (DatasetGenerationError, OSError) as error:
        raise UserError(
            f"the Arrow copy of {files[0]} cannot be made ({one_line(error.__cause__ or error)}): free some space or name "
            "another folder as HF_DATASETS_CACHE; if the file is damaged, prepare it again"
        ) from error
