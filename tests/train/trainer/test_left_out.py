"""Steps that are left out on the screen, what a run that diverges advises, and weights that are not finite at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from omni.checkpoint.tensors import save_tensors
from omni.convert.lazy import lazies_of
from omni.errors import UserError
from tests.train.toys import toy_config, toy_fit, toy_parts
from tests.train.trainer.test_fit import Bad
from train.config.sections import BudgetConfig, FabricConfig, LogConfig, OptimizerConfig


def test_steps_left_out_are_said_at_the_first_and_then_seldom(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = toy_config(tmp_path, budget=BudgetConfig(steps=16), log=LogConfig(every=5, progress="lines"))
    toy_fit(config, replace(toy_parts(), objective=Bad((2, *range(5, 13)))))
    told = [line for line in capfd.readouterr().err.splitlines() if "left out" in line]
    assert told == [
        "step 3: left out, because its gradients are not finite; 10 one after another end the run",
        "step 6: left out, because its gradients are not finite (2 steps so far); 10 one after another end the run",
        "step 8: left out, because its gradients are not finite (4 steps so far); 10 one after another end the run",
        "step 12: left out, because its gradients are not finite (8 steps so far); 10 one after another end the run",
    ]


@pytest.mark.parametrize(
    ("rule", "clip", "precision", "advice"),
    [
        ("muon", None, "32-true", "try a lower optimizer.lr and optimizer.muon_lr or clip 1.0"),
        ("adamw", 1.0, "bf16-true", "try a lower optimizer.lr or fabric.precision bf16-mixed"),
        ("adamw", 0.5, "bf16-mixed", "try a lower optimizer.lr"),
    ],
)
def test_a_run_that_diverges_is_advised_by_what_it_has(
    tmp_path: Path, rule: str, clip: float | None, precision: str, advice: str
) -> None:
    fabric, optimizer = FabricConfig("cpu", 1, precision=precision), OptimizerConfig(name=rule)  # type: ignore[arg-type]
    config = toy_config(tmp_path, budget=BudgetConfig(steps=12), fabric=fabric, optimizer=optimizer, clip=clip)
    with pytest.raises(UserError) as error:
        toy_fit(config, replace(toy_parts(), objective=Bad(range(12))))
    assert str(error.value).endswith(f"; {advice}")


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    def export(weights: Mapping[str, Tensor]) -> Path:
        weights = {name: tensor.clone() for name, tensor in weights.items()}
        weights["text_head.weight"][1, 2] = math.inf
        save_tensors(lazies_of(weights), tmp_path / "out.safetensors", only_finite=True)
        return tmp_path

    with pytest.raises(UserError) as error:
        toy_fit(toy_config(tmp_path), toy_parts(export=export))
    said = "the model is not exported: tensor text_head.weight holds numbers that are not finite, after checkpoint "
    assert str(error.value).startswith(f"{said}{tmp_path}/checkpoints/step-00000008; there is no earlier one")
