"""The law of resuming: stopped anywhere and started again, a run ends bitwise where the undisturbed run ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from omni.errors import UserError
from tests.processes import Program
from tests.train.toys import final_tensors, toy_config, toy_fit, toy_parts
from train.checkpoint import retention
from train.checkpoint.state import RNG, Position, Training, capture, load, write
from train.config.run import plain_config
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    GroupConfig,
    LogConfig,
    ModelSection,
    OptimizerConfig,
    ScheduleConfig,
)
from train.data.config import DataConfig, SourceConfig
from train.distributed.fabric import build_fabric
from train.optim.optimizer import build_optimizer
from train.trainer import build
from train.trainer.build import fit
from train.trainer.logs import METRICS, read_table
from train.trainer.signals import Stop

OPTIMIZERS = {"adamw": OptimizerConfig(lr=1e-2), "muon": OptimizerConfig(name="muon", lr=1e-2, muon_lr=2e-2, weight_decay=0.1)}
EVERY_3 = CheckpointConfig(every_steps=3, every_minutes=None)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.equal(b[name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of whole runs, one per optimizer."""
    out = {}
    for name, optimizer in OPTIMIZERS.items():
        out[name] = tmp_path_factory.mktemp(name)
        toy_fit(toy_config(out[name], optimizer=optimizer, log=LogConfig(every=4, progress="off")))
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("stops", [[1], [2, 5], [7]])
def test_stopped_by_a_signal_at_any_step(
    tmp_path: Path, undisturbed: dict[str, Path], optimizer: str, stops: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal comes while a step's data are fetched: that step is done, the state saved, the way on said."""
    log = LogConfig(every=4, progress="lines")
    config = toy_config(tmp_path, optimizer=OPTIMIZERS[optimizer], log=log)
    for i, stop in enumerate(stops):
        number = (signal.SIGTERM, signal.SIGINT)[i % 2]

        def before(step: int, stop: int = stop, number: int = number) -> None:
            if step == stop - 1:
                os.kill(os.getpid(), number)

        outcome, _ = toy_fit(config, toy_parts(before))
        assert (outcome.step, outcome.signal) == (stop, number)
        said = capfd.readouterr().err
        assert f"stopped by {signal.Signals(number).name} after step {stop}" in said and "same command" in said
    outcome, _ = toy_fit(config)
    assert (outcome.step, outcome.signal) == (8, 0)
    same(final_tensors(tmp_path), final_tensors(undisturbed[optimizer]))
    ours, theirs = (read_table(folder / METRICS) for folder in (tmp_path, undisturbed[optimizer]))
    assert [(r["step"], r["loss"], r["loss/text"]) for r in ours] == [(r["step"], r["loss"], r["loss/text"]) for r in theirs]


def test_killed_and_started_again(tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """kill -9 in step 5, two steps after the last checkpoint; a half-written one lies about."""
    options = {"folder": str(tmp_path), "every": 3, "kill": ["SIGKILL", 5]}
    ended = Program("tests.train.toys", json.dumps(options)).end()
    assert ended.code == -signal.SIGKILL, ended.said
    place = tmp_path / "checkpoints"
    assert retention.newest(place) == place / "step-00000003"
    assert read_table(tmp_path / METRICS)[-1]["step"] == 5
    for leftover in (".step-00000006.writing", ".step-00000005.writing", ".step-00000001.deleting"):
        shutil.copytree(place / "step-00000003", place / leftover)
    (place / "last").unlink()  # killed between the rename and the pointer
    outcome, _ = toy_fit(toy_config(tmp_path, checkpoint=EVERY_3))
    assert outcome.step == 8
    same(final_tensors(tmp_path), final_tensors(undisturbed["adamw"]))
    assert [row["step"] for row in read_table(tmp_path / METRICS)] == list(range(1, 9))
    assert not list(place.glob(".*"))


def test_a_finished_run_is_finished(tmp_path: Path) -> None:
    asked: list[int] = []

    def validate(weights: dict[str, Tensor], step: int) -> dict[str, float]:
        asked.append(step)
        return {"exact_match": 0.5}

    config = toy_config(tmp_path)
    _, first = toy_fit(config, toy_parts(validate=validate))
    outcome, again = toy_fit(config, toy_parts(validate=validate))
    assert (outcome.step, outcome.figures, asked) == (8, {"exact_match": 0.5}, [8])
    same(first, again)


def test_another_configuration_is_refused_unless_forced(tmp_path: Path) -> None:
    config = toy_config(tmp_path, checkpoint=EVERY_3)
    toy_fit(config)
    other = replace(config, optimizer=OptimizerConfig(lr=2e-2))
    with pytest.raises(UserError, match=r"optimizer\.lr is 0\.02\b.*\b0\.01\b.*--resume force"):
        toy_fit(other)
    free = replace(config, checkpoint=CheckpointConfig(keep_last=5), fabric=FabricConfig("cpu", 1, checkpointing=True))
    assert toy_fit(free)[0].step == 8
    longer = replace(other, budget=replace(config.budget, steps=9), resume="force")
    assert toy_fit(longer)[0].step == 9


@pytest.mark.long
def test_a_run_goes_on_with_a_larger_budget_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A finished run of 8 steps, extended to 12, ends bitwise where one of 12 ends, where the schedule is the same for both."""
    for name in ("finished", "stopped"):
        more: dict[str, Any] = {"schedule": ScheduleConfig("constant", warmup_steps=2), "log": LogConfig(1, "lines")}

        def before(step: int, stop: int = 5 if name == "stopped" else 99) -> None:
            if step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        toy_fit(toy_config(tmp_path / name, **more), toy_parts(before))
        larger = toy_config(tmp_path / name, budget=BudgetConfig(steps=12), **more)
        with pytest.raises(UserError, match=r"budget\.steps is 12\b.*\b8\b.*--resume extend"):
            toy_fit(larger)
        capfd.readouterr()
        assert toy_fit(replace(larger, resume="extend"))[0].step == 12
        assert f"made again for 12 steps; at step {8 if name == 'finished' else 6} the learning rate stays 0.01" in (
            capfd.readouterr().err
        )
        assert toy_fit(replace(larger, resume="extend"))[0].step == 12  # the same command again: nothing is left to do
        assert "made again" not in capfd.readouterr().err
        whole = toy_config(tmp_path / "whole", budget=BudgetConfig(steps=12), **more)
        toy_fit(whole)
        same(final_tensors(tmp_path / name), final_tensors(tmp_path / "whole"))
        assert [row["step"] for row in read_table(tmp_path / name / METRICS)] == list(range(1, 13))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": BudgetConfig(steps=7)}, r"budget\.steps is 7\b.*\b8\b.*--resume extend"),
        ({"budget": BudgetConfig(steps=9), "clip": 2.0}, r"clip is 2\.0\b.*\b1\.0\b"),
        ({"budget": BudgetConfig(steps=9), "run_folder": "elsewhere"}, r"earlier run.*\belsewhere\b"),
    ],
)
def test_extending_with_anything_else_is_refused(undisturbed: dict[str, Path], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        toy_fit(replace(toy_config(undisturbed["adamw"], resume="extend"), **changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("truncated", "cannot be read"),
        ("missing", r"tensors/state\.safetensors is missing"),
        ("not finite", r"tensor model\.model\.audio_head\.weight holds numbers that are not finite"),
        ("other version", "format 99"),
        ("[]", r"state\.json has no 'format'"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, undisturbed: dict[str, Path], damage: str, said: str) -> None:
    """With the one before it, from which the run then goes on."""
    for step in (3, 8):
        shutil.copytree(undisturbed["adamw"] / "checkpoints/step-00000008", tmp_path / "checkpoints" / retention.name_of(step))
    config, folder = toy_config(tmp_path), tmp_path / "checkpoints" / "step-00000008"
    weights, state = folder / "tensors" / "state.safetensors", folder / "state.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing":
        weights.unlink()
    elif damage == "not finite":
        tensors = load_file(weights)
        tensors["model.model.audio_head.weight"][2, 3] = math.nan
        save_file(tensors, weights)
    else:
        text = state.read_text().replace('"format": 1', '"format": 99') if damage == "other version" else damage
        state.write_text(text)
    with pytest.raises(UserError, match=f"step-00000008.*{said}.*delete it to go on from .*step-00000003$"):
        toy_fit(config)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    with pytest.raises(UserError, match=f"{said}.*there is no earlier one: --resume restart"):
        toy_fit(config)


def test_where_files_lie_and_how_many_workers_read_them_may_change(tmp_path: Path) -> None:
    free = {"data": ("workers", "prefetch", "broken_limit"), "model": ("tokenizer", "codec_folder", "init_from")}
    plain, moved = ({section: dict.fromkeys(keys, value) for section, keys in free.items()} for value in (1, 2))
    assert retention.differences(plain, moved) == retention.differences({"guard": True}, {"guard": False}) == []
    assert retention.differences(plain, {**moved, "data": {"seed": 3}}) == [("data.seed", None, 3)]


def test_data_that_have_grown_are_refused_unless_forced(tmp_path: Path) -> None:
    config = toy_config(tmp_path, checkpoint=EVERY_3)
    name = "the number of rows of data.sources[0]"
    toy_fit(config, toy_parts(rows={name: 10}))
    with pytest.raises(UserError, match=r"data\.sources\[0\] is 12\b.*\b10\b.*--resume force"):
        toy_fit(config, toy_parts(rows={name: 12}))
    assert toy_fit(config, toy_parts(rows={name: 10}))[0].step == 8
    longer = replace(config, budget=replace(config.budget, steps=9), resume="force")
    assert toy_fit(longer, toy_parts(rows={name: 12}))[0].step == 9
    assert toy_fit(replace(longer, resume="auto"), toy_parts(rows={name: 12}))[0].step == 9


def test_a_restart_that_cannot_begin_keeps_the_old_run(tmp_path: Path) -> None:
    config = toy_config(tmp_path, checkpoint=EVERY_3)
    toy_fit(config)
    kept = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    again = replace(config, resume="restart")
    for wrong, line in (
        (replace(again, optimizer=OptimizerConfig(groups=(GroupConfig("nothing*"),))), "nothing"),
        (replace(again, trainable=("nowhere*",)), "nowhere"),
    ):
        with pytest.raises(UserError, match=line):
            toy_fit(wrong)
    with pytest.raises(UserError, match="preset 'nona' is unknown"):
        fit(replace(again, data=DataConfig((SourceConfig("spoken-digits"),)), model=ModelSection(preset="nona")))
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == kept
    toy_fit(replace(again, budget=replace(config.budget, steps=4)))
    assert [p.name for p in retention.checkpoints(tmp_path / "checkpoints")] == ["step-00000003", "step-00000004"]
    assert [row["step"] for row in read_table(tmp_path / METRICS)] == [1, 2, 3, 4]


def test_a_signal_that_comes_while_the_end_is_written_is_not_lost(tmp_path: Path) -> None:
    """The run is finished then, but what follows it (the demonstration's examination) must not start."""
    config = toy_config(tmp_path)

    def validate(weights: Any, step: int) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"exact_match": 1.0}

    outcome, _ = toy_fit(config, toy_parts(validate=validate))
    assert (outcome.step, outcome.signal) == (8, signal.SIGTERM)


@pytest.mark.usefixtures("terminal_signals")
def test_a_hang_up_is_noted_unless_it_is_ignored() -> None:
    """As under `nohup`."""
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == signal.SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_state_of_another_rule_starts_again(
    tmp_path: Path, undisturbed: dict[str, Path], before: str, now: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the parameters whose rule is another one; that of the others goes on."""
    shutil.copytree(undisturbed[before], tmp_path / "run")
    log = LogConfig(every=4, progress="lines")
    config = toy_config(tmp_path / "run", optimizer=OPTIMIZERS[now], resume="force", budget=BudgetConfig(steps=9), log=log)
    assert toy_fit(config)[0].step == 9
    stored = final_tensors(tmp_path / "run")
    names = {name.partition(".")[2].rpartition(".")[0]: name for name in stored if "momentum" in name or "exp_avg_sq" in name}
    steps = {names[name]: float(stored[f"optimizer.{name}.step"]) for name in names if f"optimizer.{name}.step" in stored}
    changed = 2 if now == "muon" else sum(step == 1 for step in steps.values())
    assert f"the optimizer's state starts again for {changed} parameters, which another rule trained before" in (
        capfd.readouterr().err
    )
    assert set(steps.values()) == ({9.0} if now == "muon" else {1.0, 9.0})


def test_a_run_goes_on_in_another_precision(tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """State of the optimizer takes the type of its parameter; the number of steps stays exact."""
    shutil.copytree(undisturbed["muon"], tmp_path / "run")
    for steps, precision, kind in ((9, "bf16-true", torch.bfloat16), (10, "32-true", torch.float32)):
        fabric, budget = FabricConfig("cpu", 1, precision=precision), BudgetConfig(steps=steps)  # type: ignore[arg-type]
        config = toy_config(tmp_path / "run", optimizer=OPTIMIZERS["muon"], resume="force", budget=budget, fabric=fabric)
        assert toy_fit(config)[0].step == steps
        stored = {name: t for name, t in final_tensors(tmp_path / "run").items() if name.startswith("optimizer.")}
        assert {t.dtype for name, t in stored.items() if not name.endswith(".step")} == {kind}
        assert {(float(t), t.dtype) for name, t in stored.items() if name.endswith(".step")} == {(steps, torch.float32)}


def test_a_start_that_fails_keeps_the_configuration_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run's is there from the beginning; a resumed one's is written after its first step."""
    monkeypatch.setattr(build, "build_initial", lambda *_: type("Initial", (), {"model": torch.nn.Linear(1, 1)}))
    monkeypatch.setattr(build, "with_alignment", lambda config: config)
    monkeypatch.setattr(build.screen, "ready_lines", lambda *_: [])

    def start(steps: int, broken: bool) -> Any:
        def before(step: int) -> None:
            if broken:
                raise UserError("row 7 is broken")

        monkeypatch.setattr(build, "build_parts", lambda *_: toy_parts(before))
        config = toy_config(tmp_path, budget=BudgetConfig(steps=steps), resume="force")
        loop = build.prepare(config, build_fabric(config.fabric), tmp_path)
        kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
        if broken:
            with pytest.raises(UserError, match="row 7"):
                loop.run()
        else:
            loop.run()
        return kept["budget"]["steps"], yaml.safe_load((tmp_path / "config.yaml").read_text())["budget"]["steps"]

    assert start(3, False) == (3, 3)
    assert start(5, True) == (3, 3)
    assert start(5, False) == (3, 5)
    assert start(4, False) == (5, 4)  # no step is left
    assert plain_config(toy_config(tmp_path))["budget"]["steps"] == 8


def test_a_run_on_the_cpu_leaves_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither opens the GPU that is there, nor keeps its random state."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = toy_config(tmp_path)
    stop = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None  # noqa: E731
    assert toy_fit(config, toy_parts(stop))[0].signal
    toy_fit(config)
    place = retention.newest(tmp_path / "checkpoints")
    assert place is not None and not any("cuda" in name for name in load_file(place / RNG))


def test_state_that_a_rule_allocates_itself_is_read_into_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU bitsandbytes' state is paged: read into other tensors, it would not be."""
    from bitsandbytes.optim.optimizer import Optimizer8bit

    real, paged = Optimizer8bit.get_state_buffer, list[Tensor]()

    def get_state_buffer(self: Any, *given: Any, **options: Any) -> Tensor:
        paged.append(real(self, *given, **options))
        return paged[-1]

    monkeypatch.setattr(Optimizer8bit, "get_state_buffer", get_state_buffer)
    config = toy_config(tmp_path, optimizer=OptimizerConfig("paged_adamw_8bit", lr=1e-2), ema=None)
    toy_fit(config)
    stored, place = final_tensors(tmp_path), retention.newest(tmp_path / "checkpoints")
    paged.clear()
    objective = toy_parts().objective
    named = [(name.removeprefix("model."), p) for name, p in objective.named_parameters()]
    optimizer = build_optimizer(named, config.optimizer)
    group: Any = SimpleNamespace(rank=0, world=1)
    assert place is not None
    load(place, Training(objective, optimizer, None), group)
    held = [optimizer.state[p][key] for _, p in named for key in ("state1", "state2")]
    assert len(held) == len(paged) > 10 and {t.data_ptr() for t in held} == {t.data_ptr() for t in paged}
    for name, p in objective.named_parameters():
        assert optimizer.state[p]["state1"].equal(stored[f"optimizer.{name}.state1"]), name
        assert float(optimizer.state[p]["step"]) == 8


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_run_on_a_gpu_repeats_and_resumes_bit_for_bit(tmp_path: Path, precision: Any) -> None:
    stop = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None  # noqa: E731
    for name in ("first", "again", "stopped"):
        config = toy_config(tmp_path / name, fabric=FabricConfig(accelerator="gpu", devices=1, precision=precision))
        if name == "stopped":
            assert toy_fit(config, toy_parts(stop))[0].signal
        assert toy_fit(config)[0].step == 8
        same(final_tensors(tmp_path / name), final_tensors(tmp_path / "first"))


@pytest.mark.cuda
def test_paged_state_stays_paged_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = OptimizerConfig("paged_adamw_8bit", lr=1e-2)
    alone = {"rank": 0, "world": 1, "first": True}
    group: Any = SimpleNamespace(**alone, gather=lambda value: [value], raise_if_any_failed=lambda error: None)
    ends = []
    for resumed in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(512, 512, device="cuda")
        optimizer = build_optimizer(list(module.named_parameters()), config)
        if resumed:
            saved = write(capture(tmp_path, Position(step=3), {}, Training(*ends[0], None), group), group)
            load(saved, Training(module, optimizer, None), group)
        for _ in range(3):
            module(torch.ones(8, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert getattr(optimizer.state[module.weight]["state1"], "is_paged", False)
        ends.append((module, optimizer))
