"""Runs a command in a process of its own; measures its memory, or returns its output within a time limit."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from omni.errors import UserError

EVERY = 0.003
"""Seconds between two readings of the memory; a peak that is shorter may be missed."""

_CHILD = """
import importlib, sys
command = importlib.import_module(sys.argv[1])
for name in filter(None, sys.argv[2].split(",")):
    importlib.import_module(name)
print("ready", flush=True)
sys.stdin.readline()
sys.exit(command.main(sys.argv[3:]))
"""


@dataclass(frozen=True)
class ResourceUse:
    """Time and memory of a command, beyond those of its process when all was imported and nothing started.

    Attributes:
        seconds: from its start to the end of its process.
        resident: bytes of resident memory (RSS) at its peak; pages of mapped files count while they are there.
        anonymous: the same without files and shared memory, at its own peak; where the system does not tell them apart (it does
            on Linux), all of it.
    """

    seconds: float
    resident: int
    anonymous: int


@dataclass(frozen=True)
class ChildResult:
    """Exit code, time and output of a command.

    Attributes:
        code: its exit code, None where its time ran out and it was killed, with all processes that it had started.
        out, error: what it wrote.
    """

    code: int | None
    seconds: float
    out: str
    error: str


def run_limited(command: Sequence[str], limit: float) -> ChildResult:
    """Runs a command for `limit` seconds at most."""
    start, late = time.perf_counter(), False
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            out, error = child.communicate(timeout=max(limit, 0.0))
        except subprocess.TimeoutExpired:
            late = True
            started = psutil.Process(child.pid).children(recursive=True)  # one with its own session is not in the group
            os.killpg(child.pid, signal.SIGKILL)
            for one in started:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            out, error = child.communicate()
    return ChildResult(None if late else child.returncode, time.perf_counter() - start, out, error)


def run_apart(module: str, arguments: Sequence[str], imports: Sequence[str] = ()) -> ResourceUse:
    """Runs `module.main(arguments)` in a new interpreter, and measures its memory from outside.

    Args:
        imports: further modules that it imports before it starts, so that they do not count.

    Raises:
        UserError: it failed; its messages are on standard error.
    """
    command = [sys.executable, "-c", _CHILD, module, ",".join(imports), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        resident = anonymous = 0
        if child.stdout.readline():
            watched = psutil.Process(child.pid)
            idle = top = _memory(watched)
            start = time.perf_counter()
            child.stdin.write("\n")
            child.stdin.flush()
            while child.poll() is None:
                with suppress(psutil.Error):  # it has just ended
                    now = _memory(watched)
                    top = max(top[0], now[0]), max(top[1], now[1])
                time.sleep(EVERY)
            seconds = time.perf_counter() - start
            resident, anonymous = top[0] - idle[0], top[1] - idle[1]
        child.communicate()
    if child.returncode:
        raise UserError(f"{module} {' '.join(arguments)} ended with {child.returncode}; see what it said above")
    return ResourceUse(seconds, resident, anonymous)


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Bytes resident, and those of them that are neither files' nor shared."""
    found = process.memory_info()
    return found.rss, found.rss - getattr(found, "shared", 0)


# --- the checks of `bench --gpu` (benchmarks/gpu.py) --------------------------------------------------------------------

GPU_SECONDS = 420.0
_CHECK = "import sys; from benchmarks.child import run_check; sys.exit(run_check(*sys.argv[1:]))"


def run_check(module: str, name: str, device: str, real: str) -> int:
    """Runs one of `module.CHECKS`, in a process of its own, and prints its findings, each as a JSON object. Returns 0, or 3
    where a package is missing."""
    work, _ = importlib.import_module(module).CHECKS[name]
    try:
        for text, good in work(torch.device(device), real == "real"):
            print(json.dumps({"text": text, "good": good}), flush=True)
    except ImportError as error:
        print(json.dumps({"text": str(error), "good": None}))
        return 3
    return 0


def gpu_report(module: str = "benchmarks.gpu", device: str = "cuda", real: bool = True) -> Iterator[dict[str, Any]]:
    """Runs `module.CHECKS` one after another, each in a process of its own; yields name, state, seconds and findings of each.

    The state is `green`; `red` where a finding is not as it should be, the check raised or its time ran out; `not run` without
    a GPU, without a package, or where `GPU_SECONDS` are over.
    """
    end = time.perf_counter() + GPU_SECONDS
    for name, (_, limit) in importlib.import_module(module).CHECKS.items():
        if device == "cuda" and not torch.cuda.is_available():
            yield {"check": name, "state": "not run", "seconds": 0.0, "found": ["this machine has no GPU that PyTorch can use"]}
            continue
        limit = min(limit, end - time.perf_counter())
        if limit <= 1:
            yield {"check": name, "state": "not run", "seconds": 0.0, "found": [f"the {GPU_SECONDS:.0f} seconds are over"]}
            continue
        words = [module, name, device, "real" if real else "small"]
        ended = run_limited([sys.executable, "-c", _CHECK, *words], limit)
        lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"text": ')]
        bad = [line for line in lines if line["good"] is False]
        found = [("WRONG: " if line["good"] is False else "") + line["text"] for line in lines]
        if ended.code is None:
            found.append(f"WRONG: not finished after {limit:.0f} s")
        elif ended.code not in (0, 3):
            said = ended.error.strip().splitlines() or ["it said nothing"]
            found.append(f"WRONG: ended with {ended.code}: {said[-1]}")
        state = "red" if bad or ended.code not in (0, 3) else "not run" if ended.code == 3 else "green"
        yield {"check": name, "state": state, "seconds": round(ended.seconds, 1), "found": found}


def check_gpu(as_json: bool) -> int:
    """Prints the report of `--gpu`; returns 1 where a check is red, else 0."""
    red = False
    for one in gpu_report():
        red = red or one["state"] == "red"
        if as_json:
            print(json.dumps(one), flush=True)
            continue
        print(f"{one['check']}: {one['state']}, {one['seconds']:.0f} s", *one["found"], sep="\n  ", flush=True)
    return int(red)


# --- checks that run whole commands ------------------------------------------------------------------------------------


def _weights_of_run(
    config: str, folder: Path, words: Sequence[str], name: str, more: Sequence[str] = (), limit: float = 60
) -> bytes:
    """Runs `train fit` in `folder/name` for `limit` seconds at most; returns its file of weights, empty where there is none."""
    run_limited([sys.executable, "-m", "train", "fit", config, f"--run_folder={folder / name}", *words, *more], limit)
    model = folder / name / "model" / "model.safetensors"
    return model.read_bytes() if model.exists() else b""


def repeat(device: torch.device, real: bool) -> Iterator[tuple[str, bool]]:
    """Checks runs of 20 steps: the same twice, killed and resumed, in fp16."""
    words = ["--budget.minutes=null", "--validation.questions=0", "--checkpoint.every_steps=10", "--log.progress=off"]
    words += [f"--budget.steps={20 if real else 2}", f"--fabric.accelerator={'gpu' if device.type == 'cuda' else 'cpu'}"]
    with tempfile.TemporaryDirectory() as place:
        fit = partial(_weights_of_run, "nano-scratch", Path(place), words)

        def stopped() -> bytes:
            fit("killed", limit=25 if real else 6)
            return fit("killed")

        with ThreadPoolExecutor(3) as at_once:  # most of a run's time is its start, which takes one core
            first, again, killed = (at_once.submit(work) for work in (partial(fit, "first"), partial(fit, "again"), stopped))
            yield "a run of 20 steps ends", bool(first.result())
            yield "run again it has the same weights", again.result() == first.result()
            half = at_once.submit(fit, "fp16", [f"--fabric.precision={'16-mixed' if real else '32-true'}"])
            if real and find_spec("bitsandbytes"):
                low = ["--model.preset=null", "--lora.quantize=nf4", "--optimizer.name=paged_adamw_8bit"]
                paged = at_once.submit(fit, "low", [*low, f"--model.init_from={place}/first/model"])
                yield "a run over 4 bits with paged AdamW ends", bool(paged.result())
            yield "a run in 16-mixed ends", bool(half.result())
            yield "killed and resumed it has the same weights", killed.result() == first.result()


def commands(device: torch.device, real: bool) -> Iterator[tuple[str, bool]]:
    """Runs the bench commands of `infer` and `train`; yields their output."""
    for words in (["infer", "bench", "--preset=nano", "--repeat=1"], ["benchmarks.training", "--only=[step]"]):
        ended = run_limited([sys.executable, "-m", *words, f"--device={device.type}"], 95)
        yield f"python -m {' '.join(words)}\n{ended.out if ended.code == 0 else ended.error}", ended.code == 0
