"""What a plan says of memory, against the command `fit` on data that fill its worst batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train.commands.plan import main
from train.data.rows.parquet import write_rows
from train.data.rows.row import Row, RowTurn, Sound
from train.plan.trial import KEPT, RETURNED

ROOT = Path(__file__).parents[3]
MIB = float(1 << 20)
LENGTH = 128

PROGRAM = """
import gc, sys
from train.commands.fit import main
from omni.profiling import PeakMemory
file, folder, *options = sys.argv[1:]
assert main([file, *options, "--run_folder", folder + "/warm", "--data.packing.rows", "1"]) == 0
gc.collect()
with PeakMemory() as memory:
    assert main([file, *options, "--run_folder", folder + "/run"]) == 0
print(memory.peak)
"""
"""A run, after a smaller one that has loaded all libraries: its peak counts, as the plan does, what the run itself takes."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Spoken questions that fill a row but for their transcripts."""
    generator = torch.Generator().manual_seed(0)
    seconds = (LENGTH - 9) / 12.5  # nano hears 12.5 columns a second
    turns = [RowTurn("yes", Sound(0.1 * torch.randn(round(16000 * seconds), generator=generator), 16000)) for _ in range(4)]
    write_rows(tmp_path / "rows.parquet", [Row((turn,)) for turn in turns])
    (tmp_path / "run.yaml").write_text(
        "budget: {steps: 3}\n"
        "model: {preset: nano}\n"
        f"data: {{workers: 0, packing: {{rows: 4, length: {LENGTH}, buffer: 2}},\n"
        f"       sources: [{{kind: stored, path: {tmp_path / 'rows.parquet'}, tasks: {{A1T1: 1.0}}}}]}}\n"
        "fabric: {accelerator: cpu, devices: 1, precision: 32-true}\n"
        "validation: {questions: 0}\n"
        "log: {progress: 'off'}\n"
    )
    return str(tmp_path / "run.yaml")


MORE = ("--data.micro_batches", "2", "--ema", "0.9", "--fabric.checkpointing", "true")


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [(), pytest.param((*MORE, "--data.packing.rows", "8"), marks=pytest.mark.long)], ids=["plain", "more"]
)
def test_the_pace_is_of_the_data(file: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    rows, pace = (8 * 2 if options else 4), plan["pace"]
    assert pace["source"] == "2 micro-batches of the data" and pace["examples"] == rows
    assert 0.9 * LENGTH * rows < pace["columns"] < LENGTH * rows
    assert pace["targets"] == 4 * rows  # y, e, s and the end
    assert plan["to_budget"] == {"tokens": 3 * pace["columns"], "targets": 12 * rows}


@pytest.mark.long
@pytest.mark.parametrize("options", [(), (*MORE, "--data.packing.rows", "8")], ids=["plain", "more"])
def test_the_estimate_is_what_fit_takes(
    file: str, tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process that gives freed blocks back, as the plan says how to, and the estimate without those counts."""
    assert main([file, *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, file, str(tmp_path), *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, wanted = plan["memory"]["total"], int(done.stdout.split()[-1])
    assert wanted > 80 * MIB  # of which weights and optimizer are less than half
    assert found == pytest.approx(wanted, rel=0.15), (found / MIB, wanted / MIB)


PHASES = """
import json, sys
from functools import wraps
from matplotlib.figure import Figure
from PIL import Image
from train.commands.fit import main
from train.checkpoint.checkpointer import Checkpointer
from train.trainer import build, loop, step, validation

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

peaks = {}

def measured(phase, place, name):
    real = getattr(place, name)

    @wraps(real)
    def work(*args, **kwargs):
        reset()
        try:
            return real(*args, **kwargs)
        finally:
            peaks[phase] = max(peaks.get(phase, 0), status("VmHWM") - base)
            reset()

    setattr(place, name, work)

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again

Figure.tight_layout, Figure.savefig = lambda *a, **k: None, lambda figure, file, **k: Image.new("RGB", (1, 1)).save(file, "PNG")
measured("start", build, "build_initial")
measured("a step", step.PlainStep, "__call__")
measured("held-out loss", loop, "held_out_loss")
measured("validation's answers", validation.Validator, "__call__")
measured("checkpoint", Checkpointer, "save")
measured("resume", Checkpointer, "resume")
measured("end", loop.Loop, "_finish")
file, folder, *options = sys.argv[1:]
base = 0
small = ["--model.decoder.layers", "1", "--data.packing.rows", "1"]
assert main([file, *options, *small, "--run_folder", folder + "/warm"]) == 0
base = status("VmRSS")
peaks.clear()
run = [file, *options, "--run_folder", folder + "/run"]
assert main(run) == 0 and main([*run, "--budget.steps", "2", "--resume", "extend"]) == 0
print(json.dumps(peaks))
"""
"""A run and its resumption, with the peak of each phase over the memory of a process that has run a smaller one."""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((*MORE, "--data.packing.rows", "1"), id="more"),
        pytest.param((), id="plain"),
        pytest.param(("--ema", "0.9", "--trainable", "[decoder.*]"), id="average"),
    ],
)
def test_every_phase_takes_what_is_said(
    file: str, tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of 160 MiB, so that a copy of them would be seen anywhere."""
    width = ("width", "512"), ("context", "200"), ("layers", "10"), ("heads", "8"), ("kv_heads", "4"), ("mlp_width", "2048")
    model = [word for name, value in width for word in (f"--model.decoder.{name}", value)]
    asked = ["--validation.questions", "4", "--validation.tasks", "[A1T1]"]
    words = [*model, *asked, "--data.packing.rows", "2", "--budget.steps", "1", "--checkpoint.keep_best", "0", *options]
    changed = Path(file).read_text().replace("tasks: {A1T1: 1.0}", "held_out: 2, tasks: {A1T1: 1.0}")
    Path(file).write_text(changed)
    assert main([file, *words, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PHASES, file, str(tmp_path), *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    said, mapped = memory["phases"], memory["files"]
    outside = {"start", "held-out loss", "validation's answers", "checkpoint", "export", "resume"}
    wanted = {name: said[name] + mapped.get(name, 0.0) for name in outside - {"export"}}
    wanted["a step"] = max(size for name, size in said.items() if name not in outside)
    wanted["end"] = max(said[name] for name in ("held-out loss", "validation's answers", "export"))
    found = {name: peaks[name] / MIB for name in wanted}
    assert found == {name: pytest.approx(size / MIB, rel=0.1, abs=24) for name, size in wanted.items()}
    assert memory["total"] + max(0.0, peaks["resume"] - peaks["a step"]) == pytest.approx(max(peaks.values()), rel=0.1)


@pytest.mark.long
def test_a_step_that_is_tried_stands_beside_the_estimate(file: str, forked: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--try", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    measured, pace = plan["measured"], plan["pace"]
    assert set(measured) == {RETURNED, KEPT} and plan["not_measured"] == ""
    assert plan["memory"]["total"] == pytest.approx(measured[RETURNED]["peak"], rel=0.15)
    assert measured[KEPT]["peak"] > 0.8 * measured[RETURNED]["peak"]
    # Examples hear and answer one after the other, the worst batch at once.
    assert 0.5 * measured[KEPT]["seconds"] < pace["seconds"] <= measured[KEPT]["seconds"]
    assert pace["clock"] == "the step tried here, by the sample's share of its work"
    assert pace["hours"] == pytest.approx(3 * pace["seconds"] / 3600)
