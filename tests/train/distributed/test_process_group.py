"""Processes that meet: what differs between them is found before anything is trained, nobody waits in silence, and one that
does not go on, or is lost, is named with what the others wait in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from omni.errors import LostError, UserError
from tests.processes import Ended, Program, environment, free_port, two
from train import cli
from train.distributed import process_group
from train.distributed.process_group import described, fresh, is_lost
from train.trainer.usage import worker_lost


def test_configurations_that_differ_are_named_with_process_host_and_both_values() -> None:
    same: dict[str, Any] = {"seed": 0, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}
    process_group._check_same([["a", same], ["b", {**same}]])
    for other, said in (
        ({**same, "seed": 3}, r"process 1 \(host b\) has seed 3, and the first process 0; start all with the same"),
        ({**same, "optimizer": {"lr": 0.2, "betas": [0.9, 0.95]}}, r"has optimizer.lr 0\.2, and the first process 0\.1"),
        ({"seed": 0}, r"has optimizer.lr None"),
        ({**same, "more": 1}, r"has more 1, and the first process None"),
    ):
        with pytest.raises(UserError, match=said) as error:
            process_group._check_same([["a", same], ["b", other]])
        assert error.value.shared


def test_a_run_folder_that_another_process_does_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "LOOKS", (0.0, 0.0))
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()

    def group(first: bool) -> Any:
        broadcast = lambda value: value if first else (".shared-x", "a")  # noqa: E731
        return SimpleNamespace(world=2, rank=1 - first, first=first, broadcast=broadcast, together=lambda work: work())

    process_group.check_shared(here, group(True))
    assert not list(here.iterdir())
    said = r"process 1 \(host .*\) does not see .*there of the first process \(host a\); name a folder that all nodes share"
    with pytest.raises(UserError, match=said):
        process_group.check_shared(there, group(False))
    alone = SimpleNamespace(world=1)
    process_group.check_shared(there, alone)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_whoever_waits_at_the_start(number: int) -> None:
    """The library waits in code that no handler of Python's interrupts."""
    program = (
        "import os, signal, sys\n"
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        "from omni.utils.process import end_in_order\n"
        "from train.distributed.process_group import _meeting\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        "end_in_order()\n"
        "with _meeting(2, '127.0.0.1', sys.argv[1]):\n"
        "    print('waits', flush=True)\n"
        "    dist.TCPStore('127.0.0.1', int(sys.argv[1]), 2, True, timedelta(seconds=60))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, free_port()], stdout=subprocess.PIPE, env=environment()) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == b"waits\n"
        time.sleep(0.2)
        waiting.send_signal(number)
        assert waiting.wait(10) == -number


def test_a_mistake_that_only_another_process_has_is_told_by_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(cli, "GRACE", 0.0)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert cli.main(["fti"]) == 2
    assert "error: process 2 (host " in capsys.readouterr().err


def test_a_data_worker_that_was_killed_is_no_mistake_of_ours() -> None:
    error = RuntimeError("DataLoader worker (pid 9919) is killed by signal: Killed. ")
    assert worker_lost(RuntimeError("worker"), 7, 1) is None
    found = worker_lost(error, 7, 1)
    assert found is not None and found.code == 75
    assert str(found).startswith("step 7: a data worker (pid 9919) of process 1 was killed, for lack of memory perhaps")


def test_a_start_shares_its_keys_with_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first process, or another one, is late: the others have left words and answers from the start before."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)

    def start(rank: int, number: int, late: int) -> dist.Store:
        time.sleep(0.2 * (rank == late))
        store = fresh(rank, 3)
        assert not store.check([f"address of {rank}"])
        store.set(f"address of {rank}", str(number))
        return store

    for number, late in enumerate((-1, 0, 1, 2)):
        with ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(lambda rank, number=number, late=late: start(rank, number, late), range(3)))
        assert [store.get(f"address of {rank}") for store in stores for rank in range(3)] == [str(number).encode()] * 9
    del server


def losing(folder: Path, *lose: Any, strategy: str = "ddp", timeout: float = 60.0, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "fabric": {"strategy": strategy, "timeout_seconds": timeout}, "lose": lose, **more}


def ended(*runs: dict[str, Any]) -> list[Ended]:
    return two("tests.train.toys", json.dumps({"runs": runs}), seconds=60)


def test_an_error_of_the_connection_is_found_below_what_it_has_caused() -> None:
    closed = RuntimeError("[/x/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
    other = ValueError("the checkpoint cannot be read")
    other.__cause__ = closed
    assert is_lost(closed) and is_lost(other)
    assert not is_lost(RuntimeError("shapes differ")) and not is_lost(OSError("Connection reset by peer"))


def test_a_process_that_dies_ends_the_others_and_one_that_is_slow_does_not(tmp_path: Path) -> None:
    first, second = ended(
        losing(tmp_path / "slow", 1, 2, "sleep", 1.3, answers=1.3, validate=4, steps=4),
        losing(tmp_path / "stopped", 1, 1, "stop", 1.7, strategy="fsdp", steps=2),
        losing(tmp_path / "dead", 1, 4, "kill", 0, strategy="fsdp"),
    )
    assert (first.code, second.code) == (LostError.code, -signal.SIGKILL), first.said + second.said
    assert re.search(r"\nerror: step 5, process 0, exchange of counts: .*Ranks 1 failed to pass monitoredBarrier", first.said)
    assert re.search(r"; it waited in gloo:\w+ of .*, the group's number \d+; the same command goes on from the", first.said)
    assert "Traceback" not in first.said and "slow: finished" not in second.said


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["sleep", pytest.param("stop", marks=pytest.mark.long)])
def test_what_never_goes_on_ends_the_others_which_name_it(tmp_path: Path, how: str, rank: int) -> None:
    """The first process knows who did not come; where it is the one, all others say so."""
    programs = ended(losing(tmp_path, rank, 4, how, 0, timeout=2))
    other, named = programs[1 - rank], "Ranks 1 failed to pass" if rank else "errors while waiting for send/recv from rank 0"
    assert other.code == LostError.code and re.search(rf"error: step 5, .*{named}.*; the same command", other.said), other.said


@pytest.mark.long
def test_a_process_that_is_stopped_while_it_writes_a_checkpoint_is_named_at_the_next_step(tmp_path: Path) -> None:
    first, _ = ended(losing(tmp_path, 1, 2, "write", 0, timeout=2))
    assert first.code == LostError.code and "Ranks 1 failed to pass" in first.said, first.said


@pytest.mark.long
def test_a_process_that_ended_by_an_error_of_its_own_says_it_and_ends_the_others(tmp_path: Path) -> None:
    other, failed = ended(losing(tmp_path, 1, 4, "fail", 0))
    assert (other.code, failed.code) == (LostError.code, 1) and "RuntimeError: a mistake of its own" in failed.said
    assert "error: step 5, process 0, exchange of counts" in other.said


def entry(name: str, number: int, state: str, size: int = 5) -> dict[str, Any]:
    words = {"profiling_name": name, "collective_seq_id": number, "state": state}
    return {**words, "input_sizes": [[size]], "process_group": ["0", "default_pg"]}


def test_it_is_the_first_that_has_not_ended_or_the_last_one_where_ends_are_not_seen() -> None:
    names = (("all_reduce", "completed"), ("all_gather", "started"), ("all_reduce", "scheduled"))
    nccl = [entry(f"nccl:{name}", number, state) for number, (name, state) in enumerate(names, 1)]
    assert described(nccl) == "nccl:all_gather of [5], the group's number 2"
    assert described(nccl[:1]) == "" == described([])
    gloo = [entry("gloo:all_reduce", 1, "scheduled"), entry("gloo:broadcast", 2, "scheduled", 1000)]
    assert described(gloo) == "gloo:broadcast of [1000], the group's number 2"
    assert described([{"profiling_name": "gloo:barrier"}]) == "gloo:barrier of nothing, the group's number ?"


def test_the_recorder_knows_gloos_collectives() -> None:
    """In a process of its own, as the recorder lives as long as its process."""
    ended = Program("tests.train.distributed.collectives_child", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()).end(60)
    assert ended.code == 0, ended.said
    assert ended.out.splitlines()[-1].startswith("gloo:all_reduce of [77], the group's number ")
