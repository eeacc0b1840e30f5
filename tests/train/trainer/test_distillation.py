"""An encoder distilled by a run: on recordings alone, from the weights it started from, also after it was stopped."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch

from omni.checkpoint.folder import load_folder, save_folder
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.layout import Layout
from omni.lora.peft import load_adapter
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.train.toys import final_tensors
from train.cli import main
from train.commands.dry_run import Workbench, describe_run
from train.config.run import FitConfig
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    LogConfig,
    LoRASection,
    ModelSection,
    OptimizerConfig,
    ScheduleConfig,
    ValidationConfig,
)
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.distributed.fabric import build_fabric
from train.objective.config import ObjectiveConfig
from train.trainer.build import build_parts, fit
from train.trainer.initial_model import build_initial, shape_of
from train.trainer.logs import METRICS, read_table
from train.trainer.parts import Callback, Outcome
from train.trainer.preflight import check_start

SMALL = ModelConfig(
    Layout.build([16, 16], 256, specials=8),
    WhisperConfig(n_mels=80, width=16, heads=2, layers=1, window_seconds=2.0),
    ProjectorConfig("linear"),
    DecoderConfig(width=32, layers=1, heads=2, kv_heads=1, mlp_width=32),
    codec="snac",  # without weights: nothing is spoken
)
CHUNKS = {"mode": "chunked", "chunk_ms": 80, "train_chunk_ms": [40, 320]}
LORA = LoRASection(targets=("encoder.*",), rank=2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a folder of recordings without texts."""
    place, dice = tmp_path_factory.mktemp("recordings"), torch.Generator().manual_seed(0)
    for number in range(12):
        samples = 0.1 * torch.randn(4000 + 1500 * number, generator=dice)
        (place / "sounds" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        soundfile.write(place / "sounds" / str(number % 2) / f"{number}.wav", samples.numpy(), 16_000)
    assert main(["data", "prepare", str(place / "sounds"), str(place / "rows"), "--workers", "1"]) == 0
    return place / "rows"


def save_base(place: Path, mode: str = "variable", seed: int = 0) -> str:
    torch.manual_seed(seed)
    config = replace(SMALL, encoder=replace(SMALL.encoder, mode=mode))
    save_folder(place, config, SpeechModel(config).state_dict(), Tokenizer.bytes())
    return str(place)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(tmp_path_factory.mktemp("models") / "base")


def run_of(folder: Path, base: str, rows: Path, lora: LoRASection | None = None, **changes: object) -> FitConfig:
    source = SourceConfig(kind="stored", path=str(rows), held_out=2, tasks={"A1T1": 1.0})
    given: dict[str, object] = {
        "budget": BudgetConfig(steps=4),
        "model": ModelSection(init_from=base, encoder=CHUNKS),
        "data": DataConfig(sources=(source,), packing=PackingConfig(rows=1, length=128, buffer=2), workers=0),
        "run_folder": str(folder),
        "trainable": ("*",) if lora is not None else ("encoder.*",),
        "lora": lora,
        "fabric": FabricConfig(accelerator="cpu", devices=1),
        "objective": ObjectiveConfig(distill_weight=1.0, align_first=1.0),
        "optimizer": OptimizerConfig(lr=1e-2),
        "schedule": ScheduleConfig("constant"),
        "validation": ValidationConfig(every_steps=2, questions=2, tasks=()),
        "checkpoint": CheckpointConfig(every_minutes=None, metric="loss/distill"),
        "log": LogConfig(every=1, progress="off"),
    }
    return FitConfig(**{**given, **changes})  # type: ignore[arg-type]


class StopAfter(Callback):
    """Stops the run as Ctrl-C would, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int, figures: object) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def made(config: FitConfig, *callbacks: Callback) -> Outcome:
    outcome = fit(config, callbacks)
    assert outcome is not None
    return outcome


def test_recordings_alone_change_the_encoder_alone(tmp_path: Path, base: str, rows: Path) -> None:
    outcome = made(run_of(tmp_path, base, rows, ema=0.5))
    assert outcome.model is not None and set(outcome.figures) == {"loss/distill"}
    before, after = load_folder(base).model, load_folder(outcome.model).model
    assert after.config.encoder.streams and after.state_dict().keys() == before.state_dict().keys()
    moved = {name for name, t in after.state_dict().items() if not t.equal(before.state_dict()[name])}
    assert moved and all(name.startswith("encoder.") for name in moved)
    stored = final_tensors(tmp_path)
    assert not any("teacher" in name for name in stored)
    assert {name for name in stored if name.startswith("average.")} == {
        f"average.model.{name}" for name, _ in before.named_parameters() if name.startswith("encoder.")
    }
    table = read_table(tmp_path / METRICS)
    assert all(row["loss"] == pytest.approx(row["loss/distill"], rel=1e-5) and row["loss"] > 0 for row in table)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_stopped_and_resumed_it_ends_bitwise_where_an_undisturbed_one_ends(
    tmp_path: Path, base: str, rows: Path, lora: LoRASection | None
) -> None:
    made(run_of(tmp_path / "whole", base, rows, lora))
    assert made(run_of(tmp_path / "stopped", base, rows, lora), StopAfter(2)).signal
    again = made(run_of(tmp_path / "stopped", base, rows, lora))
    whole, resumed = final_tensors(tmp_path / "whole"), final_tensors(tmp_path / "stopped")
    assert again.step == 4 and whole.keys() == resumed.keys()
    assert all(t.equal(resumed[name]) for name, t in whole.items())
    losses = [[row["loss/distill"] for row in read_table(tmp_path / name / METRICS)] for name in ("whole", "stopped")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert again.model is not None and load_folder(again.model).config.encoder.streams
    if lora is not None:
        pairs = load_adapter(tmp_path / "stopped" / "adapter").pairs
        assert pairs and all(name.startswith("encoder.") for name in pairs)


def test_another_teacher_is_refused_at_a_resume(tmp_path: Path, base: str, rows: Path) -> None:
    made(run_of(tmp_path / "run", base, rows), StopAfter(2))
    other = save_base(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="the checksum of the encoder that is the teacher"):
        made(run_of(tmp_path / "run", other, rows))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["variable", "padded", "chunked"])
@pytest.mark.parametrize("lora", [None, LORA, replace(LORA, trainable=("encoder.whisper.conv*",))])
def test_the_teacher_hears_as_its_folder_does(tmp_path: Path, rows: Path, mode: str, lora: LoRASection | None) -> None:
    config = run_of(tmp_path / "run", save_base(tmp_path / "base", mode), rows, lora)
    initial = build_initial(config.model, 0)
    start = initial.model.encoder.state_dict()
    first = {name: t.clone() for name, t in start.items()}
    parts = build_parts(config, initial, build_fabric(config.fabric), tmp_path)
    teacher = parts.objective.get_submodule("teacher")
    assert teacher.padded == (mode == "padded")
    copied = lora is None or bool(lora.trainable)
    assert (teacher.encoder is not None) == copied
    assert not copied or all(t.equal(first[name]) for name, t in teacher.encoder.state_dict().items())
    batch = next(iter(parts.steps(range(1), 0, {})))[0]
    assert not any(len(at) for at in batch.supervised) and sum(batch.frames) > 0  # nothing but the question is in it


def test_rows_need_their_answers_where_more_than_the_encoder_is_trained(tmp_path: Path, base: str, rows: Path) -> None:
    config = run_of(tmp_path, base, rows, objective=ObjectiveConfig(distill_weight=1.0))
    with pytest.raises(
        UserError, match=r"has question_text, which task A1T1 needs: .*only their sound \(objective.align_first 1"
    ):
        check_start(config)
    source = replace(config.data.sources[0], tasks={"T1T2": 1.0})
    config = run_of(tmp_path, base, rows, data=replace(config.data, sources=(source,)))
    with pytest.raises(UserError, match="has spoken question, which task T1T2 needs"):
        check_start(config)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_it_is_planned_and_drawn_without_training(tmp_path: Path, base: str, rows: Path, lora: LoRASection | None) -> None:
    from train.plan.plan import make_plan

    config = run_of(tmp_path / "run", base, rows, lora)
    plan, alone = (
        make_plan(config),
        make_plan(replace(config, objective=replace(config.objective, distill_weight=0, align_first=0))),
    )
    assert not plan.problems
    teacher = Workbench(config, shape_of(config.model)).objective.teacher.encoder  # type: ignore[union-attr]
    assert (teacher is None) == (lora is not None)
    copied = sum(p.nbytes for p in teacher.parameters()) if teacher is not None else 0
    weights, bare = (memory.phases["optimizer"]["weights"] for memory in (plan.memory, alone.memory))
    assert weights - bare == copied
    assert "1 micro-batch" in describe_run(config)
