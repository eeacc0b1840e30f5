"""A process that does not go on, or is lost: the others name it and what it did, and end where it never comes back."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from omni.errors import LostError
from tests.processes import Ended, two
from train.distributed.activity import Activity, Identity, Note, judge
from train.distributed.watchdog import is_lost

WHERE = r"\(host \S+, pid \d+"
"""Beginning of what says where a process is."""


def losing(folder: Path, *lose: Any, patience: float = 1.0, give_up: float | None = None, **more: Any) -> dict[str, Any]:
    fabric = {"strategy": more.pop("strategy", "ddp"), "patience_seconds": patience, "give_up_seconds": give_up}
    return {"folder": str(folder), "fabric": fabric, "lose": lose, **more}


def ended(*runs: dict[str, Any]) -> list[Ended]:
    return two("tests.train.toys", json.dumps({"runs": runs}), seconds=60)


# --- which process it is --------------------------------------------------------------------------------------------------

NOW = 1000.0
HOSTS = [Identity("node0", 100, ""), Identity("node0", 101, ""), Identity("node7", 102, "")]


def note(phase: str, place: tuple[int, int], age: float = 310.0, silent: float = 0.5, long: bool = False) -> Note:
    return Note(1, Activity(120, phase, long, 0.0, *place), age, None, NOW - silent)


def waiting(phase: str = "exchange of counts", place: tuple[int, int] = (40, 0), long: bool = False) -> Activity:
    return Activity(120, phase, long, NOW - 300, *place, waiting=place[1] == 0)


def test_whoever_is_furthest_behind_holds_up_the_others() -> None:
    notes = [None, note("exchange of counts", (40, 0)), note("waiting for data", (39, 4), age=311.4)]
    verdict = judge(0, waiting(), notes, HOSTS, NOW, 10)
    assert (verdict.culprits, verdict.final) == ([2], True)
    itself = judge(2, waiting("waiting for data", (39, 4)), [notes[1], notes[1], None], HOSTS, NOW, 10)
    assert (itself.culprits, itself.final) == ([2], True)
    assert verdict.line == (
        'step 120: waiting 300 s in "exchange of counts" for process 2, which has been in "waiting for data" for 312 s '
        "(host node7, pid 102)"
    )


def test_of_processes_in_one_phase_the_silent_one_holds_up_the_others() -> None:
    own = waiting("backward pass", (40, 3))
    notes = [None, note("backward pass", (40, 3)), note("backward pass", (40, 3), silent=250)]
    verdict = judge(0, own, notes, HOSTS, NOW, 10)
    assert (verdict.culprits, verdict.final) == ([2], True)
    assert 'process 2, which was last heard of 250 s ago, in "backward pass" (host node7, pid 102)' in verdict.line
    verdict = judge(0, own, [None, note("backward pass", (40, 3)), None], HOSTS, NOW, 10)
    assert verdict.culprits == [2] and "process 2, which has not been heard of (host node7, pid 102)" in verdict.line


def test_a_phase_that_may_take_any_time_ends_no_run_while_its_process_lives() -> None:
    own = waiting("validation answers", (40, 0), long=True)
    others = note("validation answers", (40, 0), long=True)
    for silent, final in ((0.5, False), (60, True)):
        notes = [note("validation answers", (39, 2), silent=silent, long=True), None, others]
        verdict = judge(1, own, notes, HOSTS, NOW, 10)
        assert (verdict.culprits, verdict.final) == ([0], final)
        assert ("may take any time" in verdict.line) != final


def test_an_error_of_the_connection_is_found_below_what_it_has_caused() -> None:
    closed = RuntimeError("[/x/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
    other = ValueError("the checkpoint cannot be read")
    other.__cause__ = closed
    assert is_lost(closed) and is_lost(other)
    assert not is_lost(RuntimeError("shapes differ")) and not is_lost(OSError("Connection reset by peer"))


# --- two processes --------------------------------------------------------------------------------------------------------


def test_who_holds_up_a_run_is_told_and_it_goes_on(tmp_path: Path) -> None:
    """One start: data that take long, a process that is stopped for a while, a validation by the first process; and one that
    dies, where the other ends."""
    first, second = ended(
        losing(tmp_path / "slow", 1, 2, "sleep", 1.3, answers=1.3, validate=4, steps=4),
        losing(tmp_path / "stopped", 1, 1, "stop", 1.7, strategy="fsdp", steps=2),
        losing(tmp_path / "dead", 1, 4, "kill", 0, strategy="fsdp"),
    )
    assert (first.code, second.code) == (LostError.code, -signal.SIGKILL), first.said + second.said
    assert re.search(
        rf'\nerror: step 5: process 1 has died in "waiting for data" {WHERE}\); the same command goes on from the last check',
        first.said,
    )
    assert "Connection closed" not in first.said and "Traceback" not in first.said
    lines, others = ([line for line in one.said.splitlines() if re.match(r"step \d: ", line)] for one in (first, second))
    own = r"process 0 is in gloo:\w+ of .*, the group's number \d+"
    late = rf'which has been in "waiting for data" for \d s {WHERE}\)'
    silent = rf'which was last heard of \d s ago, in "waiting for data" {WHERE}; it is stopped\)'
    for step, why in ((3, late), (2, f"({silent}|{late})")):  # a busy machine says more, or earlier
        line = rf'step {step}: waiting \d s in "exchange of counts" for process 1, {why}; {own}'
        assert any(re.fullmatch(line, one) for one in lines), first.said
    line = (
        r'step 4: waiting \d s for process 0, which has been in "validation answers" for \d s '
        rf"{WHERE}\); that may take any time; process 1 is in gloo:\w+ of .*, the group's number \d+"
    )
    assert any(re.fullmatch(line, one) for one in others), second.said


@pytest.mark.long
@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_what_never_goes_on_is_ended_in_all_processes(tmp_path: Path, how: str) -> None:
    """The process that hangs says where, unless it is stopped: that one keeps the processes' store, too."""
    rank = 1 if how == "sleep" else 0
    programs = ended(losing(tmp_path, rank, 4, how, 0, give_up=1.5))
    hanging, other = programs[rank], programs[1 - rank]
    assert other.code == LostError.code, other.said
    assert re.search(
        rf"error: step 5: waiting \d s .* for process {rank}, .*{WHERE}.*; the run ends .*last checkpoint", other.said
    )
    if how == "sleep":
        assert hanging.code == LostError.code and re.search(r"process 1 \(pid \d+\) is here:\n(.|\n)*in lose\n", hanging.said)


@pytest.mark.parametrize("steps", [3, pytest.param(8, marks=pytest.mark.long)])
def test_a_process_that_is_stopped_while_it_writes_a_checkpoint_ends_the_others(tmp_path: Path, steps: int) -> None:
    """Which wait for it in the exchanges of the last save, or, before it, of a step."""
    first, _ = ended(losing(tmp_path, 1, 2, "write", 0, steps=steps, give_up=1.5))
    assert first.code == LostError.code and "the run ends (fabric.give_up_seconds)" in first.said, first.said
    assert re.search(rf"error: step \d: waiting \d s .*process 1, .*{WHERE}; it is stopped", first.said), first.said


@pytest.mark.long
def test_a_process_that_ended_by_an_error_of_its_own_is_named_with_it(tmp_path: Path) -> None:
    other, failed = ended(losing(tmp_path, 1, 4, "fail", 0))
    assert (other.code, failed.code) == (LostError.code, 1) and "RuntimeError: a mistake of its own" in failed.said
    assert re.search(
        r'error: step 5: process 1 has ended in "waiting for data" \(RuntimeError: a mistake of its own\) ', other.said
    )
