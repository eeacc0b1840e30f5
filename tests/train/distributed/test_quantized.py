"""Laws of adapters in two processes (gloo, CPU), on a quantised base and in bf16: adapters are sharded, packed weights whole in
every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import several
from tests.train.distributed.test_fabric import LINES, losses, make_together
from tests.train.toys import adapted_parts, assert_adapters_learn, final_tensors, toy_config, toy_fit, toy_lora
from train.config.sections import FabricConfig, OptimizerConfig

pytestmark = pytest.mark.long
SMALL_STEPS = {"lr": 2.5e-5, "weight_decay": 0.0}
"""As in the Mistral recipes: from 2^-7 on such a step is less than half a unit in the last place of bf16."""
RUNS: dict[str, tuple[Any, str, dict[str, float]]] = {
    "nf4": ("nf4", "32-true", {"lr": 1e-2}),
    "int8": ("int8", "32-true", {"lr": 1e-2}),
    "bf16": (True, "bf16-true", SMALL_STEPS),
    "nf4 in bf16": ("nf4", "bf16-true", SMALL_STEPS),
}
"""The base below the adapters, the run's precision, and its optimizer."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of eight steps: alone, in two processes, and in two that are stopped before the third and go on."""
    top, together = tmp_path_factory.mktemp("adapters"), []
    for name, (base, precision, optimizer) in RUNS.items():
        fabric = FabricConfig("cpu", 1, precision=precision)  # type: ignore[arg-type]
        config = toy_config(
            top / f"{name}-one", lora=toy_lora(base), fabric=fabric, optimizer=OptimizerConfig(**optimizer), **LINES
        )
        toy_fit(config, adapted_parts(toy_lora(base), precision=precision))
        for end, strategy, kill in (
            ("ddp", "ddp", None), ("fsdp", "fsdp", None), ("stopped", "fsdp", ["SIGTERM", 3]), ("stopped", "fsdp", None),
        ):  # fmt: skip
            shared = {"devices": 2, "strategy": strategy, "precision": precision}
            run = {"folder": str(top / f"{name}-{end}"), "fabric": shared, "lora": base, "optimizer": optimizer, "kill": kill}
            together.append(run)
    make_together(together)
    return top


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_learn_what_one_learns(runs: Path, name: str, strategy: str) -> None:
    base, precision, optimizer = RUNS[name]
    close = {"rtol": 1e-4, "atol": 1e-4} if precision == "32-true" else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(losses(runs / f"{name}-{strategy}"), losses(runs / f"{name}-one"), **close)
    ours, theirs = final_tensors(runs / f"{name}-{strategy}"), final_tensors(runs / f"{name}-one")
    assert ours.keys() == theirs.keys()
    assert_adapters_learn(runs / f"{name}-{strategy}", toy_lora(base))
    assert not any(t.dtype in (torch.uint8, torch.int8) for t in ours.values())  # what stands still is not stored
    for key, tensor in theirs.items():
        if precision == "32-true":
            torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-5, msg=key)
        elif key.startswith("model."):  # eight steps of Adam, each about as long as the rate
            assert ((ours[key] - tensor).abs() < optimizer["lr"]).float().mean() > 0.99, key


@pytest.mark.parametrize("name", RUNS)
def test_stopped_they_go_on_bitwise(runs: Path, name: str) -> None:
    stopped, whole = final_tensors(runs / f"{name}-stopped"), final_tensors(runs / f"{name}-fsdp")
    assert stopped.keys() == whole.keys()
    assert all(tensor.equal(stopped[key]) for key, tensor in whole.items())
    assert losses(runs / f"{name}-stopped").shape == (8, 3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_base_that_the_first_process_alone_reads_and_quantises_learns_the_same(tmp_path: Path, strategy: str) -> None:
    """The command itself; the other process begins without values."""
    given = ["--lora.quantize", "nf4", "--lora.trainable", "[projector.*]", "--optimizer.name", "adamw", "--budget.steps", "3"]
    given += ["--budget.minutes", "null", "--data.micro_batches", "2", "--log.every", "1", "--validation.questions", "0"]
    given += ["--model.decoder.layers", "2", "--model.encoder.layers", "1", "--fabric.precision", "32-true"]
    for count, more in ((1, ["--fabric.devices", "1"]), (2, ["--fabric.devices", "2", "--fabric.strategy", strategy])):
        for ended in several(
            count, "train", "fit", "configs/nano-scratch.yaml", "--run_folder", str(tmp_path / str(count)), *given, *more
        ):
            assert ended.code == 0, ended.said
    torch.testing.assert_close(losses(tmp_path / "2"), losses(tmp_path / "1"), rtol=1e-4, atol=1e-4)
