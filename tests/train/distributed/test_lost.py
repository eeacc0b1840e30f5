"""A process that does not go on, or is lost: the others end with a line, and PyTorch names it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from omni.errors import LostError
from tests.processes import Ended, two
from train.distributed.process_group import is_lost


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
