"""Laws of precision: whatever a run computes in, it learns, and its state is finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from tests.train.data.toys import MODELS, pipeline_of
from tests.train.toys import final_tensors, toy_config, toy_fit
from train.config.sections import BudgetConfig, FabricConfig, OptimizerConfig, ScheduleConfig
from train.data.batching.batch import Batch
from train.data.batching.examples import Alignment
from train.data.batching.loader import StepLoader
from train.data.config import PackingConfig
from train.objective.config import ObjectiveConfig
from train.objective.objective import Objective, targets
from train.trainer.logs import METRICS, read_table
from train.trainer.parts import Parts

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


def real_parts(name: str, ctc: bool) -> Parts:
    """Our own model and objective, which see the same two micro-batches at every step."""
    torch.manual_seed(0)
    alignment, packing = Alignment("letters" if ctc else "none"), PackingConfig(rows=1, length=100, buffer=4)
    config = replace(MODELS[name], ctc=alignment.size)
    pipeline = pipeline_of(config, alignment=alignment, packing=packing)
    objective = Objective(SpeechModel(config), ObjectiveConfig(ctc_weight=0.2 if ctc else 0.0))

    def steps(shards: range, start: int, states: Mapping[str, Any]) -> Iterator[Sequence[Batch]]:
        batches = next(StepLoader(pipeline, 2, shards))
        while True:
            yield batches

    return Parts(objective, steps, targets, objective.model.layout.names, tuple(TASKS), objective.idle)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize(("name", "ctc"), [("codec2", True), ("mini-omni", False)])
@pytest.mark.filterwarnings("ignore:You passed .Fabric.accelerator='cpu', precision='16-mixed'")
def test_a_run_in_half_precision_learns_as_one_in_full(tmp_path: Path, precision: Precision, name: str, ctc: bool) -> None:
    """On the CPU Fabric takes 16-mixed for bf16-mixed."""
    losses = {}
    for kind in ("32-true", precision):
        config = toy_config(
            tmp_path / kind,
            budget=BudgetConfig(steps=8),
            fabric=FabricConfig("cpu", 1, precision=kind),
            optimizer=OptimizerConfig(lr=5e-3),
            schedule=ScheduleConfig("constant"),
            ema=None,
        )
        toy_fit(config, real_parts(name, ctc))
        losses[kind] = [row["loss"] for row in read_table(tmp_path / kind / METRICS)]
        assert all(t.isfinite().all() for t in final_tensors(tmp_path / kind).values())
    full, half = losses["32-true"], losses[precision]
    assert all(map(math.isfinite, half)) and half[-1] < 0.8 * half[0]
    assert half == pytest.approx(full, rel=0.05)
