"""What `plan` says of streams, by a clock that the reads themselves advance."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.config.run import FitConfig
from train.config.sections import BudgetConfig, ModelSection
from train.data.config import DataConfig, SourceConfig
from train.data.rows.parquet import write_rows
from train.data.rows.row import Row, RowTurn
from train.data.sources.stream_source import StreamSource
from train.plan.streaming import StreamPace, advise_streams
from train.trainer.initial_model import shape_of


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FitConfig:
    """A digit source and a stream that has a quarter of the draws; a row of it takes 20 ms."""
    write_rows(tmp_path / "a.parquet", [Row((RowTurn(question_text="q", answer_text="a"),))] * 20)
    now, row = [0.0], StreamSource.row

    def slow(self: StreamSource, *place: object) -> Row:
        now[0] += 0.02
        return row(self, *place)  # type: ignore[arg-type]

    monkeypatch.setattr(StreamSource, "row", slow)
    monkeypatch.setattr("train.plan.streaming.time.perf_counter", lambda: now[0])
    stream = SourceConfig("stream", path=str(tmp_path), tasks={"T1T2": 1.0})
    data = DataConfig((SourceConfig("spoken-digits", weight=3.0), stream), workers=2)
    return FitConfig(BudgetConfig(steps=1), model=ModelSection(preset="nano"), data=data)


def test_it_says_whether_a_stream_keeps_up(config: FitConfig) -> None:
    shape, start = (
        shape_of(config.model),
        f"data.sources.1 ({config.data.sources[1].path}): a core reads and encodes 50 rows a second",
    )
    assert advise_streams(config, shape, 380, 1.0, 1) == [f"{start}; the run needs 95, and has 2 data workers: it keeps up"]
    (line,) = advise_streams(config, shape, 1960, 1.0, 2)
    assert line == (
        f"{start}; the run needs 490, and has 4 data workers: it DOES NOT KEEP UP; run `omni-train data prepare` once and "
        "train on its rows, or set data.workers to 5 where there are as many cores for each process"
    )
    (line,) = advise_streams(config, shape, 400, None, 1)
    assert line == f"{start}; whether that keeps up is unknown: give --try, or --gpu NAME"


def test_it_says_nothing_of_streams_that_cannot_be_read(config: FitConfig) -> None:
    Path(str(config.data.sources[1].path), "a.parquet").unlink()
    assert advise_streams(config, shape_of(config.model), 400, 1.0, 1) == []


def test_one_worker_is_one() -> None:
    assert "has 1 data worker: it keeps up" in StreamPace(5.0, 5.0, 1).line("x", 1)
