"""The loader over stored rows: exact over epochs and shards (law 9), and past what is damaged."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from omni.errors import UserError
from tests.train.data.batching.test_loader import check_resumes, plainly_stored, same_steps, take
from tests.train.data.toys import MODELS, TASKS, maker_of, report, write_shards
from train.data.batching.loader import Pipeline, StepLoader
from train.data.config import PackingConfig
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Row
from train.data.sources.mixture import Mixture, TaskMixture

MODEL = MODELS["codec2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the report that `data prepare` would write of them."""
    folder = write_shards(tmp_path_factory.mktemp("rows"))
    report(folder)
    return folder


class Unread(StoredRows):
    """Remembers which rows were asked for; those of `lost` cannot be read."""

    def __init__(self, folder: Path, lost: tuple[int, ...] = ()) -> None:
        super().__init__(folder)
        self.lost = lost
        self.asked: list[int] = []

    def row(self, index: int) -> Row:
        self.asked.append(index)
        if index in self.lost:
            raise UserError(f"row {index} is lost")
        return super().row(index)


def pipeline(source: StoredRows, broken: str = "error") -> Pipeline:
    """A source that is gone through in epochs."""
    packing = PackingConfig(rows=2, length=160, buffer=6)
    return Pipeline(Mixture([source], [1.0]), [TaskMixture(TASKS)], maker_of(MODEL), packing, 3, broken=broken)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_in_any_epoch_stored_rows_go_on_as_if_nothing_had_stopped(folder, workers):
    steps, stops = 6, range(1, 6) if not workers else (2, 5)
    source = Unread(folder)
    take(StepLoader(pipeline(source), 2), steps)
    assert min(source.asked.count(row) for row in range(source.size)) >= 3  # so that a stop stands in the midst of an epoch
    check_resumes(lambda **state: StepLoader(pipeline(StoredRows(folder)), 2, workers=workers, **state), steps, stops)


def damage(file: Path, group: int) -> None:
    """Turn bits in the texts of a row group."""
    column = pq.read_metadata(file).row_group(group).column(2)
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_damaged_page_are_named_or_skipped_and_counted(folder, tmp_path, workers):
    """Batches, and states over a stop, are those of whole files of which nobody gives these rows."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path / "rows-00001.parquet", 1)
    lost = (8, 9, 10)
    with pytest.raises(UserError, match=r"rows-00001.parquet \(rows 3 to 5\) cannot be read .*prepare it again"):
        take(StepLoader(pipeline(StoredRows(tmp_path)), 1, workers=workers), 10)

    wanted = take(StepLoader(pipeline(Unread(folder, lost), "skip"), 2, workers=workers), 4)
    begun = StepLoader(pipeline(StoredRows(tmp_path), "skip"), 2, workers=workers)
    found = [next(begun) for _ in range(2)]
    states = plainly_stored(begun.states)
    begun.close()
    resumed = StepLoader(pipeline(StoredRows(tmp_path), "skip"), 2, workers=workers, start_step=2, states=states)
    found += [next(resumed) for _ in range(2)]
    resumed.close()
    for batch in (batch for step in (*found, *wanted) for batch in step):
        batch.state = {key: value for key, value in batch.state.items() if key != "counts"}  # they name the two folders
    same_steps(found, wanted)
    mixture = pipeline(StoredRows(folder)).mixture
    for state in resumed.states.values():
        first, stride = (
            state["packer_shard"] + state["packer_shards"] * state["packer_part"],
            state["packer_shards"] * state["packer_parts"],
        )
        drawn = [mixture.draw(number).index for number in range(first, state["next"], stride)]
        assert state["broken"] == sum(index in lost for index in drawn) > 0
        batches = [batch for step in found for batch in step if batch.state["packer_shard"] == state["packer_shard"]]
        taken = sum(batch.examples for batch in batches if batch.state["packer_part"] == state["packer_part"])
        assert taken + len(state["buffer"]) + state["broken"] == len(drawn)


def batches(path: str | Path, workers: int = 0) -> list[Any]:
    source = StoredRows(path)
    source.name = "rows"  # which is the path, and in a batch's counts
    sources = Mixture([source], [1.0], 3)
    pipeline = Pipeline(sources, [TaskMixture(TASKS)], maker_of(MODEL), PackingConfig(2, 128, 4), 3)
    return take(StepLoader(pipeline, 2, range(2), workers, 0, {}), 3)


def test_batches_of_a_bucket_are_those_of_the_folder(bucket: Any, folder: Path) -> None:
    address = bucket.put_all(folder, "rows")
    assert len(StoredRows(address)) == 16
    bucket.server.errors, bucket.server.cuts = 0.05, 0.05
    wanted = batches(folder)
    same_steps(batches(address), wanted)
    same_steps(batches(address, workers=1), wanted)


def test_no_file_is_opened_before_it_is_needed(bucket: Any, folder: Path) -> None:
    address = bucket.put_all(folder, "rows")
    bucket.server.seen.clear()
    rows = StoredRows(address)
    assert bucket.server.seen == {"LIST": 1, "GET": 2}  # the report, and the first file's schema
    assert rows[6].id == StoredRows(folder)[6].id
    assert bucket.server.seen == {"LIST": 1, "GET": 3}
    StoredRows(address)
    assert bucket.server.seen["LIST"] == 1 and bucket.server.seen["GET"] == 4  # the report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("report", [None, "{", '{"shards": [{"file": "rows-00000.parquet", "rows": 5, "bytes": 1}]}'])
def test_without_a_report_that_fits_files_are_looked_at(bucket: Any, folder: Path, report: str | None) -> None:
    address = bucket.put_all(folder, "rows")
    if report is None:
        bucket.s3.delete_object(Bucket=bucket.name, Key="rows/report.json")
    else:
        bucket.put("rows/report.json", report.encode())
    rows, same = StoredRows(address), StoredRows(folder)
    assert [row.id for row in rows] == [row.id for row in same]
    assert rows.where(6) == f"{address}/rows-00001.parquet row 1"


def test_rows_are_read_in_pieces_from_where_they_are(bucket: Any, folder: Path) -> None:
    address = bucket.put_all(folder, "rows")
    bucket.server.seen.clear()
    source = StoredRows(address, window=2)
    assert bucket.server.seen == {"LIST": 1, "GET": 2} and source.size == 16
    rows, same = pickle.loads(pickle.dumps(source)), StoredRows(folder)
    assert [row.id for row in rows] == [row.id for row in same] and rows.where(6) == f"{address}/rows-00001.parquet row 1"
    assert source.windows is not None
    sources = Mixture([source], [1.0], 3, windows={0: source.windows})
    drawn = [source.row(draw.index, draw.source_draw).where for draw in map(sources.draw, range(16))]
    assert sorted(drawn) == sorted(map(rows.where, range(16))) != drawn
