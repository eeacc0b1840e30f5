"""Laws of checkpoints that are written while the run trains on. Writers are held by events, not by the clock."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omni.errors import UserError
from tests.processes import Program, two
from tests.train.toys import final_tensors, toy_config, toy_fit, toy_parts
from train.checkpoint import checkpointer, retention, state
from train.checkpoint.checkpointer import StateCopy, lacking_memory
from train.config.sections import CheckpointConfig, LogConfig, OptimizerConfig, ValidationConfig
from train.trainer.signals import SAME

EVERY_2 = CheckpointConfig(every_steps=2, every_minutes=None, keep_last=9)
BETWEEN = replace(EVERY_2, asynchronous=False)


def files(folder: Path) -> dict[str, Any]:
    """A run's checkpoints, file by file: bytes, but for times, the key itself, and the order of the notes in a shard's header,
    which PyTorch writes at random."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in (folder / "checkpoints").rglob("*") if path.is_file()):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        shard = file.name.startswith("shard")
        found[str(file.relative_to(folder))] = (json.loads(content[8:end]), content[end:]) if shard else content
        if file.name == state.STATE:
            data = json.loads(file.read_text())
            data["config"]["checkpoint"]["asynchronous"] = data["config"]["run_folder"] = None
            data |= {"seconds": 0, "saved": data["saved"][0], "validated": data["validated"][0]}
            found[str(file.relative_to(folder))] = data
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], threading.Event]]:
    """Holds the write of a step's checkpoint, in its thread, until the event that this returns is set."""
    events: dict[str, threading.Event] = {}
    write = state.write

    def later(captured: Any, group: Any) -> Path:
        if captured.target.name in events and not events[captured.target.name].is_set():
            assert threading.current_thread() is not threading.main_thread()
            assert events[captured.target.name].wait(60)
        return write(captured, group)

    monkeypatch.setattr(state, "write", later)
    yield lambda step: events.setdefault(retention.name_of(step), threading.Event())
    for event in events.values():
        event.set()


OPTIMIZERS = [OptimizerConfig(lr=1e-2), OptimizerConfig(name="muon"), OptimizerConfig(name="paged_adamw_8bit")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_a_checkpoint_is_of_one_step_and_bitwise_what_a_synchronous_save_writes(
    tmp_path: Path, held: Callable[[int], threading.Event], optimizer: OptimizerConfig
) -> None:
    """Two steps are taken before the first byte of the checkpoint of step 5 is written."""
    done, plan = held(5), replace(EVERY_2, every_steps=5)
    before = lambda step: done.set() if step == 7 else None  # noqa: E731
    toy_fit(toy_config(tmp_path / "beside", optimizer=optimizer, checkpoint=plan), toy_parts(before))
    toy_fit(toy_config(tmp_path / "between", optimizer=optimizer, checkpoint=replace(plan, asynchronous=False)))
    assert files(tmp_path / "beside") == files(tmp_path / "between")
    assert [p.name for p in retention.checkpoints(tmp_path / "beside/checkpoints")] == ["step-00000005", "step-00000008"]


def test_a_save_waits_for_the_one_before_and_the_end_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = state.write

    def slow(captured: Any, group: Any) -> Path:
        order.append(f"{captured.target.name} begun")
        threading.Event().wait(0.05)  # long enough for several steps
        order.append(f"{captured.target.name} written")
        return write(captured, group)

    monkeypatch.setattr(state, "write", slow)
    outcome, _ = toy_fit(toy_config(tmp_path, checkpoint=replace(EVERY_2, every_steps=1)))
    assert order == [f"{retention.name_of(step)} {what}" for step in range(1, 9) for what in ("begun", "written")]
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step-00000008" and (outcome.checkpoint / state.STATE).is_file()


def test_a_signal_ends_a_run_when_both_its_states_are_written(tmp_path: Path, held: Callable[[int], threading.Event]) -> None:
    done = held(2)

    def before(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.1, done.set).start()

    outcome, _ = toy_fit(toy_config(tmp_path, checkpoint=EVERY_2), toy_parts(before))
    assert (outcome.step, outcome.signal) == (3, signal.SIGTERM)
    assert [p.name for p in retention.checkpoints(tmp_path / "checkpoints")] == ["step-00000002", "step-00000003"]


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, held: Callable[[int], threading.Event]) -> None:
    done = held(2)

    def before(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(SAME)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        toy_fit(toy_config(tmp_path, checkpoint=EVERY_2), toy_parts(before))
    assert not done.is_set() and not retention.checkpoints(tmp_path / "checkpoints")


def test_validations_see_what_is_written_and_their_figures_get_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slow writer the same checkpoints are kept, with the same figures, as when each is written at once."""
    scores = {2: 0.1, 4: 0.9, 6: 0.3, 8: 0.9}
    write = state.write
    for name, wait in (("fast", 0.0), ("slow", 0.05)):

        def later(captured: Any, group: Any, wait: float = wait) -> Path:
            threading.Event().wait(wait)
            return write(captured, group)

        monkeypatch.setattr(state, "write", later)
        plan = CheckpointConfig(every_steps=2, every_minutes=None, keep_last=1, asynchronous=bool(wait))
        config = toy_config(tmp_path / name, validation=ValidationConfig(every_steps=2), checkpoint=plan)
        toy_fit(config, toy_parts(validate=lambda weights, step: {"exact_match": scores[step]}))
    assert files(tmp_path / "slow") == files(tmp_path / "fast")
    kept = retention.checkpoints(tmp_path / "slow" / "checkpoints")
    assert [retention.read_state(folder)["figures"] for folder in kept] == [{"exact_match": 0.9}] * 2


def test_a_failure_ends_the_run_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, begun, begin = threading.Event(), threading.Event(), checkpointer.in_background

    def noted(work: Callable[[], None]) -> Any:
        done = begin(work)
        done.add_done_callback(lambda _: failed.set())
        return done

    def refuse(folder: Path) -> None:
        assert begun.wait(60)
        raise OSError(28, "No space left on device")

    seen: list[int] = []

    def before(step: int) -> None:
        seen.append(step)
        if step == 3:
            begun.set()
            assert failed.wait(60)

    monkeypatch.setattr(checkpointer, "in_background", noted)
    monkeypatch.setattr(state, "sync", refuse)
    with pytest.raises(UserError, match=r"step-00000002 cannot be written: no space left on the disk; there is no earlier one"):
        toy_fit(toy_config(tmp_path, checkpoint=EVERY_2), toy_parts(before))
    assert seen == [0, 1, 2, 3] and not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.long
def test_killed_while_it_writes_a_run_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    """kill -9 in step 6, while the checkpoint of step 4 is complete but for its name."""
    options = {"folder": str(tmp_path), "every": 2, "kill": ["SIGKILL", 5], "asynchronous": True, "hold": ["sync", 4, 99]}
    ended = Program("tests.train.toys", json.dumps(options)).end()
    assert ended.code == -signal.SIGKILL, ended.said
    place = tmp_path / "checkpoints"
    assert sorted(p.name for p in place.iterdir()) == [".step-00000004.writing", "last", "step-00000002"]
    assert load_file(place / ".step-00000004.writing" / "tensors" / "state.safetensors")
    asynchronous_now = toy_config(tmp_path, checkpoint=BETWEEN)  # the key may change
    assert toy_fit(asynchronous_now)[0].step == 8
    toy_fit(toy_config(tmp_path / "whole"))
    whole = final_tensors(tmp_path / "whole")
    assert all(tensor.equal(whole[name]) for name, tensor in final_tensors(tmp_path).items())


@pytest.mark.long
def test_two_processes_write_beside_their_steps_what_they_write_between_them(tmp_path: Path) -> None:
    """The writers of both wait until another step is done, and exchange their messages while steps exchange theirs."""
    runs = []
    for strategy in ("ddp", "fsdp"):
        fabric = {"devices": 2, "strategy": strategy}
        plain = {"folder": str(tmp_path / f"{strategy}-between"), "fabric": fabric, "asynchronous": False}
        runs += [plain, {"folder": str(tmp_path / f"{strategy}-beside"), "fabric": fabric, "hold": ["write", 6, 7]}]
    for ended in two("tests.train.toys", json.dumps({"runs": runs})):
        assert ended.code == 0, ended.said
    for strategy in ("ddp", "fsdp"):
        beside, between = (files(tmp_path / f"{strategy}-{name}") for name in ("beside", "between"))
        assert beside == between and any("step-00000006/tensors" in name for name in between)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("free_memory", lambda: 1000.0, r"a copy of the state takes 0\.00 GiB, and 0\.00 GiB are free on"),
        ("pages", lambda size: (_ for _ in ()).throw(OSError("no pages")), r"no copy of the state \(no pages\)"),
    ],
)
def test_without_memory_for_a_copy_a_run_writes_between_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, value: Any, why: str
) -> None:
    monkeypatch.setattr(checkpointer, name, value)
    monkeypatch.setattr(checkpointer, "in_background", None)
    toy_fit(toy_config(tmp_path / "a", checkpoint=EVERY_2, log=LogConfig(1, "lines")))
    said = capfd.readouterr().err
    assert said.count("checkpoints are written between the steps: ") == 1
    assert re.search(why, said), said
    toy_fit(toy_config(tmp_path / "b", checkpoint=BETWEEN, log=LogConfig(1, "lines")))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_memory_is_counted_for_all_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [("a", 40, 5, 100.0), ("a", 40, 0, 98.0), ("b", 10, 0, 200.0)]
    group: Any = SimpleNamespace(gather=lambda value: told)
    assert lacking_memory(0, True, group) is None  # 80 of 93 that are free besides the growth of steps
    told[0] = ("a", 45, 5, 100.0)
    assert (lacking_memory(0, True, group) or "").endswith("free on a")


def capture_of(tensors: dict[str, torch.Tensor], **changes: Any) -> state.CheckpointContent:
    return replace(state.CheckpointContent(Path(), "", [], tensors, False, None), **changes)


def test_copies_keep_their_memory_and_lie_as_in_the_file(tmp_path: Path) -> None:
    source = {"a": torch.randn(300, 70).T, "b": torch.arange(5), "c": torch.tensor(2.0), "d": torch.zeros(0, 3)}
    kept = StateCopy(torch.device("cpu"))
    first = kept.take(capture_of(source, balance={"a": torch.ones(3)}))
    assert all(first.tensors[name].equal(t) for name, t in source.items())
    before = {name: t.clone() for name, t in source.items()}
    source["a"].add_(1)
    assert all(first.tensors[name].equal(t) for name, t in before.items()) and first.balance is not None
    assert first.balance["a"].tolist() == [1, 1, 1]
    state.save_tensors(first.tensors, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    start = min(t.data_ptr() for t in first.tensors.values() if t.numel())
    for name, tensor in first.tensors.items():
        if tensor.numel():
            place = begin + int(header[name]["data_offsets"][0])
            assert (tensor.data_ptr() - place) % 4096 == 0, name
    second = kept.take(capture_of(source))
    assert min(t.data_ptr() for t in second.tensors.values() if t.numel()) == start
    assert second.tensors["a"].equal(source["a"])


def test_copies_from_a_gpu_go_into_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the calls that are made: registered once with its size, waited for, and given back."""
    calls: list[tuple[Any, ...]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(("register", *args)),
        cudaHostUnregister=lambda *args: calls.append(("unregister", *args)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("synchronize",)))
    kept = StateCopy(torch.device("cuda"))
    place = 0
    for _ in range(2):
        taken = kept.take(capture_of({"a": torch.ones(2000)}))
        place = taken.tensors["a"].data_ptr() // 4096 * 4096
    kept.release()
    assert calls == [("register", place, 8192, 0), ("synchronize",), ("synchronize",), ("unregister", place)]
