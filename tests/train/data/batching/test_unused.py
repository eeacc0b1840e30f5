"""Rows that a run cannot use: looked at before it starts, counted by source, task and reason, refused where too many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from tests.train.data.toys import MODELS, ToySource, codec_of, maker_of
from tests.train.toys import toy_batch, toy_config, toy_fit, toy_parts
from tests.train.trainer.test_preflight import lacking
from tests.train.trainer.test_preflight import read as read_recipe
from train.data.batching.examples import Unusable
from train.data.batching.loader import ENOUGH, Counts, PackerShard, Pipeline
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.data.rows.parquet import write_rows
from train.data.sources.mixture import Mixture, TaskMixture
from train.trainer.logs import METRICS, UNUSED, read_table
from train.trainer.parts import Parts
from train.trainer.preflight import check_start

MODEL = MODELS["codec2"]


class Unanswered(ToySource):
    """Every so many rows have lost their answers."""

    every = 1

    def row(self, index):
        row = super().row(index)
        lost = {"answer_text": "", "answer_codes": None} if index % self.every == 0 else {}
        return replace(row, turns=tuple(replace(turn, **lost) for turn in row.turns))


def pipeline(every: int, **tasks: float) -> Pipeline:
    source = Unanswered("chats", None, codec_of(MODEL))
    source.every = every
    packing = PackingConfig(rows=2, length=300, buffer=4)
    return Pipeline(Mixture([source], [1.0]), [TaskMixture(tasks)], maker_of(MODEL), packing, broken="skip")


def counted(broken: int, of: int) -> dict[str, Any]:
    """What a shard's state says of its draws."""
    counts = Counts()
    for number in range(of):
        if number < broken:
            counts.leave_out(Unusable(f"row {number}", "no answer_text", "T1A2", "chats"))
        else:
            counts.add("chats", ["T1A2"])
    return {"broken": broken, "counts": counts.plain()}


def broken_parts(broken: int, of: int) -> Parts:
    """Each of the four shards has drawn so many rows."""

    def steps(shards, start, states):
        for step in range(start, 100):
            batches = [toy_batch(shard, step) for shard in shards]
            for batch in batches:
                batch.state.update(counted(broken, of))
            yield batches

    return toy_parts(steps=steps)


def test_a_task_that_no_row_is_for_stops_the_run_with_the_reason(tmp_path: Path):
    """Before, such a source trained its other task alone, and the only trace was a count. No shard alone has drawn enough."""
    shard = PackerShard(pipeline(1, A1T1=0.5, T1A2=0.5), 0, 1)
    for _ in range(3):
        shard.batch()
    assert shard.counts.total("data.sources[0] (chats)", "T1A2") == shard.broken > 0
    config = toy_config(
        tmp_path, data=DataConfig((SourceConfig("spoken-digits"),), broken="skip", broken_limit=0.5, micro_batches=4)
    )
    with pytest.raises(
        UserError, match=r"chats as T1A2: 100 of 100 rows \(100.0%\) left out: no answer_text .* or raise the limit"
    ):
        toy_fit(config, broken_parts(ENOUGH // 4, ENOUGH // 4))
    assert [row["step"] for row in read_table(tmp_path / METRICS)] == [1]
    raised = replace(config, data=replace(config.data, broken_limit=1.0))  # which is what the message says
    assert toy_fit(raised, broken_parts(ENOUGH // 4, ENOUGH // 4))[0].step == 8
    assert [row["step"] for row in read_table(tmp_path / METRICS)] == list(range(1, 9))
    toy_fit(replace(raised, resume="restart"))
    assert not (tmp_path / UNUSED).exists()


@pytest.mark.long
def test_a_run_whose_rows_are_broken_below_the_limit_is_not_stopped_by_chance(tmp_path: Path):
    """Of rows that are broken to 6 % one of many packers has soon left out more than a tenth of its own."""
    config = toy_config(tmp_path)
    assert toy_fit(config, broken_parts(4, 25))[0].step == 8  # 16 of 100
    with pytest.raises(UserError, match=r"4000 of 25000 rows \(16.0%\)"):
        Counts.joined([counted(4, 25)["counts"]] * 1000).check(0.1)
    with pytest.raises(UserError, match="500 examples.*no answer_text.*chats row 0"):
        PackerShard(pipeline(1, T1A2=1.0), 0, 1).batch()


def test_a_row_counts_once_for_its_source_whatever_its_tasks():
    counts = Counts()
    for number in range(200):
        counts.add("chats", ["A1T1", "T1A2", "T1T2"])
        if number < 60:
            counts.leave_out(Unusable(f"row {number}", "the row cannot be read", "", "chats"))
    assert counts.total("chats", "") == 260 and counts.total("chats", "T1A2") == 200
    with pytest.raises(UserError, match=r"60 of 260 rows \(23.1%\)"):
        counts.check(0.1)


@pytest.mark.long
def test_a_share_below_the_limit_is_counted_and_goes_on_with_a_resumed_run():
    shard = PackerShard(pipeline(20, A1T1=0.5, T1A2=0.5), 0, 1)
    batches = [shard.batch() for _ in range(60)]
    counts, source = shard.counts, "data.sources[0] (chats)"
    ((key, (count, first)),) = counts.unused.items()
    assert key == (source, "T1A2", "no answer_text") and count == shard.broken > 3 and len(first) == 3
    assert sum(counts.drawn.values()) == shard.next and 0.02 < count / counts.total(source, "T1A2") < 0.1
    resumed = PackerShard(pipeline(20, A1T1=0.5, T1A2=0.5), 0, 1, state=batches[29].state)
    for batch in batches[30:]:
        assert resumed.batch().state == batch.state
    assert resumed.counts == counts == Counts.joined([counts.plain()])


def test_tasks_that_no_row_of_a_source_is_for_are_lacking_before_the_start(tmp_path: Path):
    source = ToySource("toy", None, codec_of(MODEL))
    bare = [replace(source.row(i), turns=tuple(replace(t, answer_text="") for t in source.row(i).turns)) for i in range(12)]
    write_rows(tmp_path / "rows.parquet", bare)
    sources = '[{"kind": "stored", "path": "%s", "tasks": %s}]'
    place = tmp_path / "rows.parquet"
    config = read_recipe(
        "nano.yaml", "--data.sources", sources % (place, '{"A1T1": 1, "T1A2": 1, "T1T2": 0}'), "--validation.questions", "0"
    )
    (line,) = lacking(config)
    beside = lacking(replace(config, model=replace(config.model, tokenizer="t.json")))
    assert len(beside) == 2 and "tokenizer t.json does not exist" in beside[0] and beside[1] == line
    assert line == (
        f"data.sources.0.tasks: none of 12 rows looked at in {place} has answer_text, which task T1A2 needs: take T1A2 out, or "
        "complete the rows; the encoder alone needs only their sound (objective.align_first 1)"
    )
    write_rows(place, [*bare[:3], *(source.row(i) for i in range(9))])
    assert check_start(config) == [
        f"data.sources.0: 3 of 12 rows looked at in {place} have no answer_text, which task T1A2 needs; with data.broken error "
        "such a row ends the run"
    ]
