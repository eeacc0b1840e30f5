"""The documented command with `--max-restarts`: processes that are lost start again, and the run ends as if none had been."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import environment
from tests.train.toys import final_tensors

ROOT = Path(__file__).parents[3]
TINY = """
budget: {steps: 30}
fabric: {accelerator: cpu}
model:
  preset: nano
  encoder: {width: 32, layers: 1, heads: 2}
  decoder: {width: 32, layers: 1, heads: 2, kv_heads: 2, mlp_width: 64}
data:
  micro_batches: 2
  workers: 1
  packing: {rows: 2, length: 320, buffer: 8, too_long: skip}
  sources: [{kind: spoken-digits, tasks: {T1A2: 0.5, T1T2: 0.5}}]
validation: {questions: 0}
checkpoint: {every_steps: 5, every_minutes: null, keep_best: 0}
log: {every: 1, progress: lines}
"""
STARTING, TRAINING = 10.0, 3.0
"""Seconds from a start of the processes, or from their first step, to a death, at most."""


class Torchrun:
    """A run of two processes under torchrun; what it prints is in `said` when it has ended."""

    def __init__(self, folder: Path, strategy: str, *options: str) -> None:
        config = folder / "tiny.yaml"
        config.write_text(TINY)
        self.run, self.file = folder / strategy, folder / f"{strategy}.log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "4"]
        command = [*torchrun, "-m", "train", "fit", str(config), "--run_folder", str(self.run)]
        command += ["--fabric.strategy", strategy, *options]
        with self.file.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment())
        self.known: set[int] = set()

    def workers(self) -> list[int]:
        """Waits for new processes of the run, and gives their numbers by rank; none where torchrun has ended."""
        while self.process.poll() is None:
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
            found = sorted({int(pid) for task in tasks for pid in task.read_text().split()} - self.known)
            if len(found) == 2:
                self.known.update(found)
                return found
            time.sleep(0.05)
        return []

    def kill(self, rank: int, seconds: float, training: bool) -> bool:
        """Kills a process some time after its start, or its first step; False where it had ended."""
        workers, started, steps = self.workers(), time.time(), self.run / "metrics.csv"
        while training and self.process.poll() is None and not (steps.exists() and steps.stat().st_mtime > started):
            time.sleep(0.02)
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            time.sleep(0.02)
        if workers and self.process.poll() is None:
            os.kill(workers[rank], signal.SIGKILL)
            return True
        return False

    def end(self) -> int:
        code = self.process.wait(180)
        self.said = self.file.read_text()
        return code


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    for strategy in ("ddp", "fsdp"):
        run = Torchrun(folder, strategy)
        assert run.end() == 0, run.said
    return folder


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_at_any_moment_a_run_ends_bitwise_where_an_undisturbed_one_ends(
    tmp_path: Path, undisturbed: Path, strategy: str
) -> None:
    """Ten times by `kill -9`, twice in a launch, also while processes start; half of the launches are to start over."""
    dice, kills, whole = random.Random(strategy), 0, final_tensors(undisturbed / strategy)
    for launch in range(50):
        folder = tmp_path / str(launch)
        folder.mkdir()
        run = Torchrun(folder, strategy, *["--resume", "restart"] * (launch % 2))
        for _ in range(2):
            training = dice.random() < 0.7
            kills += run.kill(dice.randrange(2), dice.uniform(0, TRAINING if training else STARTING), training)
        assert run.end() == 0, run.said
        said = re.sub(r"Exception ignored in: (.|\n)*?SystemExit: 143\n", "", run.said)  # raised within a destructor, by Python
        assert "finished: 30 steps" in said and "Traceback" not in said, run.said
        resumed = final_tensors(run.run)
        assert resumed.keys() == whole.keys()
        for name, tensor in whole.items():
            assert tensor.equal(resumed[name]), name
        if kills >= 10:
            return
    raise AssertionError("processes end before they are killed")


@pytest.mark.long
def test_a_mistake_ends_torchrun_and_is_told_once(tmp_path: Path) -> None:
    run = Torchrun(tmp_path, "ddp", "--fabric.devices", "3")
    assert run.end() != 0 and run.said.count("error: ") == 1 and "torchrun has started 2" in run.said, run.said


@pytest.mark.long
def test_a_process_that_hangs_is_replaced(tmp_path: Path, undisturbed: Path) -> None:
    """torchrun waits for half a minute before it kills what is stopped."""
    run = Torchrun(tmp_path, "ddp", "--fabric.timeout_seconds", "4", "--log.every", "30")
    worker = run.workers()[1]
    while not (run.run / "checkpoints" / "last").exists():
        time.sleep(0.05)
    time.sleep(0.2)  # in the midst of a step
    os.kill(worker, signal.SIGSTOP)
    assert run.end() == 0, run.said
    assert "1 failed to pass" in run.said and "resumed" in run.said, run.said
    for name, tensor in final_tensors(undisturbed / "ddp").items():
        assert tensor.equal(final_tensors(run.run)[name]), name
