"""Counts by source in the log and at the end of a run, and runs whose sources end before their budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.toys import ToyBatch, toy_config, toy_export, toy_fit, toy_parts, toy_steps
from train.config.sections import BudgetConfig, LogConfig
from train.data.sources.mixture import UsedUp
from train.trainer.logs import METRICS, read_table


def ending_steps(shards: Sequence[int], start: int, states: Mapping[str, Any]) -> Iterator[list[ToyBatch]]:
    """Batches of two sources, which end after five steps."""
    for step in toy_steps(shards, start, states):
        if step[0].state["next"] > 5:
            raise UsedUp("no more")
        for batch in step:
            number, shard = batch.state["next"], batch.state["packer_shard"]
            names = [f"data.sources[{i}] (rows{i})" for i in range(2)]
            batch.state["counts"] = {"trained": [[names[1], number, 1500 * number, shard * number], [names[0], 1, 250, 9]]}
        yield step


def test_a_run_whose_sources_end_is_finished_and_says_what_it_has_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy_config(tmp_path / "whole", log=LogConfig(every=3, progress="lines"))
    parts = toy_parts(steps=ending_steps, export=toy_export(str(tmp_path / "model"), False))
    outcome, _ = toy_fit(config, parts)
    assert (outcome.step, outcome.signal, outcome.model) == (5, 0, tmp_path / "model")
    said = capsys.readouterr().err
    assert "after step 5: data.sources have given all rows that max_epochs and max_rows allow" in said
    assert "trained     data.sources[0] (rows0): 4 rows, 1s of sound, 36 tokens (54.5 %)" in said
    assert "data.sources[1] (rows1): 20 rows, 30s of sound, 30 tokens (45.5 %)" in said
    rows = read_table(tmp_path / "whole" / METRICS)
    assert [(row["step"], row["rows/source1"], row["seconds/source1"], row["tokens/source1"]) for row in rows] == [
        (3, 12, 18, 18), (5, 20, 30, 30)
    ]  # fmt: skip
    assert {row["rows/source0"] for row in rows} == {4} and {row["seconds/source0"] for row in rows} == {1}

    short = replace(config, run_folder=str(tmp_path / "parts"), budget=BudgetConfig(steps=2))
    toy_fit(short, parts)
    again, _ = toy_fit(replace(short, budget=config.budget, resume="force"), parts)
    assert again.step == 5 and read_table(tmp_path / "parts" / METRICS)[-1]["rows/source1"] == 20
    assert toy_fit(replace(short, budget=config.budget, resume="force"), parts)[0].step == 5  # nothing is left, it ends again
