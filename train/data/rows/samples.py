"""Samples rows of stored data, and counts the parts that they lack for the tasks of a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from omni.errors import UserError
from omni.tasks import find_task
from train.data.rows.parquet_files import first_rows, look
from train.data.rows.places import find_files
from train.data.rows.row import Row, from_plain

FILES, GROUPS, ROWS = 5, 5, 20
"""Numbers of files in the sample, of row groups of each, and about the number of rows of each file."""


def sample_rows(path: str) -> list[Row]:
    """Read the first rows of evenly spaced row groups of evenly spaced files, without those that cannot be read.

    Raises:
        UserError: there is no such file, or one of another format.
    """
    rows: list[Row] = []
    found = find_files(path)
    files = found.files
    for file in (files[i] for i in evenly(len(files), FILES)):
        groups = evenly(look(file)[0].num_row_groups, GROUPS)
        for group in groups:
            with suppress(UserError):
                for plain in first_rows(file, group, -(-ROWS // len(groups))):
                    with suppress(UserError):
                        rows.append(from_plain(plain, found.folder, str(file)))
    return rows


def evenly(size: int, count: int) -> list[int]:
    """Indices of `count` of `size` things, evenly spaced and ascending; of all where there are fewer."""
    count = min(count, size)
    return [i * size // count for i in range(count)]


def missing_parts(
    rows: Sequence[Row], mixtures: Iterable[Mapping[str, float]], heard_only: bool = False
) -> dict[str, dict[str, int]]:
    """Count, for each task with a weight in the mixtures, the rows with a turn that lacks a part which the task needs.

    A row that names its own task counts for that one only. For `heard_only` see `RowTurn.lacks`.
    """
    tasks = {find_task(name).name for mixture in mixtures for name, weight in mixture.items() if weight > 0}
    out: dict[str, dict[str, int]] = {}
    for row in rows:
        for name in [row.task] if row.task else sorted(tasks):
            missing = {turn.lacks(find_task(name), heard_only) for turn in row.turns} - {None}
            for part in missing:
                of = out.setdefault(find_task(name).name, {})
                of[str(part)] = of.get(str(part), 0) + 1
    return out
