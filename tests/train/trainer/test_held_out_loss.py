"""The loss of held-out rows: what every example by itself says, however packed and shared; and a run that measures it is not
disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni.errors import UserError
from omni.layout import IGNORE
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from tests.train.data.toys import MODELS, ToySource, codec_of, maker_of
from tests.train.toys import (
    ALONE,
    STREAMS,
    ToyModel,
    ToyObjective,
    adapted_parts,
    toy_config,
    toy_fit,
    toy_held_out,
    toy_lora,
    toy_parts,
)
from tests.train.toys import TASKS as TOY_TASKS
from train.checkpoint import retention
from train.config.sections import BudgetConfig, CheckpointConfig, LogConfig, ValidationConfig
from train.data.build import held_out_by_source, held_out_rows
from train.data.config import AugmentConfig, DataConfig, PackingConfig, SourceConfig
from train.data.rows.parquet import StoredRows, write_rows
from train.data.rows.row import Row, Sound
from train.eval.held_out import items_of
from train.objective.objective import Losses, Objective
from train.optim.optimizer import Average
from train.trainer.logs import VALIDATION, read_table
from train.trainer.validation import HeldOut, build_held_out, exchanged, held_out_loss

MODEL = MODELS["codec2"]
PACKING = PackingConfig(rows=2, length=160, buffer=4)


@pytest.fixture
def rows() -> list[Row]:
    """Five held-out rows of noise in place of files; the first one names its own task, the last has no answer."""
    source = ToySource("held", None, codec_of(MODEL), turns=2)
    made = [source.row(i) for i in range(5)]
    made[0] = replace(made[0], task="T1T2")
    made[4] = replace(made[4], turns=tuple(replace(turn, answer_text="", answer_codes=None) for turn in made[4].turns))
    return made


def held(rows: list[Row], packing: PackingConfig = PACKING, rank: int = 0, world: int = 1, **changes: Any) -> HeldOut:
    source = SourceConfig(kind="stored", path="none", held_out=5, tasks={"A1A2": 0.4, "A1T1": 0.1, "T1A2": 0.0})
    return build_held_out([(source, rows)], packing, maker_of(MODEL, **changes), rank, world)


def loss_of(batches: Any, objective: Objective) -> dict[str, float]:
    device = torch.device("cpu")
    return held_out_loss(objective, objective, batches, tuple(TASKS), MODEL.layout.names, device, None, ALONE)


@pytest.fixture(scope="module")
def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(SpeechModel(MODEL))


def test_each_row_is_examined_once_for_every_task_of_its_source(rows: list[Row]) -> None:
    found = held(rows)
    # T1T2 of the first row; A1A2 and A1T1 of three; of the last, without an answer, A1T1 alone; T1A2 has no weight.
    assert (found.rows, found.examples) == (5, 1 + 3 * 2 + 1)
    tasks = torch.cat([batch.task[batch.task >= 0] for batch in found.batches])
    assert {tuple(TASKS)[i] for i in tasks.unique().tolist()} == {"T1T2", "A1A2", "A1T1"}
    again = held(rows, augment=AugmentConfig(feature_noise=(-6, -1), time_masks=(2, 5)))
    for a, b in zip(found.batches, again.batches, strict=True):
        assert a.tokens.equal(b.tokens) and a.inputs.equal(b.inputs)
    short = held(rows, replace(PACKING, length=25))
    assert 0 < short.examples < found.examples  # what no row can hold is left out


def test_the_loss_is_the_mean_over_the_targets_of_all_examples_by_themselves(rows: list[Row], objective: Objective) -> None:
    found: dict[str, list[Tensor]] = {}
    layout = MODEL.layout
    for batch in held(rows, PackingConfig(rows=1, length=160, buffer=1)).batches:
        hidden = objective.model(batch.tokens, objective._encode(batch)[0], batch.feature_index, segments=batch.segments)
        decoder = objective.model.decoder
        bounds = [*decoder.audio_offsets, len(decoder.audio_weight)]
        for k, name in enumerate(layout.names):
            text = name == "text"
            head = decoder.text_weight if text else decoder.audio_weight[bounds[k] : bounds[k + 1]]
            logits = ((hidden.text if text else hidden.audio) @ head.T).flatten(0, 1)
            nats = F.cross_entropy(logits, batch.targets[:, k].flatten(), reduction="none")
            there = batch.targets[:, k].flatten() != IGNORE
            for task in batch.task.flatten()[there].unique().tolist():
                chosen = nats[there & (batch.task.flatten() == task)]
                for key in {"loss", f"loss/{name}", "loss/text" if text else "loss/audio", f"loss/{tuple(TASKS)[task]}"}:
                    found.setdefault(key, []).append(chosen.detach())
    wanted = {key: float(torch.cat(parts).mean()) for key, parts in found.items()}
    for packing in (PACKING, PackingConfig(rows=3, length=300, buffer=8)):
        figures = loss_of(held(rows, packing).batches, objective)
        del figures["loss/shuffled"]
        assert figures == pytest.approx(wanted, rel=1e-5)


def test_a_shuffled_loss_is_that_of_answers_to_sounds_of_other_questions(rows: list[Row], objective: Objective) -> None:
    (batch, *_) = held(rows, PackingConfig(rows=4, length=600, buffer=8)).batches
    other = exchanged(batch, objective.model.config.projector.stack)
    assert (other.feature_index >= 0).equal(batch.feature_index >= 0)
    own, clip = batch.feature_index[batch.feature_index >= 0], torch.tensor(batch.frames).add(1).div(2, rounding_mode="floor")
    clips = torch.arange(len(clip)).repeat_interleave(clip)
    assert (clips[own] != clips[other.feature_index[other.feature_index >= 0]]).all()
    wanted = loss_of([other], objective)["loss/A1T1"]
    assert (
        loss_of([batch], objective)["loss/shuffled"]
        == pytest.approx(wanted, rel=1e-6)
        != loss_of([batch], objective)["loss/A1T1"]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_any_number_of_processes_measures_the_same_batches(rows: list[Row], objective: Objective, world: int) -> None:
    packing = PackingConfig(rows=1, length=160, buffer=2)
    whole, parts = held(rows, packing), [held(rows, packing, rank, world) for rank in range(world)]
    assert len({len(part.batches) for part in parts}) == 1
    assert {(part.rows, part.examples) for part in parts} == {(whole.rows, whole.examples)}
    shared = [batch for part in parts for batch in part.batches]
    assert sum(batch.examples for batch in shared) == whole.examples
    assert any(batch.examples == 0 for batch in shared) == (len(whole.batches) % world > 0)
    assert loss_of(shared, objective) == pytest.approx(loss_of(whole.batches, objective), rel=1e-12)


def test_a_broken_row_is_named_or_left_out_as_in_training(rows: list[Row]) -> None:
    rows[1] = replace(rows[1], turns=tuple(replace(turn, question_audio=Sound(path="no.wav")) for turn in rows[1].turns))
    with pytest.raises(UserError, match="held row 1, turn 0: audio 'no.wav'"):
        held(rows)
    source, broken = SourceConfig(kind="stored", path="none", held_out=5, tasks={"A1T1": 1.0}), dict[str, str]()
    found = build_held_out([(source, rows)], PACKING, maker_of(MODEL), 0, 1, broken)
    assert (found.rows, found.examples) == (5, 4) and found.broken is broken and list(broken) == ["held row 1"]
    items = items_of(rows, ["A1T1", "T1T2"], codec_of(MODEL), broken=broken)
    assert len(items) == 4 + 4 and len(broken) == 1 and "held row 1, turn 0: audio" in broken["held row 1"]


def test_rows_that_cannot_be_read_are_left_out_where_training_skips_them(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.parquet", rows)
    read = StoredRows.__getitem__

    def read_some(self: StoredRows, index: int) -> Row:
        if index == 1:
            raise UserError(f"{self.where(index)} is no row")
        return read(self, index)

    monkeypatch.setattr(StoredRows, "__getitem__", read_some)
    for place in (3, str(tmp_path / "rows.parquet")):
        source = SourceConfig(kind="stored", path=str(tmp_path / "rows.parquet"), held_out=place, tasks={"T1T2": 1.0})
        with pytest.raises(UserError, match=r"rows\.parquet row 1 is no row"):
            held_out_rows(DataConfig((source,)), None, 5)
        data, broken = DataConfig((source,), broken="skip"), dict[str, str]()
        ((_, found),) = held_out_by_source(data, None, 5, broken)
        assert len(found) == (2 if place == 3 else 4) == len(held_out_rows(data, None, 5))
        assert list(broken.values()) == [f"{tmp_path / 'rows.parquet'} row 1 is no row"]


def direct(weights: dict[str, Tensor], prefix: str) -> dict[str, float]:
    """The mean over all targets of the toys' held-out batches, of a run's weights that start so."""
    objective = ToyObjective(ToyModel()).eval()
    objective.load_state_dict({name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)})
    found = [objective(batch, torch.ones(3)) for batch in toy_held_out(0, 1)]
    sums, counts = (torch.stack(list(parts)).sum(0) for parts in zip(*((x.sums, x.counts) for x in found), strict=True))
    return {"loss": float(sums.sum() / counts.sum()), "loss/audio": float(sums[:, 0].sum() / counts[:, 0].sum())}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ema", "precision"), [(None, "32-true"), (0.7, "32-true"), (0.7, "bf16-true")])
def test_the_loss_is_of_the_weights_that_are_validated(tmp_path: Path, ema: float | None, precision: Any) -> None:
    """Of the running average where there is one; the weights themselves learn on as if nothing had been measured.

    In bf16 the average is of another type than they are.
    """
    checkpoint = CheckpointConfig(every_minutes=None, metric="loss")
    config = toy_config(tmp_path / "a", ema=ema, validation=ValidationConfig(every_steps=3), checkpoint=checkpoint)
    config = replace(config, fabric=replace(config.fabric, precision=precision))
    outcome, weights = toy_fit(config)
    wanted = direct(weights, "average." if ema else "model.")
    assert {name: outcome.figures[name] for name in wanted} == pytest.approx(
        wanted, rel=1e-6 if precision == "32-true" else 1e-2
    )
    rows = read_table(tmp_path / "a" / VALIDATION)
    assert [row["step"] for row in rows] == [3, 6, 8] and rows[-1]["loss"] == pytest.approx(outcome.figures["loss"], rel=1e-6)
    _, undisturbed = toy_fit(replace(config, run_folder=str(tmp_path / "b"), validation=ValidationConfig(questions=0)))
    assert weights.keys() == undisturbed.keys()
    for name, tensor in undisturbed.items():
        assert tensor.equal(weights[name]), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_dropout_is_off_while_it_is_measured_and_draws_as_before_afterwards(tmp_path: Path, precision: str) -> None:
    """A guard watches; adapters drop half of what they see, and the average is of another type than some weights."""
    section = replace(toy_lora(), dropout=0.5)
    folders = {"measured": ValidationConfig(every_steps=2), "plain": ValidationConfig()}
    ended, modes = {}, []
    for name, validation in folders.items():
        config = toy_config(
            tmp_path / name, lora=section, guard=True, validation=validation, log=LogConfig(every=1, progress="off"),
            checkpoint=CheckpointConfig(every_minutes=None, metric="loss"), budget=BudgetConfig(steps=5),
        )  # fmt: skip
        config = replace(config, fabric=replace(config.fabric, precision=precision))
        parts = adapted_parts(section, precision=precision)
        parts.objective.register_forward_pre_hook(lambda module, given: modes.append(module.training))
        ended[name] = toy_fit(config, parts)[1]
    assert modes.count(False) == 3 * 5 and modes[-1]
    for name, tensor in ended["plain"].items():
        assert tensor.equal(ended["measured"][name]), name


def test_what_fails_while_it_is_measured_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = ToyObjective(ToyModel())
    average = Average(objective.named_parameters(), 0.9)
    for value in average.values.values():
        value.zero_()
    before = {name: t.clone() for name, t in objective.state_dict().items()}

    def fail(*_: Any) -> Losses:
        assert all(not t.any() for t in objective.state_dict().values()) and not objective.training
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cpu = torch.device("cpu")
        held_out_loss(fail, objective, toy_held_out(0, 1), TOY_TASKS, STREAMS, cpu, average, ALONE)
    assert objective.training and all(t.equal(before[name]) for name, t in objective.state_dict().items())
    assert all(not value.any() for value in average.values.values())


def test_the_lowest_loss_is_kept_and_no_number_never_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: Iterator[float] = iter([float("nan"), 2.0, 1.0, float("-inf"), 3.0, 1.0, 4.0])
    monkeypatch.setattr("train.trainer.validation.held_out_loss", lambda *_: {"loss": next(losses)})
    config = toy_config(
        tmp_path,
        budget=BudgetConfig(steps=13),
        validation=ValidationConfig(every_steps=2),
        checkpoint=CheckpointConfig(every_steps=None, every_minutes=None, keep_last=1, metric="loss"),
    )
    toy_fit(config, replace(toy_parts(), held_out=toy_held_out(0, 1)))
    kept = retention.checkpoints(tmp_path / "checkpoints")
    assert [folder.name for folder in kept] == ["step-00000006", "step-00000013"]
