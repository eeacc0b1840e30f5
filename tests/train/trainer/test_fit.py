"""Laws of the loop, on a tiny model: it equals a plain loop, it validates, keeps, exports and complains as told."""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni.checkpoint.tensors import save_tensors
from omni.convert.lazy import lazies_of
from omni.errors import UserError
from tests.train.toys import (
    ToyBatch,
    ToyModel,
    ToyObjective,
    final_tensors,
    toy_batch,
    toy_config,
    toy_export,
    toy_fit,
    toy_parts,
    toy_steps,
    toy_targets,
)
from train.checkpoint import retention
from train.checkpoint.checkpointer import Checkpointer
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    Rule,
    ScheduleConfig,
    ValidationConfig,
)
from train.data.sources.mixture import UsedUp
from train.objective.objective import Losses
from train.optim.optimizer import learning_rate
from train.trainer.logs import METRICS, VALIDATION, CsvTable, Logs, read_table, run_id


def plain_loop(steps: Iterable[int], clip: float | None, decay: float, schedule: ScheduleConfig) -> dict[str, Tensor]:
    """The same training without any of the machinery: one loss for the whole step, torch's AdamW."""
    torch.manual_seed(0)
    model = ToyModel()
    objective = ToyObjective(model)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * learning_rate(schedule, BudgetConfig(steps=8), step, 0.0)
        batches = [toy_batch(shard, step) for shard in range(4)]
        counts = torch.stack([toy_targets(b) for b in batches]).sum(0)
        loss = torch.stack([objective(b, counts).total for b in batches]).sum()
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_loop_equals_a_plain_loop(tmp_path: Path, clip: float | None, decay: float) -> None:
    config = toy_config(tmp_path, clip=clip, optimizer=OptimizerConfig(lr=1e-2, weight_decay=decay))
    _, weights = toy_fit(config)
    for name, wanted in plain_loop(range(8), clip, decay, config.schedule).items():
        torch.testing.assert_close(weights[f"model.model.{name}"], wanted, rtol=1e-5, atol=1e-6)


def test_rows_of_the_log_are_means_over_all_targets(tmp_path: Path) -> None:
    """A row over four steps equals what the losses of those steps, by target, say."""
    config = toy_config(tmp_path, optimizer=OptimizerConfig(lr=0.0, muon_lr=0.0), log=LogConfig(every=4, progress="off"))
    toy_fit(config)
    torch.manual_seed(0)
    objective = ToyObjective(ToyModel())
    rows = read_table(tmp_path / METRICS)
    assert [row["step"] for row in rows] == [4, 8]
    for row, steps in zip(rows, (range(4), range(4, 8)), strict=True):
        one = torch.ones(3)
        losses = [objective(toy_batch(shard, step), one) for step in steps for shard in range(4)]
        sums, counts = sum(x.sums for x in losses), sum(x.counts for x in losses)
        assert row["loss/audio0"] == pytest.approx(float(sums[:, 0].sum() / counts[:, 0].sum()), rel=1e-5)
        assert row["loss/T1T2"] == pytest.approx(float(sums[1].sum() / counts[1].sum()), rel=1e-5)
        assert row["tokens_per_second"] > 0 and row["lr"] == 0.0


def test_a_run_that_the_clock_ends_has_a_row_of_its_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointer, "clock", lambda self: 10.0 * self.position.step)
    config = toy_config(tmp_path, budget=BudgetConfig(minutes=1), log=LogConfig(every=4, progress="off"))
    outcome, _ = toy_fit(config)
    assert [row["step"] for row in read_table(tmp_path / METRICS)] == [4, outcome.step] and outcome.step > 4
    toy_fit(config)  # which is finished: nothing is added
    assert len(read_table(tmp_path / METRICS)) == 2


@pytest.mark.parametrize("ema", [None, 0.7])
def test_validation_and_export_see_the_average_if_there_is_one(tmp_path: Path, ema: float | None) -> None:
    seen: list[tuple[int, dict[str, Tensor]]] = []
    exported: list[dict[str, Tensor]] = []

    def validate(weights: dict[str, Tensor], step: int) -> dict[str, float]:
        seen.append((step, {name: t.clone() for name, t in weights.items()}))
        return {"exact_match": 0.1 * step}

    def export(weights: dict[str, Tensor]) -> Path:
        exported.append(weights)
        return tmp_path / "model"

    config = toy_config(tmp_path, ema=ema, validation=ValidationConfig(every_steps=3))
    outcome, weights = toy_fit(config, toy_parts(validate=validate, export=export))
    assert [step for step, _ in seen] == [3, 6, 8]
    assert outcome.figures == {"exact_match": pytest.approx(0.8)} and outcome.model == tmp_path / "model"
    kind = "average.model." if ema else "model.model."
    for name, tensor in exported[0].items():
        assert tensor.equal(weights[kind + name]), name
    assert any(not t.equal(seen[0][1][name]) for name, t in exported[0].items())
    rows = read_table(tmp_path / VALIDATION)
    assert [(row["step"], row["exact_match"]) for row in rows] == [(3, 0.3), (6, 0.6), (8, 0.8)]


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    scores = {2: 0.1, 4: 0.9, 6: 0.3, 8: 0.9, 10: 0.2, 12: 0.1, 13: 0.1}
    config = toy_config(
        tmp_path,
        budget=BudgetConfig(steps=13),
        validation=ValidationConfig(every_steps=2),
        checkpoint=CheckpointConfig(every_steps=5, every_minutes=None, keep_last=2, keep_best=1),
    )
    toy_fit(config, toy_parts(validate=lambda weights, step: {"exact_match": scores[step]}))
    names = [p.name for p in retention.checkpoints(tmp_path / "checkpoints")]
    # 4 is the best (8 only equals it), 10 and 13 the last.
    assert names == ["step-00000004", "step-00000010", "step-00000013"]
    assert retention.newest(tmp_path / "checkpoints").name == "step-00000013"  # type: ignore[union-attr]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_what_is_not_trainable_stays_and_has_no_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = ToyModel().state_dict()
    _, weights = toy_fit(toy_config(tmp_path, trainable=("audio_*",)))
    moved = {name for name, t in before.items() if not t.equal(weights[f"model.model.{name}"])}
    assert moved == {"audio_embedding.weight", "audio_head.weight"}
    stored = final_tensors(tmp_path)
    with_state = {name.rsplit(".", 1)[0] for name in stored if name.startswith("optimizer.")}
    assert with_state == {"optimizer.model.audio_embedding.weight", "optimizer.model.audio_head.weight"}
    assert {name for name in stored if name.startswith("average.")} == {
        "average.model.audio_embedding.weight",
        "average.model.audio_head.weight",
    }


def test_what_is_idle_does_not_learn_yet(tmp_path: Path) -> None:
    """For the first half of the budget; Muon and weight decay would move it even without a gradient."""
    torch.manual_seed(0)
    before = ToyModel().state_dict()
    parts = toy_parts()
    idle = list(parts.objective.model.blocks.parameters())
    seen: list[float] = []

    def resting(progress: float) -> list[nn.Parameter]:
        seen.append(progress)
        return idle if progress < 0.5 else []

    def stop(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    optimizer = OptimizerConfig(name="muon", weight_decay=0.5)
    config = toy_config(tmp_path, optimizer=optimizer)
    parts = replace(parts, idle=resting, steps=toy_parts(stop).steps)
    _, half = toy_fit(config, parts)
    moved = {name.split(".")[0] for name, t in before.items() if not t.equal(half[f"model.model.{name}"])}
    assert moved == {"audio_embedding", "text_embedding", "audio_head", "text_head"}
    _, whole = toy_fit(config, replace(toy_parts(), idle=lambda progress: []))
    assert all(not t.equal(whole[f"model.model.{name}"]) for name, t in before.items())
    assert list(dict.fromkeys(seen)) == [0.0, 0.125, 0.25, 0.375]  # a guard asks too


def test_no_space_left_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = toy_config(tmp_path, checkpoint=CheckpointConfig(every_steps=3, every_minutes=None))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int) -> None:
        if step == 4:
            while not (tmp_path / "checkpoints" / "last").exists():  # the one before is written while the run trains on
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))

    try:
        with pytest.raises(UserError, match=r"step-00000006 cannot be written: no space left.*step-00000003; free some"):
            toy_fit(config, toy_parts(fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path / "checkpoints" / "step-00000003" / "tensors") == ["state.safetensors"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["last", "step-00000003"]
    _, resumed = toy_fit(config)
    _, undisturbed = toy_fit(replace(config, run_folder=str(tmp_path / "other")))
    assert all(t.equal(undisturbed[name]) for name, t in resumed.items())


def test_a_loss_that_is_no_number_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    config = toy_config(
        tmp_path,
        schedule=ScheduleConfig(),
        log=LogConfig(every=100, progress="off"),
        checkpoint=CheckpointConfig(every_steps=3, every_minutes=None),
    )
    object.__setattr__(config.optimizer, "lr", float("inf"))
    with pytest.raises(UserError, match=r"loss is nan at step 3\b.*no checkpoint"):
        toy_fit(config)
    assert not retention.checkpoints(tmp_path / "checkpoints")


def test_a_table_survives_a_row_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    table = CsvTable(file, 0)
    for step in range(1, 6):
        table.add(step, {"loss": 1 / step})
    with file.open("a") as handle:
        handle.write("6,0.1")  # killed within a write
    table = CsvTable(file, 3)
    table.add(4, {"loss": 0.5, "lr": 0.1})
    rows = read_table(file)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[3]["lr"] == 0.1 and rows[0]["lr"] != rows[0]["lr"]
    assert rows[2]["loss"] == pytest.approx(1 / 3)


class Bad(ToyObjective):
    """At some steps a finite loss with gradients that are no numbers."""

    def __init__(self, steps: Sequence[int]) -> None:
        torch.manual_seed(0)
        super().__init__(ToyModel())
        self.steps = steps

    def forward(self, batch: ToyBatch, denominators: Tensor, progress: float = 1.0) -> Losses:
        losses = super().forward(batch, denominators, progress)
        if batch.state["next"] - 1 not in self.steps:
            return losses
        nothing = sum((p.sum() * 0).abs().sqrt() for p in self.parameters())  # 0, and its slope inf * 0
        return losses._replace(total=losses.total + nothing)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["adamw", "muon", "paged_adamw_8bit"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_that_are_no_numbers_leave_a_step_out(tmp_path: Path, name: Rule, clip: float | None) -> None:
    objective = Bad((0, 3, 4))
    seen: list[dict[str, Tensor]] = []

    def look(step: int) -> None:
        seen.append({name: t.clone() for name, t in objective.state_dict().items()})

    optimizer = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.3)
    config = toy_config(tmp_path, clip=clip, optimizer=optimizer, schedule=ScheduleConfig())
    outcome, weights = toy_fit(config, replace(toy_parts(look), objective=objective))
    after = [*seen[1:], {key.removeprefix("model."): t for key, t in weights.items() if key.startswith("model.")}]
    stayed = [all(t.equal(b[key]) for key, t in a.items()) for a, b in zip(seen, after, strict=True)]
    assert stayed == [step in (0, 3, 4) for step in range(8)]
    skipped = [row.get("steps_skipped", float("nan")) == 1 for row in read_table(tmp_path / METRICS)]
    assert outcome.step == 8 and skipped == stayed
    assert all(t.isfinite().all() for t in final_tensors(tmp_path).values())


def test_a_skipped_step_leaves_no_trace_in_the_optimizer(tmp_path: Path) -> None:
    """A run whose second step is left out ends where the plain loop without it ends."""
    config = toy_config(
        tmp_path, clip=None, budget=BudgetConfig(steps=4), schedule=ScheduleConfig("constant"),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
    )  # fmt: skip
    _, weights = toy_fit(config, replace(toy_parts(), objective=Bad((1,))))
    for name, wanted in plain_loop((0, 2, 3), None, 0.0, config.schedule).items():
        torch.testing.assert_close(weights[f"model.model.{name}"], wanted, rtol=1e-5, atol=1e-6)


def test_ten_steps_without_a_gradient_end_the_run(tmp_path: Path) -> None:
    config = toy_config(tmp_path, budget=BudgetConfig(steps=30), checkpoint=CheckpointConfig(every_steps=5, every_minutes=None))
    with pytest.raises(UserError, match=r"\b10 steps.*nan at step 16\b.*step-00000015"):
        toy_fit(config, replace(toy_parts(), objective=Bad((*range(3, 5), *range(6, 30)))))


def test_broken_data_do_not_cost_what_was_trained(tmp_path: Path) -> None:
    def broken(step: int) -> None:
        if step == 5:
            raise UserError("row 7 of data.parquet has no audio")

    config = toy_config(tmp_path / "broken")
    with pytest.raises(UserError, match=r"^row 7 of data\.parquet has no audio$"):
        toy_fit(config, toy_parts(broken))
    assert [p.name for p in retention.checkpoints(tmp_path / "broken" / "checkpoints")] == ["step-00000005"]
    _, resumed = toy_fit(config)
    _, undisturbed = toy_fit(toy_config(tmp_path / "whole"))
    assert all(t.equal(undisturbed[name]) for name, t in resumed.items())
    with pytest.raises(UserError, match="row 7"):
        toy_fit(toy_config(tmp_path / "first"), toy_parts(lambda step: broken(5)))
    assert not retention.checkpoints(tmp_path / "first" / "checkpoints")  # nothing trained: another configuration may start


def test_a_validation_that_fails_comes_after_the_checkpoint(tmp_path: Path) -> None:
    def fail(weights: dict[str, Tensor], step: int) -> dict[str, float]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "answers.jsonl")

    config = toy_config(
        tmp_path, validation=ValidationConfig(every_steps=4), checkpoint=CheckpointConfig(every_steps=2, every_minutes=None)
    )
    with pytest.raises(UserError, match=r"answers\.jsonl.*\(No space left on device\)"):
        toy_fit(config, toy_parts(validate=fail))
    newest = retention.newest(tmp_path / "checkpoints")
    assert newest is not None and newest.name == "step-00000004"
    assert toy_fit(config, toy_parts(validate=lambda weights, step: {"exact_match": 0.1 * step}))[0].step == 8
    newest = retention.newest(tmp_path / "checkpoints")
    assert newest is not None and retention.read_state(newest)["figures"] == {"exact_match": 0.8}


def test_rows_that_were_not_used_are_in_the_log(tmp_path: Path) -> None:
    def counted(shards: Sequence[int], start: int, states: Mapping[str, Any]) -> Iterator[list[ToyBatch]]:
        for step in toy_steps(shards, start, states):
            for batch in step:
                batch.state.update(skipped=batch.state["next"] * 2, broken=batch.state["packer_shard"])
            yield step

    toy_fit(toy_config(tmp_path), toy_parts(steps=counted))
    rows = read_table(tmp_path / METRICS)
    assert [row["rows_skipped"] for row in rows] == [8.0 * step for step in range(1, 9)]
    assert {row["rows_broken"] for row in rows} == {6.0}
    toy_fit(toy_config(tmp_path / "none"))
    assert "rows_broken" not in read_table(tmp_path / "none" / METRICS)[0]


def test_runs_of_one_name_in_two_places_are_two_runs(tmp_path: Path) -> None:
    a, b = (run_id(tmp_path / place / "nano") for place in ("a", "b"))
    assert a != b and a == run_id(tmp_path / "a" / ".." / "a" / "nano") and a.startswith("nano-")


def test_curves_of_a_start_that_saved_nothing_are_not_shown_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard drops what was written before from the step on that a start names."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer._global_uid, "_value", 10)  # files of one second are read in the order of names
    for upto, first in ((0, 1.0), (0, 2.0), (2, 3.0)):
        logs = Logs(tmp_path, upto)
        for step in range(upto + 1, 5):
            logs.write(METRICS, step, {"loss": first})
        logs.close()
    seen = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in seen] == [(1, 2.0), (2, 2.0), (3, 3.0), (4, 3.0)]


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
