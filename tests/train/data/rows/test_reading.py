"""Rows of many files: the same with a report and without, in any order and process; with one, footers are read when needed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omni.errors import UserError
from tests.train.data.rows.test_rows import rows
from tests.train.data.toys import report
from train.data.rows import parquet
from train.data.rows.parquet import StoredRows, write_rows
from train.data.rows.row import features, to_plain

ROWS = rows(40, turns=2)


def table(first: int, last: int) -> pa.Table:
    return pa.Table.from_pylist([to_plain(row) for row in ROWS[first:last]], schema=features().arrow_schema)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a report: groups of several sizes and empty ones, an empty file, one of another writer, an older one."""
    folder = tmp_path_factory.mktemp("plain")
    write_rows(folder / "a.parquet", [replace(row, system="Be brief.") for row in ROWS[:9]], row_group=4)
    with pq.ParquetWriter(folder / "b.parquet", features().arrow_schema, use_dictionary=False) as writer:
        for first, last in ((9, 9), (9, 12), (12, 12), (12, 12), (12, 13), (13, 20), (20, 20)):
            writer.write_table(table(first, last))
    pq.write_table(table(0, 0), folder / "c.parquet")
    with pq.ParquetWriter(folder / "d.parquet", features().arrow_schema):
        pass
    pq.write_table(table(20, 25).drop_columns(["system"]), folder / "e.parquet", row_group_size=2, compression="zstd")
    write_rows(folder / "f.parquet", ROWS[25:], row_group=16)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """The same files with a report."""
    shutil.copytree(plain, tmp_path / "rows")
    report(tmp_path / "rows")
    return tmp_path / "rows"


def given(stored: StoredRows, numbers: list[int]) -> list[dict[str, Any]]:
    return [to_plain(stored[number]) | {"where": Path(stored.where(number)).name} for number in numbers]


def orders() -> list[list[int]]:
    shuffled = random.Random(0).sample(range(40), 40)
    return [list(range(40)), list(range(39, -1, -1)), [*shuffled, *shuffled], [7] * 3]


def test_rows_are_the_same_with_a_report_in_any_order(plain, folder):
    assert len(StoredRows(folder)) == len(StoredRows(plain)) == 40
    for numbers in orders():
        assert given(StoredRows(folder), numbers) == given(StoredRows(plain), numbers)
    stored = StoredRows(folder)
    assert [row.id for row in stored] == [str(number) for number in range(40)]
    assert [row.system for row in stored] == ["Be brief."] * 9 + [""] * 31
    for bad in (-1, 40):
        with pytest.raises(IndexError):
            stored[bad]
    held = StoredRows(folder, held_out=8)
    assert (held.size, held.row(0).id, held.held_out_indices(2)) == (32, "1", [0, 20])


@pytest.mark.long
def test_what_is_read_of_files_does_not_grow_with_their_number(tmp_path, monkeypatch):
    """1,000 names of one file: opening reads one of them, and what a process keeps of rows in any order has a bound."""
    write_rows(tmp_path / "0000.parquet", ROWS, row_group=2)
    for number in range(1, 1000):
        os.link(tmp_path / "0000.parquet", tmp_path / f"{number:04}.parquet")
    report(tmp_path)
    calls: list[object] = []
    real = pa.OSFile
    monkeypatch.setattr(pa, "OSFile", lambda *given: calls.append(given) or real(*given))
    StoredRows(tmp_path)  # imports
    calls.clear()
    tracemalloc.start()
    stored = StoredRows(tmp_path)
    gc.collect()
    assert len(stored) == 40_000 and len(calls) == 1
    assert tracemalloc.get_traced_memory()[0] < 500_000 and len(pickle.dumps(stored)) < 100_000
    order = random.Random(1)
    sizes = []
    for _ in range(3):
        for number in order.sample(range(40_000), 100):
            assert stored[number].id == str(number % 40)
        gc.collect()
        sizes.append((tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()))
    tracemalloc.stop()
    assert len(stored._open_files) == parquet.KEPT_FILES and len(calls) > 250
    assert len(stored._recent) == parquet.KEPT_GROUPS
    assert sizes[2][0] < sizes[0][0] + 200_000 and sizes[2][1] < 2 * sizes[0][1] + 1_000_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("files", "chunks", "kept"), [(3, 50_000, 3), (64, 1, 1), (64, 2 * 20 * 25, 2)])
def test_files_stay_open_while_there_is_room(files, chunks, kept, tmp_path, monkeypatch):
    for number in range(5):
        write_rows(tmp_path / f"{number}.parquet", ROWS, row_group=2)
    monkeypatch.setattr(parquet, "KEPT_FILES", files)
    monkeypatch.setattr(parquet, "KEPT_CHUNKS", chunks)
    stored = StoredRows(tmp_path)
    for number in random.Random(0).sample(range(200), 60):
        assert stored[number].id == str(number % 40)
    assert len(stored._open_files) == kept


def _read(stored: StoredRows, numbers: list[int], queue: Any) -> None:
    queue.put(given(stored, numbers))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_rows_are_the_same_in_other_processes(method, plain, folder):
    context = multiprocessing.get_context(method)
    stored, numbers, queue = StoredRows(folder), orders()[2], context.Queue()
    wanted = given(StoredRows(plain), numbers)
    assert given(stored, numbers[:5]) == wanted[:5]  # so that files are open here
    started = [context.Process(target=_read, args=(stored, numbers, queue)) for _ in range(2 if method == "fork" else 1)]
    for process in started:
        process.start()
    assert given(stored, numbers) == wanted
    assert [queue.get(timeout=300) for _ in started] == [wanted] * len(started)
    for process in started:
        process.join()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "report.json").write_text("{"),
        lambda folder: (folder / "report.json").write_text('{"shards": [{"file": "a.parquet", "rows": 9, "bytes": 1}]}'),
        lambda folder: shutil.copy(folder / "a.parquet", folder / "g.parquet"),
    ],
)
def test_a_report_of_other_files_is_none(change, folder):
    change(folder)
    assert [row.id for row in StoredRows(folder)] == [str(n) for n in (*range(40), *range(9 * (folder / "g.parquet").exists()))]


def test_files_that_change_are_named(folder):
    stored = StoredRows(folder)
    assert stored[39].id == "39"
    write_rows(folder / "b.parquet", ROWS[9:12])
    os.truncate(folder / "e.parquet", 100)
    with pytest.raises(UserError, match="b.parquet has 3 rows, and 11 when the run started, or by its report"):
        stored[10]
    with pytest.raises(UserError, match="e.parquet is not a whole Parquet file"):
        stored[20]
    with pytest.raises(UserError, match="e.parquet is not a whole Parquet file"):
        StoredRows(folder)
    (folder / "f.parquet").unlink()
    assert stored[39].id == "39"  # it is open
    with pytest.raises(UserError, match="f.parquet is not a whole Parquet file .*No such file"):
        pickle.loads(pickle.dumps(stored))[39]


@pytest.mark.parametrize("reported", [True, False])
def test_a_file_that_gets_shorter_while_it_is_read_is_named(reported, tmp_path):
    """A page of a mapped file that is not there any more would end the process."""
    file = tmp_path / "rows.parquet"
    write_rows(file, [replace(ROWS[0], id=random.Random(i).randbytes(1 << 16).hex()) for i in range(12)], row_group=2)
    if reported:
        report(tmp_path)
    stored = StoredRows(tmp_path)
    first = stored[0].id
    os.truncate(file, 1 << 18)
    with pytest.raises(UserError, match=r"rows.parquet (\(rows 8 to 9\) cannot be read|is not a whole Parquet file)"):
        stored[9]
    assert stored[0].id == first  # its group was read before
