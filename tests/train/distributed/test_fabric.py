"""Laws of several processes (gloo, CPU): they learn what one learns, and resume, sharded or not, on another number."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from _thread import start_new_thread
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omni.errors import LostError, UserError
from omni.model.speech_model import SpeechModel
from tests.processes import Program, two
from tests.train.toys import (
    OF_THE_MACHINE,
    adapted_parts,
    assert_adapters_learn,
    final_tensors,
    toy_config,
    toy_fit,
    toy_lora,
    toy_parts,
)
from train.checkpoint import retention
from train.config.sections import CheckpointConfig, FabricConfig, LogConfig, OptimizerConfig, ValidationConfig
from train.distributed import fabric as parallel
from train.distributed.fabric import compile_blocks, launch_names, placement, restarted
from train.trainer.logs import METRICS, VALIDATION, read_table

LINES = {
    "log": LogConfig(every=1, progress="off"),
    "checkpoint": CheckpointConfig(every_steps=3, every_minutes=None, metric="loss"),
}

VALIDATED = ValidationConfig(every_steps=2)


def two_processes(options: dict[str, Any], **more: Any) -> list[int]:
    """Run it in two processes; both exit codes."""
    return [ended.code for ended in two("tests.train.toys", json.dumps(options), **more)]


def make_together(runs: list[dict[str, Any]]) -> None:
    """Make runs in two processes, one after another."""
    for ended in two("tests.train.toys", json.dumps({"runs": runs})):
        assert ended.code == 0, ended.said


def losses(folder: Path, *names: str) -> torch.Tensor:
    return torch.tensor(
        [[row[n] for n in names or ("loss", "loss/audio0", "loss/text")] for row in read_table(folder / METRICS)]
    )


STRATEGIES = ["fsdp", pytest.param("ddp", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of eight steps; those that are stopped, and the one of one process, validate every two. Most
    are in one launch of two processes; where no long test is run, `one`, `fsdp` and `fsdp-stopped` alone are made."""
    top = tmp_path_factory.mktemp("runs")
    toy_fit(toy_config(top / "one", **LINES, validation=VALIDATED))
    stop, validated = {"kill": ["SIGTERM", 3]}, {"validate": VALIDATED.every_steps}
    fsdp = {"devices": 2, "strategy": "fsdp"}
    together: list[dict[str, Any]] = [
        {"folder": str(top / "fsdp"), "fabric": fsdp},
        {"folder": str(top / "fsdp-stopped"), "fabric": fsdp, **stop, **validated},
        {"folder": str(top / "fsdp-stopped"), "fabric": fsdp, "kill": ["SIGINT", 5], **validated},
        {"folder": str(top / "fsdp-stopped"), "fabric": fsdp, **validated},
    ]
    if not any(item.path == request.path and item.get_closest_marker("long") for item in request.session.items):
        make_together(together)
        return top
    for name in ("one-then-two", "one-then-sharded"):
        interrupt = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None  # noqa: E731
        toy_fit(toy_config(top / name, **LINES), toy_parts(interrupt))
    ddp = {"devices": 2, "strategy": "ddp"}
    together += [
        {"folder": str(top / "ddp"), "fabric": ddp},
        {"folder": str(top / "ddp-stopped"), "fabric": ddp, **stop, **validated},
        {"folder": str(top / "ddp-stopped"), "fabric": ddp, "kill": ["SIGINT", 5], **validated},
        {"folder": str(top / "ddp-stopped"), "fabric": ddp, **validated},
        {"folder": str(top / "sharded-then-one"), "fabric": fsdp, **stop},
        {"folder": str(top / "one-then-two"), "fabric": ddp},
        {"folder": str(top / "one-then-sharded"), "fabric": fsdp},
    ]
    for name, fabric in (("ddp", ddp), ("fsdp", fsdp)):  # rows of the log that a stop cuts through
        together += [
            {"folder": str(top / f"{name}-rows"), "fabric": fabric, "rows": 4},
            {"folder": str(top / f"{name}-rows-stopped"), "fabric": fabric, "rows": 4, **stop},
            {"folder": str(top / f"{name}-rows-stopped"), "fabric": fabric, "rows": 4, "kill": ["SIGINT", 5]},
            {"folder": str(top / f"{name}-rows-stopped"), "fabric": fabric, "rows": 4},
        ]
    adapted = toy_lora()
    toy_fit(toy_config(top / "lora-one", lora=adapted, **LINES), adapted_parts(adapted))
    together += [
        {"folder": str(top / "lora-ddp"), "fabric": ddp, "lora": True},
        {"folder": str(top / "lora-fsdp"), "fabric": fsdp, "lora": True, **stop},
        {"folder": str(top / "lora-fsdp"), "fabric": fsdp, "lora": True},
    ]
    make_together(together)
    toy_fit(toy_config(top / "sharded-then-one", **LINES))
    return top


@pytest.mark.parametrize("lora", ["", pytest.param("lora-", marks=pytest.mark.long)], ids=["whole", "adapters"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_learn_what_one_learns(runs: Path, strategy: str, lora: str) -> None:
    """Shards supervise different numbers of positions: only a division by the global counts gives this."""
    one, two = losses(runs / f"{lora}one"), losses(runs / f"{lora}{strategy}")
    assert one.shape == (8, 3)
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
    ours, theirs = final_tensors(runs / f"{lora}{strategy}"), final_tensors(runs / f"{lora}one")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    if lora:
        assert_adapters_learn(runs / f"{lora}{strategy}", toy_lora())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_measure_the_held_out_loss_that_one_measures(runs: Path, strategy: str) -> None:
    """Of five batches one process has three and the other two: only sums over counts of all of them give this."""
    one, two = (read_table(runs / name / VALIDATION) for name in ("one", f"{strategy}-stopped"))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [2, 4, 6, 8]
    names = ["loss", "loss/text", "loss/audio", "loss/audio0", "loss/A1A2", "loss/T1T2"]
    for ours, theirs in zip(two, one, strict=True):
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_stopped_processes_end_bitwise_where_undisturbed_ones_end(runs: Path, strategy: str) -> None:
    """The undisturbed ones do not validate either: the running average stands in for the weights, and goes again."""
    stopped, whole = final_tensors(runs / f"{strategy}-stopped"), final_tensors(runs / strategy)
    for name, tensor in whole.items():
        assert tensor.equal(stopped[name]), name
    assert losses(runs / f"{strategy}-stopped").shape == (8, 3)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_stopped_processes_log_bitwise_what_undisturbed_ones_log(runs: Path, strategy: str) -> None:
    """Each row of the log sums four steps, some before a stop and some after it; only times differ."""
    stopped, whole = (
        [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in read_table(runs / name / METRICS)]
        for name in (f"{strategy}-rows-stopped", f"{strategy}-rows")
    )
    assert [row["step"] for row in whole] == [4, 8] and "gradient_norm" in whole[0]
    assert stopped == whole


@pytest.mark.long
@pytest.mark.parametrize("name", ["", "lora-"])
def test_memory_is_that_of_a_process(runs: Path, name: str) -> None:
    """Shards are half as large as whole tensors, up to a row."""
    whole, shared = (read_table(runs / f"{name}{strategy}" / METRICS)[-1] for strategy in ("ddp", "fsdp"))
    for part in ("memory/weights", "memory/gradients", "memory/optimizer", "memory/average"):
        assert 0.5 <= shared[part] / whole[part] < 0.6, part


def test_sharded_checkpoints_have_a_file_per_process(runs: Path) -> None:
    folder = retention.newest(runs / "fsdp" / "checkpoints")
    assert folder is not None and len(list((folder / "tensors").glob("*.safetensors"))) == 2
    assert retention.read_state(folder)["processes"] == 2
    assert set(retention.read_state(folder)["packer_shards"]) == {"0.0", "1.0", "2.0", "3.0"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["sharded-then-one", "one-then-two", "one-then-sharded"])
def test_a_run_goes_on_with_another_number_of_processes(runs: Path, name: str) -> None:
    torch.testing.assert_close(losses(runs / name), losses(runs / "one"), rtol=1e-4, atol=1e-4)
    ours = final_tensors(runs / name)
    for key, tensor in final_tensors(runs / "one").items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.long
def test_a_guard_changes_nothing_and_has_nothing_to_say(tmp_path: Path) -> None:
    """Its two processes are started by Fabric's own launcher."""
    strategies = ("ddp", "fsdp")
    runs = [
        {"folder": str(tmp_path / f"{strategy}-{guard}"), "fabric": {"devices": 2, "strategy": strategy}, "steps": 3}
        | ({"guard": True} if guard else {})
        for strategy in strategies
        for guard in (0, 1)
    ]
    done = Program("tests.train.toys", json.dumps({"runs": runs})).end(180)
    assert done.code == 0, done.said
    said = done.out + done.said
    assert said.count("finished: 3 steps") == 4 and "guard, step" not in said
    for strategy in strategies:
        guarded = final_tensors(tmp_path / f"{strategy}-1")
        for name, tensor in final_tensors(tmp_path / f"{strategy}-0").items():
            assert tensor.equal(guarded[name]), name


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_two_processes_killed_and_started_again(runs: Path, tmp_path: Path, launcher: str) -> None:
    """kill -9 of one in step 5, and the launcher starts both again: they go on, also where the run was to start over."""
    options = {"folder": str(tmp_path), "fabric": {"strategy": "ddp"}, "resume": "restart"}
    shutil.copytree(runs / "fsdp", tmp_path, dirs_exist_ok=True)  # an earlier run, which the first start deletes
    dead, other = two("tests.train.toys", json.dumps({**options, "kill": ["SIGKILL", 5]}), launcher=launcher)
    assert (dead.code, other.code) == (-signal.SIGKILL, LostError.code)
    assert re.search(r"error: step \d, process 1, .*(from rank 0|Connection closed|reset by peer)", other.said), other.said
    assert retention.newest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000003"
    assert [row["step"] for row in read_table(tmp_path / METRICS)] == [1, 2, 3, 4, 5]
    first, second = two("tests.train.toys", json.dumps(options), launcher=launcher, again=True)
    assert (first.code, second.code) == (0, 0) and "step 3 " not in first.said and "step 4 " in first.said, first.said
    resumed, whole = final_tensors(tmp_path), final_tensors(runs / "ddp")
    for name, tensor in whole.items():
        assert tensor.equal(resumed[name]), name


def test_only_the_launch_that_deleted_an_earlier_run_goes_on_with_the_present_one(tmp_path: Path) -> None:
    """A process may also be lost before the earlier run is deleted; and what another launch has deleted is not this one's."""
    before = tmp_path / "checkpoints" / "step-00000003"

    def deletes(launch: dict[str, str], again: bool) -> bool:
        before.mkdir(parents=True, exist_ok=True)
        gone = retention.restart(tmp_path, launch_names(launch), again)
        assert gone != before.exists()
        return gone

    torchrun, nodes = {"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "job 5", "GROUP_WORLD_SIZE": "2"}
    slurm = {"SLURM_JOB_ID": "7"}
    for launch in (torchrun, nodes, slurm, {**slurm, **torchrun}):
        (tmp_path / retention.RESTARTED).unlink(missing_ok=True)
        assert [deletes(launch, again) for again in (True, True, False, True)] == [True, False, True, False]
        assert deletes({"SLURM_JOB_ID": "8"}, True)
    assert deletes({}, False) and deletes({}, False)
    assert restarted({**torchrun, "TORCHELASTIC_RESTART_COUNT": "1"}) and restarted({**slurm, "SLURM_RESTART_COUNT": "2"})
    assert not restarted({**torchrun, "TORCHELASTIC_RESTART_COUNT": "0"}) and not restarted(slurm)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("block", "launcher"), [(".step-00000006.writing", "torchrun"), ("last", "srun")])
def test_a_checkpoint_that_one_process_cannot_write_ends_both(tmp_path: Path, block: str, launcher: str) -> None:
    """At its beginning or at its end, where only the first process writes: the other must not wait for hours."""
    options = {"folder": str(tmp_path), "fabric": {"strategy": "ddp"}, "block": [block, 4]}
    assert two_processes(options, launcher=launcher, seconds=60) == [2, 2]
    newest = retention.newest(tmp_path / "checkpoints")
    assert newest is not None and retention.read_state(newest)["step"] == int(newest.name[5:])


@pytest.mark.long
def test_weights_are_exported_one_by_one(tmp_path: Path) -> None:
    """The first process reads them while it writes, and the others gather with it: until the last one, or until it fails."""
    runs = []
    for name, fails in (("ddp", False), ("fsdp", False), ("fsdp", True)):
        folder = str(tmp_path / f"{name}-fails" if fails else tmp_path / name)
        runs.append({"folder": folder, "fabric": {"strategy": name}, "export": [f"{folder}-file", fails], "steps": 2})
    ended = two("tests.train.toys", json.dumps({"runs": runs}), seconds=60)
    assert [one.code for one in ended] == [2, 2] and "file is on a full disk (process 0)" in ended[1].said, ended[0].said
    for name in ("ddp", "fsdp"):
        exported, final = load_file(tmp_path / f"{name}-file"), final_tensors(tmp_path / name)
        assert len(exported) == sum(key.startswith("model.model.") for key in final)
        assert all(tensor.equal(final[f"average.model.{key}"]) for key, tensor in exported.items())
    assert f"gathered 0 weights, 0 at once\ngathered {len(exported)} weights, 1 at once" in ended[0].out


@pytest.mark.long
def test_a_process_that_leaves_lets_the_threads_of_its_group_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the interpreter's lock when the group ends gets it before the process goes on to its end."""
    ended: list[str] = []
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "destroy_process_group", lambda: ended.append("group"))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody gets the lock but from one who waits
    try:
        start_new_thread(lambda: ended.append("thread"), ())
        parallel.leave()
    finally:
        sys.setswitchinterval(before)
    assert ended == ["group", "thread"]


def test_only_the_decoders_blocks_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder's would be compiled again for every batch."""
    from tests.train.data.toys import MODELS

    for config in (MODELS["codec2"], replace(MODELS["codec2"], decoder=replace(MODELS["codec2"].decoder, post_layers=1))):
        module = torch.nn.ModuleDict({"model": SpeechModel(config)})
        compiled: list[torch.nn.Module] = []
        monkeypatch.setattr(torch.nn.Module, "compile", lambda self, compiled=compiled: compiled.append(self))
        compile_blocks(module)
        decoder = module["model"].decoder
        assert compiled == [*decoder.blocks, *(decoder.post_blocks if config.decoder.post_layers else [])]


def test_placement_follows_who_started_the_processes() -> None:
    alone, torchrun = {}, {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
    srun = {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_JOB_NAME": "train"}
    assert placement(FabricConfig(), alone) == ("auto", 1)
    assert placement(FabricConfig(devices="2", num_nodes=2), alone) == (2, 2)
    assert placement(FabricConfig(), torchrun) == (4, 2)
    assert placement(FabricConfig(devices=4, num_nodes=2), torchrun) == (4, 2)
    assert placement(FabricConfig(), srun) == (2, 3)
    assert placement(FabricConfig(), {**srun, "SLURM_JOB_NAME": "interactive"}) == ("auto", 1)
    with pytest.raises(UserError, match=r"fabric\.devices is 8\b.*\btorchrun\b.*\b4\b"):
        placement(FabricConfig(devices=8), torchrun)


def test_muon_refuses_slices(tmp_path: Path) -> None:
    """Muon needs whole matrices; the error names the way out."""
    with pytest.raises(UserError, match=r"optimizer\.name adamw\b.*\bddp\b"):
        toy_config(tmp_path, optimizer=OptimizerConfig(name="muon"), fabric=FabricConfig(strategy="fsdp"))
