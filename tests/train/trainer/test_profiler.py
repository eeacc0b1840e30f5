"""The profile of some steps: its files, what it says, and that the run goes on as without it."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.toys import toy_config, toy_fit, toy_parts
from train.checkpoint import retention
from train.config.sections import BudgetConfig, LogConfig
from train.trainer.usage import FOLDER

LINES = LogConfig(every=4, progress="lines")


def names_in(file: Path) -> Counter[str]:
    """The names in a trace."""
    with gzip.open(file) as packed:
        return Counter(str(event.get("name")) for event in json.load(packed)["traceEvents"] if event.get("ph") == "X")


def steps_of(file: Path) -> list[int]:
    """The steps in a trace."""
    found = [name.partition("ProfilerStep#") for name in names_in(file)]
    return sorted(int(step) for _, label, step in found if label)


@pytest.mark.long
def test_a_profile_leaves_a_trace_and_a_table_and_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, plain = toy_fit(toy_config(tmp_path / "plain"))
    _, weights = toy_fit(toy_config(tmp_path / "run", log=LINES), profile=range(3, 6))
    for name, tensor in plain.items():
        assert tensor.equal(weights[name]), name
    assert sorted(os.listdir(tmp_path / "run" / FOLDER)) == ["steps-3-5.json.gz", "steps-3-5.txt"]
    assert steps_of(tmp_path / "run" / FOLDER / "steps-3-5.json.gz") == [3, 4, 5]
    title, _, *rows = (tmp_path / "run" / FOLDER / "steps-3-5.txt").read_text().splitlines()
    assert title.startswith("steps 3 to 5 took ") and any("aten::addmm" in row for row in rows)
    traced = names_in(tmp_path / "run" / FOLDER / "steps-3-5.json.gz")
    assert traced["aten::addmm"] == 3 * 4 * 2  # two linears with a bias, four batches
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if line.startswith(f"profile: {title}; ")]
    assert not [line for line in said if "USDT" in line or "ERROR" in line]


@pytest.mark.long
def test_a_range_counts_steps_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def stop(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    config = toy_config(tmp_path, log=LINES, budget=BudgetConfig(steps=9))
    outcome, _ = toy_fit(config, toy_parts(stop), profile=range(3, 8))  # a signal in the middle
    assert outcome.step == 4 and steps_of(tmp_path / FOLDER / "steps-3-4.json.gz") == [3, 4]
    said = capfd.readouterr().err
    assert "profile: steps 3 to 4 took" in said and "this start begins" not in said
    toy_fit(replace(config, budget=BudgetConfig(steps=6), resume="force"), profile=range(3, 6))
    assert steps_of(tmp_path / FOLDER / "steps-5-5.json.gz") == [5]
    assert "this start begins at step 5: only step 5 can be profiled" in capfd.readouterr().err
    toy_fit(replace(config, resume="force"), profile=range(1, 3))
    assert "this start begins at step 7: steps 1 to 2 cannot be profiled" in capfd.readouterr().err
    assert len(os.listdir(tmp_path / FOLDER)) == 4
    retention.restart(tmp_path, set(), again=False)
    assert not (tmp_path / FOLDER).exists()


def test_a_run_that_cannot_write_its_profile_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FOLDER).write_text("a file")
    outcome, _ = toy_fit(toy_config(tmp_path, log=LINES), profile=range(3, 4))
    assert outcome.step == 8 and f"the profile cannot be written to {tmp_path / FOLDER}: " in capfd.readouterr().err
