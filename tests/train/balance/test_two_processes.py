"""Two gloo processes balance and learn what one does, replicated or sharded; and what half precision and adapters change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.errors import UserError
from tests.close import assert_near
from tests.processes import two
from tests.train.balance.toys import MIX, balanced_config, balanced_fit, balanced_parts
from tests.train.toys import final_tensors
from train.balance.config import BalanceConfig
from train.config.sections import BudgetConfig, CheckpointConfig, FabricConfig, LogConfig, LoRASection
from train.data.config import DataConfig, SourceConfig
from train.trainer.logs import BALANCE, read_table

pytestmark = pytest.mark.long

RUNS: dict[str, dict[str, Any]] = {
    "uncertainty": {"method": "uncertainty", "settings": {"lr": 0.1}},
    "famo": {"method": "famo", "settings": {"lr": 0.5}},
    "famo, look same": {"method": "famo", "settings": {"lr": 0.5, "look": "same"}},
    "features": {"method": "mgda", "level": "features"},
    "parameters": {"method": "upgrad", "level": "parameters"},
    "own": {"method": "nashmtl", "level": "parameters", "own": "weighted"},
    **{
        f"{method} {level}": {"method": method, "level": level}
        for level, methods in (
            ("features", ("graddrop", "excessmtl")),
            ("parameters", ("mgda", "pcgrad", "gradvac", "cagrad", "imtlg", "alignedmtl", "fairgrad", "excessmtl", "gradnorm")),
        )
        for method in methods
    },
    "dbmtl": {"method": "dbmtl"},
    "remembered": {"method": "moco"},
    "bilevel": {"method": "forum", "settings": {"inner_lr": 0.01}},
    "bilevel ahead": {"method": "autolambda", "settings": {"lr": 0.1}},
    "bilevel rows": {"method": "moml", "settings": {"lr": 0.1, "inner_lr": 0.01}},
    "mean": {"method": "stch", "settings": {"warmup": 1}, "losses": "mean"},
    "dwa": {"method": "dwa", "settings": {"window": 1}},
    "random": {"method": "random"},
    "geometric": {"method": "geometric"},
    "sdmgrad": {"method": "sdmgrad", "settings": {"lr": 0.5}},
    "modo": {"method": "modo", "settings": {"gamma": 0.1}},
}
THREE = ("sdmgrad", "modo")
"""Methods that take three batches a step in each process."""
STRATEGIES = ("ddp", "fsdp")
LINES = {"log": LogConfig(every=1, progress="off")}
OPTIONS: dict[str, Any] = {"ctc": True, "outers": 1}


def run_of(top: Path, name: str, strategy: str) -> dict[str, Any]:
    """Three steps in two processes."""
    fabric, micro = {"devices": 2, "strategy": strategy}, 6 if name in THREE else 2
    return {"folder": str(top / strategy / name), "balance": RUNS[name], "fabric": fabric, "micro": micro, **OPTIONS}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in two processes; those that remember gradients also stopped after two steps and gone on with."""
    top = tmp_path_factory.mktemp("together")
    runs = [run_of(top, name, strategy) for name in RUNS for strategy in STRATEGIES]
    for strategy in STRATEGIES:
        halted = {**run_of(top, "remembered", strategy), "folder": str(top / strategy / "halted")}
        runs += [{**halted, "steps": 2}, {**halted, "resume": "force"}]
    for ended in two("tests.train.balance.toys", json.dumps({"runs": runs}), seconds=900):
        assert ended.code == 0, ended.said[-3000:]
    return top


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(tmp_path: Path, together: Path, name: str, strategy: str) -> None:
    """The one process has both's micro-batches as one: at level features it must see all rows at once, as the two do."""
    count = 3 if name in THREE else 1
    data = DataConfig(sources=(SourceConfig("spoken-digits", tasks=dict(MIX)),), micro_batches=count)
    config = balanced_config(tmp_path, BalanceConfig(**RUNS[name]), True, data=data, **LINES)
    balanced_fit(config, balanced_parts(config, join=2, outers=1))
    ours, wanted = read_table(together / strategy / name / BALANCE), read_table(tmp_path / BALANCE)
    for a, b in zip(ours, wanted, strict=True):
        assert a.keys() == b.keys()
        for key, value in b.items():
            assert a[key] == pytest.approx(value, rel=2e-3, abs=2e-3, nan_ok=True), (key, a["step"])
    start = {f"model.{n}": t for n, t in balanced_parts(config).objective.state_dict().items()}
    assert_near(moved(final_tensors(together / strategy / name), start), moved(final_tensors(tmp_path), start), 0.02)


def moved(tensors: dict[str, Tensor], start: dict[str, Tensor]) -> Tensor:
    return torch.cat([(tensors[name] - t).flatten() for name, t in start.items()])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_remembered_come_back(together: Path, strategy: str) -> None:
    ours, wanted = (final_tensors(together / strategy / name) for name in ("halted", "remembered"))
    assert all(t.equal(wanted[name]) for name, t in ours.items())
    for name in ("halted", "remembered"):
        states = sorted((together / strategy / name / "checkpoints" / "step-00000003").glob("balance-*"))
        assert len(states) == (2 if strategy == "fsdp" else 1)


def test_sharded_memory_asks_for_as_many_processes(together: Path) -> None:
    config = balanced_config(together / "fsdp" / "remembered", BalanceConfig("moco"), True, budget=BudgetConfig(steps=4))
    config = replace(config, resume="force")
    with pytest.raises(UserError, match="sharded over 2 process"):
        balanced_fit(config)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "section", [{"method": "dwa"}, {"method": "stch"}, {"method": "mgda", "level": "features"}, {"method": "upgrad"}]
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_is_near(tmp_path: Path, section: dict[str, Any], precision: Any) -> None:
    tables = []
    for kind in ("32-true", precision):
        config = balanced_config(
            tmp_path / kind, BalanceConfig(**section), True, fabric=FabricConfig("cpu", 1, precision=kind), **LINES
        )
        weights = balanced_fit(config)
        assert all(t.isfinite().all() for t in weights.values())
        tables.append(read_table(tmp_path / kind / BALANCE)[0])
    for key, value in tables[0].items():
        assert tables[1][key] == pytest.approx(value, rel=0.1, abs=0.05, nan_ok=True), key


@pytest.mark.parametrize("section", [{"method": "famo"}, {"method": "cagrad", "level": "features"}, {"method": "mgda"}])
def test_adapters_learn_balanced(tmp_path: Path, section: dict[str, Any]) -> None:
    """Only what is trained is combined, and the rest stays as it was."""
    lora = LoRASection(targets=("decoder.blocks.*", "encoder.*"), rank=2)
    config = balanced_config(tmp_path, BalanceConfig(**section), lora=lora)
    before = {n: t.clone() for n, t in balanced_parts(config).objective.state_dict().items()}
    for name, value in balanced_fit(config).items():
        changed = not value.equal(before[name.removeprefix("model.")])
        assert changed == (".lora." in name), name


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dwa", {"window": 1}), ("random", {}), ("stch", {}), ("famo", {}), ("famo", {"look": "same"}), ("gradnorm", {}),
        ("excessmtl", {}), ("moco", {}), ("gradvac", {}), ("moml", {}),
    ],
)  # fmt: skip
def test_resumed_it_is_the_undisturbed_run(tmp_path: Path, method: str, settings: dict[str, Any]) -> None:
    """Weights, the state of the method, and the rows of the table, bit for bit, although a row is of three steps."""
    config = balanced_config(
        tmp_path / "whole", BalanceConfig(method, settings=settings), budget=BudgetConfig(steps=5),
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep_last=9), log=LogConfig(every=3, progress="off"),
    )  # fmt: skip
    config = replace(config, data=replace(config.data, micro_batches=1))
    whole = balanced_fit(config)
    first = replace(config, run_folder=str(tmp_path / "parts"), budget=BudgetConfig(steps=2))
    balanced_fit(first)
    parts = balanced_fit(replace(first, budget=config.budget, resume="force"))
    assert all(t.equal(parts[name]) for name, t in whole.items())
    folders = (tmp_path / "whole", tmp_path / "parts")
    files = [(folder / "checkpoints/step-00000005/balance-0.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[1]
    ours, wanted = (read_table(folder / BALANCE) for folder in folders)
    last = [{k: v for k, v in rows[-1].items() if v == v} for rows in (ours, wanted)]
    assert last[0] == last[1]
