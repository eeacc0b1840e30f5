"""Laws of free-running validation in a run: it leaves no trace in the weights, copies none that serve as they are, and answers
as a copy of the model does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from tests.train.toys import final_tensors
from train.config.run import FitConfig
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    LogConfig,
    LoRASection,
    ModelSection,
    ValidationConfig,
)
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.data.rows.parquet import write_rows
from train.data.rows.row import Row, RowTurn, Sound
from train.trainer import validation
from train.trainer.build import fit

SMALL = {
    "decoder": {"layers": 2, "width": 64, "heads": 2, "mlp_width": 128, "context": 128},
    "encoder": {"layers": 1, "width": 64, "heads": 2},
}


def run(folder: Path, every: int | None = 2, **changes: Any) -> FitConfig:
    rows = folder.parent / "rows.parquet"
    if not rows.exists():
        generator = torch.Generator().manual_seed(0)
        sounds = [Sound(0.1 * torch.randn(8000 + 1600 * i, generator=generator), 16000) for i in range(6)]
        turns = [RowTurn(f"question {i}", sound, f"answer {i}") for i, sound in enumerate(sounds)]
        write_rows(rows, [Row((turn,)) for turn in turns])
    source = SourceConfig(kind="stored", path=str(rows), held_out=2, tasks={"A1T1": 1.0, "T1T2": 1.0})
    base = FitConfig(
        budget=BudgetConfig(steps=4),
        run_folder=str(folder),
        model=ModelSection(preset="nano", **SMALL),  # type: ignore[arg-type]
        data=DataConfig((source,), workers=0, packing=PackingConfig(rows=2, length=96, buffer=2)),
        fabric=FabricConfig(accelerator="cpu", devices=1),
        checkpoint=CheckpointConfig(every_minutes=None, keep_best=0),
        validation=ValidationConfig(every_steps=every, questions=64 if every else 0, tasks=("A1T1", "T1T2"), max_seconds=0.4),
        log=LogConfig(progress="off"),
        ema=0.9,
    )
    return replace(base, **changes)


def outcome_of(config: FitConfig) -> dict[str, float]:
    outcome = fit(config)
    assert outcome is not None
    return outcome.figures


CASES: dict[str, dict[str, Any]] = {
    "average": {},
    "weights": {"ema": None},
    "adapters": {"lora": LoRASection(rank=2, dropout=0.5)},
    "bf16-true": {"fabric": FabricConfig(accelerator="cpu", devices=1, precision="bf16-true")},
    "guard": {"guard": True, "fabric": FabricConfig(accelerator="cpu", devices=1, checkpointing=True)},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_same_to_the_bit_and_figures_those_of_a_copy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, average, optimizer's state, and the answers."""
    live = outcome_of(run(tmp_path / "live", **CASES[case]))
    fit(run(tmp_path / "plain", every=None, **CASES[case]))
    real = validation.Validator.__call__

    def on_a_copy(self: Any, weights: dict[str, Tensor], step: int) -> dict[str, float]:
        return real(self, {name: t.clone() for name, t in weights.items()}, step)

    monkeypatch.setattr(validation.Validator, "__call__", on_a_copy)
    copied = outcome_of(run(tmp_path / "copied", **CASES[case]))
    assert live == copied and {"exact_match", "loss"} <= live.keys()
    for step in (2, 4):
        file = f"validation/step-{step:08d}.jsonl"
        assert (tmp_path / "live" / file).read_text() == (tmp_path / "copied" / file).read_text()
    found, plain = final_tensors(tmp_path / "live"), final_tensors(tmp_path / "plain")
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        assert tensor.equal(found[name]), name


@pytest.mark.long
@pytest.mark.parametrize("ema", [None, 0.9])
def test_weights_that_serve_are_not_copied(ema: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live: set[int] = set()
    asked: list[set[int]] = []
    measured = validation.held_out_loss

    def spy(module: Any, objective: Any, *rest: Any) -> dict[str, float]:
        average = rest[4]
        tensors = [*objective.state_dict().values(), *(average.values.values() if average else ())]
        live.update(t.data_ptr() for t in tensors)
        return measured(module, objective, *rest)

    def answer(lm: SpeechLM, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(lm.model, SpeechModel) and not lm.model.training
        asked.append({p.data_ptr() for p in lm.model.parameters()})
        return evaluate(lm, *args, **kwargs)

    evaluate = validation.evaluate
    monkeypatch.setattr(validation, "held_out_loss", spy)
    monkeypatch.setattr(validation, "evaluate", answer)
    fit(run(tmp_path / "run", ema=ema))
    assert len(asked) == 2 and all(found <= live for found in asked)
