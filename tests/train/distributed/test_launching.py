"""Processes that meet: what differs between them is found before anything is trained, and nobody waits in silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni.errors import UserError
from tests.processes import environment, free_port
from train import cli
from train.distributed import process_group as launching
from train.trainer.usage import worker_lost


def told(**other: Any) -> list[Any]:
    return [["a", {"seed": 0, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}], ["b", {**other}]]


def test_configurations_that_differ_are_named_with_process_host_and_both_values() -> None:
    same = told()[0][1]
    launching._check_same([["a", same], ["b", {**same}]])
    for other, said in (
        ({**same, "seed": 3}, r"process 1 \(host b\) has seed 3, and the first process 0; start all with the same"),
        ({**same, "optimizer": {"lr": 0.2, "betas": [0.9, 0.95]}}, r"has optimizer.lr 0\.2, and the first process 0\.1"),
        ({"seed": 0}, r"has optimizer.lr None"),
        ({**same, "more": 1}, r"has more 1, and the first process None"),
    ):
        with pytest.raises(UserError, match=said) as error:
            launching._check_same([["a", same], ["b", other]])
        assert error.value.shared


def test_a_run_folder_that_another_process_does_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "LOOKS", (0.0, 0.0))
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()

    def group(sees: bool) -> Any:
        broadcast = lambda value: value  # noqa: E731
        return SimpleNamespace(world=2, first=True, broadcast=broadcast, gather=lambda own: [own, ("b", sees)])

    launching.check_shared(here, group(True))
    with pytest.raises(UserError, match=r"process 1 \(host b\) does not see .*here of the first process .*all nodes share"):
        launching.check_shared(here, group(False))
    assert not list(here.iterdir())
    other = SimpleNamespace(world=2, first=False, broadcast=lambda value: ".shared-x", gather=lambda own: [("a", True), own])
    with pytest.raises(UserError, match="process 1"):
        launching.check_shared(there, other)
    alone = SimpleNamespace(world=1)
    launching.check_shared(there, alone)  # type: ignore[arg-type]


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
    shared = UserError("all have it")
    shared.shared = True
    lost = SimpleNamespace(main=lambda words: (_ for _ in ()).throw(shared))
    monkeypatch.setitem(sys.modules, "lost", lost)  # type: ignore[arg-type]
    monkeypatch.setitem(cli.COMMANDS, "lost", ("lost", ""))
    assert cli.main(["lost"]) == 0 and capsys.readouterr().err == ""


def test_a_data_worker_that_was_killed_is_no_mistake_of_ours() -> None:
    error = RuntimeError("DataLoader worker (pid 9919) is killed by signal: Killed. ")
    assert worker_lost(RuntimeError("worker"), 7, 1) is None
    found = worker_lost(error, 7, 1)
    assert found is not None and found.code == 75
    assert str(found).startswith("step 7: a data worker (pid 9919) of process 1 was killed, for lack of memory perhaps")
