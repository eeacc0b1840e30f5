"""Tasks that are not there, and losses that are no number: counted, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.tasks import TASKS
from tests.train.balance.toys import balanced_config, balanced_fit, balanced_parts
from tests.train.toys import toy_fit
from train.balance.config import BalanceConfig
from train.checkpoint import retention, state
from train.config.sections import BudgetConfig
from train.distributed.fabric import build_fabric
from train.distributed.process_group import ProcessGroup
from train.objective.objective import TaskLosses, cells_by_task, mean_factors
from train.trainer.logs import BALANCE, METRICS, read_table

SECTIONS = [
    {"method": "uncertainty", "settings": {"lr": 0.1}}, {"method": "stch"}, {"method": "famo"},
    {"method": "gradnorm", "level": "features"}, {"method": "excessmtl", "level": "parameters"}, {"method": "moco"},
]  # fmt: skip


def remembered(folder: Path, config: Any) -> dict[str, Tensor]:
    place = retention.newest(folder / "checkpoints")
    assert place is not None
    fabric = build_fabric(config.fabric)
    found = state.load_balance(place, balanced_parts(config).objective, ProcessGroup(fabric))
    assert found is not None
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s["method"])
def test_an_absent_task_takes_no_part(tmp_path: Path, section: dict[str, Any]) -> None:
    """Data without T1A2 (or A1A2, where a task must be heard): its state is that of the beginning, its absence is counted."""
    gone = "A1A2" if section.get("level") == "features" else "T1A2"
    mix = {"A1T1": 1.0, "A1T2": 1.0, "T1A2": 1.0, "A1A2": 1.0}
    config = balanced_config(tmp_path, BalanceConfig(**section))
    source = replace(config.data.sources[0], tasks=mix)
    config = replace(config, data=replace(config.data, sources=(source,), micro_batches=1))
    balanced_fit(config, balanced_parts(config, tasks={k: v for k, v in mix.items() if k != gone}))
    rows = read_table(tmp_path / BALANCE)
    assert all(row[f"absent/{gone}"] == 1 and row[f"weight/{gone}"] == 0 for row in rows)
    names = [name for name in TASKS if name in mix and (section.get("level") != "features" or name[0] == "A")]
    kept = remembered(tmp_path, config)
    at = names.index(gone)
    assert kept["absences"][at] == 3 and kept["absences"][0] < 3
    untouched = ("second", "steps", "squares", "seen")
    assert not any(t[at].any() for n, t in kept.items() if n.startswith("state/") and n.endswith(untouched))


def poisoned(parts: Any, at: int) -> Any:
    """Parts whose step `at` hears nothing but nan."""
    steps = parts.steps

    def some(*words: Any) -> Iterator[Any]:
        for number, step in enumerate(steps(*words)):
            for batch in step if number == at else ():
                batch.inputs.fill_(torch.nan)
            yield step

    return replace(parts, steps=some)


LOST = [SECTIONS[0], SECTIONS[1], SECTIONS[3], *({"method": m, "level": "parameters"} for m in ("upgrad", "nashmtl", "moco"))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("section", [*LOST, {"method": "forum"}], ids=lambda s: s["method"])
def test_a_step_of_which_no_task_is_a_number_is_left_out_and_forgotten(tmp_path: Path, section: dict[str, Any]) -> None:
    """Clips of nan reach every task that shares a row: weights and state are as if the step had not been."""
    weights, states = [], []
    outers = {"outers": 1} if section["method"] == "forum" else {}
    for steps in (1, 2):
        config = balanced_config(tmp_path / str(steps), BalanceConfig(**section), budget=BudgetConfig(steps=steps))
        source = replace(config.data.sources[0], tasks={"A1T1": 1.0, "A1A2": 1.0})
        config = replace(config, data=replace(config.data, sources=(source,), micro_batches=1), clip=None)
        weights.append(toy_fit(config, poisoned(balanced_parts(config, tasks=source.tasks, **outers), 1))[1])
        states.append(remembered(tmp_path / str(steps), config))
    assert all(t.equal(weights[1][name]) for name, t in weights[0].items())
    assert [row.get("steps_skipped", 0) == 1 for row in read_table(tmp_path / "2" / METRICS)] == [False, True]
    if section in SECTIONS:
        for name, value in states[0].items():
            assert name in ("absences", "last", "taken") or states[1][name].equal(value), name
    else:
        assert all(row[f"absent/{task}"] == 1 for row in read_table(tmp_path / "2" / BALANCE)[1:] for task in source.tasks)


def test_shares_sum_to_the_plain_objective_and_means_to_means() -> None:
    cell = cells_by_task(["A1A2", "T1A2"], list(TASKS), 3)
    counts = torch.tensor([[0.0, 0, 2], [0, 0, 1], [4, 4, 3], [2, 0, 0], [4, 6, 0], [0, 0, 5]])
    sums = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) * counts
    scale = torch.tensor([0.25, 0.5, 1.0]) / counts.sum(0).clamp_min(1)
    plain = TaskLosses(cell, torch.ones(3)).losses(sums, scale)
    torch.testing.assert_close(plain.sum(), (sums * scale).sum())
    mean = TaskLosses(cell, torch.ones(3), mean_factors(cell, counts, 2)).losses(sums, scale)
    names = list(TASKS)
    for i, name in enumerate(("A1A2", "T1A2")):
        row, weights = names.index(name), torch.tensor([0.25, 0.5, 1.0])
        wanted = (weights * sums[row] / counts[row].clamp_min(1)).sum()
        torch.testing.assert_close(mean[i], wanted)
    torch.testing.assert_close(mean[2], plain[2])
