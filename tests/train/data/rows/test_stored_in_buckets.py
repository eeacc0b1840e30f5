"""Rows of a bucket are those of the folder (law 16): read by ranges, no file before it is needed, and told by their address."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.train.data.batching.test_loader import same_steps, take
from tests.train.data.toys import MODELS, TASKS, maker_of, report, write_shards
from train.data.batching.loader import Pipeline, StepLoader
from train.data.config import PackingConfig
from train.data.rows.parquet import StoredRows
from train.data.sources.mixture import Mixture, TaskMixture

MODEL = MODELS["codec2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the report that `data prepare` would write of them."""
    folder = write_shards(tmp_path_factory.mktemp("rows"))
    report(folder)
    return folder


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
