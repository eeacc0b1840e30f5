"""Writes the index of a folder's Parquet files; see `index` for what it is. The footers are read, the pages are not."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import replacing, writing
from omni.remote import check_there
from train.console.progress import Display, Kind
from train.data.rows.footer import CutFooter, SharedFooter, cut_footer
from train.data.rows.index import CHECKSUM, HEADER, INDEX, MAGIC, START, VERSION, IndexHeader, checksum
from train.data.rows.parquet_files import JUDGED_GROUPS, are_large, check_columns, files_of, whole
from train.data.rows.row import ROW_VERSION

if TYPE_CHECKING:
    import numpy as np

_MOST = (1 << 32) - 1
"""Largest number of rows of a file, and of bytes of a group in its footer."""


class LargeGroups(UserError):
    """The files need no index: their groups are large, and their rows are read from an Arrow copy."""


def index_whole(folder: Path) -> None:
    """Write the index of a folder that has just been made, unless its groups are large."""
    with suppress(LargeGroups):
        write_index(folder)


def write_index(folder: Path, progress: Kind = "off") -> IndexHeader:
    """Write the index of a folder's files, in place of another; returns its counts.

    Raises:
        UserError: no files, or one that is not whole, or whose rows are of another format; no space, or no right to write.
        LargeGroups: the files need no index. One that is there is removed: it is of other files.
    """
    otherwise = f"data {folder} is no folder: an index is for a folder of Parquet files; a single file needs none"
    check_there(folder, "data", otherwise, Path.is_dir)
    files = [file for file in files_of(folder) if isinstance(file, Path)]

    import numpy as np

    display = Display(len(files), kind=progress)
    columns: dict[str, list[int]] = {name: [] for name in ("sizes", "times", "row_ends", "group_ends", "shared_of")}
    groups: dict[str, list[np.ndarray]] = {name: [] for name in ("places", "firsts", "lengths")}
    numbers: dict[SharedFooter, int] = {}
    rows = count = 0
    try:
        for file in files:
            cut = _checked(file, numbers)
            rows, count = rows + int(cut.rows.sum()), count + len(cut.rows)
            values = (cut.size, cut.mtime_ns, rows, count, numbers[cut.shared])
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
            groups["places"].append(cut.places.astype("<i8"))
            groups["firsts"].append((np.cumsum(cut.rows) - cut.rows).astype("<u4"))
            groups["lengths"].append(cut.lengths.astype("<u4"))
            display.tick(1, 0.0)
    except LargeGroups:
        with suppress(OSError):
            (folder / INDEX).unlink()
        raise
    finally:
        display.close()
    names, parts = [os.fsencode(file.name) for file in files], [part for shared in numbers for part in shared]
    tables: dict[str, Any] = {
        **columns,
        "name_ends": np.cumsum([len(name) for name in names]),
        "shared_ends": np.cumsum([len(part) for part in parts]),
        "names": np.frombuffer(b"".join(names), np.uint8),
        "shared": np.frombuffer(b"".join(parts), np.uint8),
    }
    sizes = len(tables["names"]), len(tables["shared"])
    header = IndexHeader(MAGIC, VERSION, ROW_VERSION, len(files), count, rows, len(numbers), *sizes)
    _write(folder / INDEX, header, tables, groups)
    return header


def _checked(file: Path, numbers: dict[SharedFooter, int]) -> CutFooter:
    """Cut a file's footer and check it; `numbers` is given the number of its shared footer, where that is a new one."""
    cut = cut_footer(file)
    if are_large(zip(cut.rows[:JUDGED_GROUPS].tolist(), cut.sizes[:JUDGED_GROUPS].tolist(), strict=True)):
        raise LargeGroups(f"data file {file} has large row groups, whose rows are read from an Arrow copy: no index is needed")
    if cut.rows.sum() > _MOST or (cut.lengths > _MOST).any():
        raise UserError(f"data file {file} has more rows, or columns, than an index can count ({_MOST:,}): split it")
    if cut.shared not in numbers:
        import pyarrow.parquet as pq

        with whole(file):
            schema = pq.read_schema(cut.shared.file())
        check_columns(file, schema)
        numbers[cut.shared] = len(numbers)
    return cut


def _write(path: Path, header: IndexHeader, tables: dict[str, Any], groups: dict[str, list[np.ndarray]]) -> None:
    import numpy as np

    sections, head = header.sections(), HEADER.pack(*header)
    data = np.zeros(sections["places"][0], np.uint8)
    for name, values in tables.items():
        start, end, kind = sections[name]
        data[start:end].view(kind)[:] = values
    head += CHECKSUM.pack(checksum(head, data, sections))
    data[:START] = np.frombuffer(head, np.uint8)
    try:
        with writing(path), replacing(path) as part, open(part, "wb") as file:
            file.write(data.data)
            for name, arrays in groups.items():
                file.seek(sections[name][0])
                file.writelines(array.data for array in arrays)
            file.truncate(sections["end"][0])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"index {path} cannot be written ({error.strerror}): make its folder one that can be") from error
