"""What `plan` says of the order in which rows are read, by a clock that the reads themselves advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train.data.config import DataConfig, SourceConfig
from train.data.rows.parquet import KeptGroup, StoredRows, write_rows
from train.data.rows.row import Row, RowTurn
from train.plan import reading
from train.plan.reading import ReadingTimes, advise


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Milliseconds: what opening a group takes, what a row of an open group takes, and the time that has passed."""
    times = [30.0, 1.0, 0.0]
    item, read = StoredRows.__getitem__, StoredRows.read

    def alone(self: StoredRows, index: int) -> Row:
        times[2] += times[0] + times[1]
        return item(self, index)

    def grouped(self: StoredRows, index: int, kept: list[KeptGroup]) -> Row:
        times[2] += times[0] * (not kept) + times[1]
        return read(self, index, kept)

    monkeypatch.setattr(StoredRows, "__getitem__", alone)
    monkeypatch.setattr(StoredRows, "read", grouped)
    monkeypatch.setattr("train.plan.reading.time.perf_counter", lambda: times[2] / 1000)
    return times


def data(tmp_path: Path, order: Any = "random", rows: int = 40) -> DataConfig:
    made = [Row((RowTurn(question_text=f"what is {i}", answer_text="a number"),), id=str(i)) for i in range(rows)]
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.parquet", made, 10)
    return DataConfig(
        (SourceConfig("spoken-digits"), SourceConfig("stored", tasks={"T1T2": 1.0}, path=str(tmp_path), order=order))
    )


def test_it_advises_whole_groups_where_opening_them_takes_long(tmp_path: Path, clock: list[float]) -> None:
    (line,) = advise(data(tmp_path))
    assert line == (
        f"data.sources.1 ({tmp_path}): a row is read in 31 ms alone, in 4 ms with its row group of 10: order sequential is "
        "advised (random is set), since whole groups spare 27 ms a row"
    )
    assert 1900 < clock[2] < 2200  # two seconds, and what was begun
    (line,) = advise(data(tmp_path, "sequential"))
    assert "order sequential is advised (as it is set)" in line


def test_it_advises_single_rows_where_they_are_quick_or_groups_are_no_quicker(tmp_path: Path, clock: list[float]) -> None:
    clock[:2] = 0.5, 0.2
    (line,) = advise(data(tmp_path, "sequential"))
    assert "order random is advised (sequential is set), since rows are read quicker than their examples are made" in line
    assert ReadingTimes(31, 20, 1).advised == "random"
    assert "whole groups would not be much quicker" in ReadingTimes(31, 20, 1).line("x", "random")


def test_it_says_nothing_of_data_that_cannot_be_read_or_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = data(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert advise(found) == []
    for file in tmp_path.iterdir():
        file.unlink()
    assert advise(found) == []
    rows = [Row((RowTurn(question_text="q", answer_text="a"),))] * 100
    write_rows(tmp_path / "large.parquet", rows, 100)
    monkeypatch.setattr(reading, "StoredRows", lambda path, cache, needed: StoredRows(path, tmp_path / "cache", needed))
    assert advise(found) == []
