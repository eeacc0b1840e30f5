"""The index beside prepared rows: the rows are the same with it, no footer is read, and files that have changed are refused."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omni.errors import UserError
from tests.train.data.rows.test_rows import rows
from train.cli import main
from train.data.inspect.scan import Scan
from train.data.rows import index as indexes
from train.data.rows import open_file, parquet
from train.data.rows.index import HEADER, INDEX
from train.data.rows.indexing import LargeGroups, write_index
from train.data.rows.parquet import StoredRows, write_rows
from train.data.rows.parquet_files import LARGE_ROWS
from train.data.rows.row import features, to_plain
from train.data.sources.base import StoredSource

ROWS = rows(40, turns=2)


def table(first: int, last: int) -> pa.Table:
    return pa.Table.from_pylist([to_plain(row) for row in ROWS[first:last]], schema=features().arrow_schema)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without index: groups of several sizes and empty ones, an empty file, one of another writer, an older one."""
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
    """The same files with an index."""
    shutil.copytree(plain, tmp_path / "rows")
    write_index(tmp_path / "rows")
    return tmp_path / "rows"


def given(stored: StoredRows, numbers: list[int]) -> list[dict[str, Any]]:
    return [to_plain(stored[number]) | {"where": Path(stored.where(number)).name} for number in numbers]


def orders() -> list[list[int]]:
    shuffled = random.Random(0).sample(range(40), 40)
    return [list(range(40)), list(range(39, -1, -1)), [*shuffled, *shuffled], [7] * 3]


def test_rows_are_the_same_with_an_index_in_any_order(plain, folder):
    assert len(StoredRows(folder)) == len(StoredRows(plain)) == 40
    for numbers in orders():
        assert given(StoredRows(folder), numbers) == given(StoredRows(plain), numbers)
    stored = StoredRows(folder)
    assert [row.id for row in stored] == [str(number) for number in range(40)]
    assert [row.system for row in stored] == ["Be brief."] * 9 + [""] * 31
    for bad in (-1, 40):
        with pytest.raises(IndexError):
            stored[bad]
    held = StoredSource(folder, held_out=8)
    assert (held.size, held.row(0).id, held.held_out_indices(2)) == (32, "1", [0, 20])


def test_an_index_has_16_bytes_a_group_and_files_of_one_writer_share_the_rest(folder, tmp_path):
    assert write_index(folder)[3:7] == (6, 15, 40, 2)
    small, large = tmp_path / "small", tmp_path / "large"
    for place, group in ((small, 20), (large, 1)):
        write_rows(place / "a.parquet", ROWS, row_group=group)
        write_index(place)
    assert (large / INDEX).stat().st_size - (small / INDEX).stat().st_size == 16 * (40 - 2)


def test_what_is_read_of_files_does_not_grow_with_their_number(tmp_path, monkeypatch):
    """1,000 names of one file: opening reads none of them, and what a process keeps of rows in any order has a bound."""
    write_rows(tmp_path / "0000.parquet", ROWS, row_group=2)
    for number in range(1, 1000):
        os.link(tmp_path / "0000.parquet", tmp_path / f"{number:04}.parquet")
    write_index(tmp_path)
    calls: list[object] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(pa, name)
        return lambda *given: calls.append(given) or real(*given)

    monkeypatch.setattr(pa, "OSFile", watched("OSFile"))
    monkeypatch.setattr(pq.ParquetFile, "__init__", _no_footer(pq.ParquetFile.__init__))
    tracemalloc.start()
    stored = StoredRows(tmp_path)
    gc.collect()
    assert len(stored) == 40_000 and not calls
    assert tracemalloc.get_traced_memory()[0] < 20_000 and len(pickle.dumps(stored)) < 2000
    order = random.Random(1)
    sizes = []
    for _ in range(3):
        for number in order.sample(range(40_000), 60):
            assert stored[number].id == str(number % 40)
        gc.collect()
        sizes.append((tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()))
    tracemalloc.stop()
    assert len(stored._open_files) == parquet.KEPT_FILES and len(calls) > 150
    assert all(len(file._groups) <= open_file.KEPT_GROUPS for file in stored._open_files.values())
    assert sizes[2][0] < sizes[0][0] + 200_000 and sizes[2][1] < 2 * sizes[0][1] + 1_000_000


def _no_footer(real: Callable[..., Any]) -> Callable[..., Any]:
    """Reads footers in memory, and refuses those of files."""

    def opens(self: pq.ParquetFile, source: object, *, metadata: object = None, **options: object) -> None:
        assert metadata is not None or isinstance(source, pa.BufferReader)
        real(self, source, metadata=metadata, **options)

    return opens


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


def test_a_copy_for_another_process_maps_the_same_index_or_none(folder):
    stored = StoredRows(folder)
    assert given(pickle.loads(pickle.dumps(stored)), [30, 3]) == given(stored, [30, 3])
    kept = pickle.dumps(stored)
    (folder / "c.parquet").unlink()
    write_index(folder)
    with pytest.raises(UserError, match=f"{INDEX} has changed since it was opened"):
        pickle.loads(kept)
    assert len(StoredRows(folder)) == 40


# --- what is refused ----------------------------------------------------------------------------------------------------


def patched(at: int, new: bytes) -> Callable[[Path], object]:
    """Write bytes into the index."""

    def patch(folder: Path) -> None:
        content = bytearray((folder / INDEX).read_bytes())
        content[at : at + len(new)] = new
        (folder / INDEX).write_bytes(content)

    return patch


def cut(length: int) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:length])


def replaced(new: Callable[[Path], object]) -> Callable[[Path], None]:
    """Put something else in place of the index."""

    def replace_it(folder: Path) -> None:
        (folder / INDEX).unlink()
        new(folder / INDEX)

    return replace_it


def touched(folder: Path) -> None:
    status = (folder / "b.parquet").stat()
    os.utime(folder / "b.parquet", ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def shortened(folder: Path) -> None:
    status = (folder / "e.parquet").stat()
    os.truncate(folder / "e.parquet", 100)
    os.utime(folder / "e.parquet", ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (cut(0), "is no index of rows"),
    "only its name": (cut(8), "is not whole"),
    "only a header": (cut(HEADER.size + 4), "is not whole"),
    "cut short": (cut(-1), "is not whole"),
    "longer": (lambda folder: (folder / INDEX).open("ab").write(bytes(8)), "is not whole"),
    "another file": (replaced(lambda path: path.write_bytes(b"PAR1" * 100)), "is no index of rows"),
    "a later version": (patched(8, b"\x02"), "is of version 2.2, this is 1.2"),
    "rows of another version": (patched(12, b"\x03"), "is of version 1.3, this is 1.2"),
    "counts of any size": (patched(16, b"\xff" * 48), "is not whole"),
    "a name that is damaged": (patched(400, b"\xff" * 64), "is damaged"),
    "a folder": (replaced(Path.mkdir), r"cannot be read \(Is a directory\)"),
    "unreadable": (replaced(lambda path: path.symlink_to(INDEX)), "cannot be read"),
    "a link to nothing": (replaced(lambda path: path.symlink_to("gone")), r"cannot be read \(No such file or directory\)"),
    "a file more": (
        lambda folder: shutil.copy(folder / "a.parquet", folder / "g.parquet"),
        "is of other files: .*g.parquet is not",
    ),
    "a file less": (lambda folder: (folder / "c.parquet").unlink(), "is of other files: .*c.parquet is not there any more"),
    "another name": (
        lambda folder: (folder / "c.parquet").rename(folder / "c2.parquet"),
        "is of other files: .*c.parquet is not",
    ),
    "another time": (touched, "is of other files: .*b.parquet has been written or copied since"),
    "another size": (shortened, "is of other files: .*e.parquet has 100 bytes now, not"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_index_that_is_damaged_or_of_other_files_is_refused_with_the_way_out(damage, folder):
    change, said = DAMAGES[damage]
    change(folder)
    with pytest.raises(UserError, match=f"index .*{INDEX} {said}.*: run `omni-train data index {folder}`") as caught:
        StoredRows(folder)
    assert "\n" not in str(caught.value)


def test_the_command_makes_it_again(folder, capsys):
    touched(folder)
    shutil.copy(folder / "a.parquet", folder / "g.parquet")
    assert main(["data", "index", str(folder), "--progress", "off"]) == 0
    assert capsys.readouterr().out == f"49 rows of 7 files indexed in {folder / INDEX}\n"
    assert [row.id for row in StoredRows(folder)][-10:] == ["39", *map(str, range(9))]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda folder: os.truncate(folder / "b.parquet", 1000), "data file .*b.parquet is not a whole Parquet file"),
        (lambda folder: pq.write_table(pa.table({"a": [1]}), folder / "b.parquet"), "b.parquet has no column 'version'"),
        (lambda folder: [file.unlink() for file in folder.glob("*.parquet")], "holds no .parquet file"),
        (replaced(Path.mkdir), f"{INDEX}' is not a file that can be replaced"),
        (shutil.rmtree, "is no folder: an index is for a folder"),
    ],
)
def test_what_cannot_be_indexed_is_refused_and_leaves_nothing(change, said, folder):
    change(folder)
    before = sorted(folder.glob("*"))
    with pytest.raises(UserError, match=said):
        write_index(folder)
    assert sorted(folder.glob("*")) == before


def test_files_that_change_after_opening_are_refused_when_they_are_read(folder):
    stored = StoredRows(folder)
    assert stored[39].id == "39"
    touched(folder)
    shortened(folder)
    with pytest.raises(UserError, match=f"{INDEX} is of other files: .*b.parquet has been written or copied since"):
        stored[10]
    with pytest.raises(UserError, match=f"{INDEX} is of other files: .*e.parquet has 100 bytes now"):
        stored[20]
    assert stored[0].id == "0"
    (folder / "a.parquet").unlink()
    assert stored[1].id == "1"  # it is open
    with pytest.raises(UserError, match=f"{INDEX} is of other files: .*a.parquet cannot be found"):
        pickle.loads(pickle.dumps(stored))[0]


@pytest.mark.parametrize(
    "section, value", [("places", 5), ("places", 1 << 60), ("lengths", 3), ("lengths", 1 << 31), ("firsts", 1)]
)
def test_groups_that_are_not_where_the_index_says_are_refused(section, value, folder):
    """Opening does not read that part of the index."""
    header = indexes.IndexHeader(*HEADER.unpack_from((folder / INDEX).read_bytes()))
    start, _, kind = header.sections()[section]
    size = int(kind[-1])
    patched(start + size, value.to_bytes(size, "little"))(folder)
    stored = StoredRows(folder)
    with pytest.raises(UserError, match=f"a.parquet has no row group where .*{INDEX} says .*omni-train data index"):
        stored[5]
    assert stored[20].id == "20"


@pytest.mark.parametrize("indexed", [True, False])
def test_a_name_need_not_be_text(indexed, tmp_path):
    write_rows(tmp_path / "a.parquet", ROWS[:5], row_group=2)
    os.rename(tmp_path / "a.parquet", os.fsencode(tmp_path) + b"/a\xff.parquet")
    write_rows(tmp_path / "b.parquet", ROWS[5:7])
    if indexed:
        write_index(tmp_path)
    assert [row.id for row in StoredRows(tmp_path)] == [str(number) for number in range(7)]
    assert [item.plain["id"] for item in Scan(tmp_path)] == [str(number) for number in range(7)]


def test_a_damaged_page_is_named_and_the_rest_is_read(folder):
    file = folder / "f.parquet"
    column, status = pq.read_metadata(file).row_group(0).column(2), file.stat()
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    stored = StoredRows(folder)
    with pytest.raises(UserError, match=r"f.parquet \(rows 0 to 14\) cannot be read .*prepare it again"):
        stored[39]
    assert stored[24].id == "24"


@pytest.mark.parametrize("indexed", [True, False])
def test_a_file_that_gets_shorter_while_it_is_read_is_named(indexed, tmp_path):
    """A page of a mapped file that is not there any more would end the process."""
    file = tmp_path / "rows.parquet"
    write_rows(file, [replace(ROWS[0], id=random.Random(i).randbytes(1 << 16).hex()) for i in range(12)], row_group=2)
    if indexed:
        write_index(tmp_path)
    stored = StoredRows(tmp_path)
    first = stored[0].id
    os.truncate(file, 1 << 18)
    with pytest.raises(UserError, match=r"rows.parquet (has no row group where|\(rows 8 to 9\) cannot be read)"):
        stored[9]
    assert stored[0].id == first  # its group was read before


def test_large_groups_need_none(folder, tmp_path):
    """They are read from an Arrow copy, as without it; an index of the files before is taken away."""
    few = rows(LARGE_ROWS + 1, turns=1)
    for file in folder.glob("*.parquet"):
        file.unlink()
    write_rows(folder / "large.parquet", few, row_group=len(few))
    with pytest.raises(UserError, match=f"{INDEX} is of other files"):
        StoredRows(folder)
    with pytest.raises(LargeGroups, match="large.parquet has large row groups"):
        write_index(folder)
    assert not (folder / INDEX).exists()
    assert [row.id for row in StoredRows(folder, tmp_path / "cache")] == [row.id for row in few]


def test_a_file_alone_needs_none(folder):
    (folder / INDEX).write_bytes(b"damaged")
    assert [row.id for row in StoredRows(folder / "b.parquet")] == [str(number) for number in range(9, 20)]
    with pytest.raises(UserError, match="is no folder"):
        write_index(folder / "b.parquet")
