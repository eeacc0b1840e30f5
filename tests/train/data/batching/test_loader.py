"""The loader goes on exactly where it stood (law 9), and makes the same steps on any number of processes and workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni.errors import UserError
from tests.train.data.toys import MODELS, ToySource, codec_of, maker_of, pipeline_of
from train.data.batching.batch import Batch
from train.data.batching.examples import Alignment
from train.data.batching.loader import PackerShard, Pipeline, StepLoader, merge, process_shards
from train.data.config import PackingConfig
from train.data.sources.mixture import Mixture, TaskMixture

ROOT = Path(__file__).parent.parent.parent.parent.parent


def same(a: Batch, b: Batch) -> None:
    for name in Batch.TENSORS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("input_lengths", "frames", "transcripts", "examples", "positions", "state"):
        assert getattr(a, name) == getattr(b, name), name


def same_steps(found: list[list[Batch]], wanted: list[list[Batch]]) -> None:
    assert len(found) == len(wanted)
    for step, reference in zip(found, wanted, strict=True):
        assert len(step) == len(reference)
        for a, b in zip(step, reference, strict=True):
            same(a, b)


def take(loader: StepLoader, steps: int) -> list[list[Batch]]:
    out = [next(loader) for _ in range(steps)]
    loader.close()
    return out


def plainly_stored(states: dict) -> dict:
    """What a checkpoint makes of it."""
    return json.loads(json.dumps(states))


def check_resumes(made: Callable[..., StepLoader], steps: int, stops: Iterable[int]) -> tuple[list[list[Batch]], list[dict]]:
    """Loaders that were stopped after so many steps go on as one that was not; returns its steps, and the states after each."""
    whole, wanted, states = made(), [], []
    for _ in range(steps):
        wanted.append(next(whole))
        states.append(plainly_stored(whole.states))
    whole.close()
    for stop in stops:
        same_steps(take(made(start_step=stop, states=states[stop - 1]), steps - stop), wanted[stop:])
    return wanted, states


def new_pipeline(name: str, **options) -> Pipeline:
    """A pipeline that has drawn nothing: sources of 7 and 5 rows, gone through several times, and an endless one."""
    return pipeline_of(MODELS[name], sizes=(None, 7, 5), weights=(2, 1, 1), **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"turns": 2}, {"repeat": 3}], ids=["rows", "turns", "repeats"])
def test_stopped_after_any_step_it_goes_on_as_if_it_had_not(name, options):
    check_resumes(lambda **state: StepLoader(new_pipeline(name, **options), 2, **state), 5, range(1, 5))


def test_one_worker_makes_what_none_makes():
    alignment = Alignment("letters")

    def loader(workers: int) -> StepLoader:
        return StepLoader(pipeline_of(replace(MODELS["codec2"], ctc=alignment.size), alignment=alignment), 2, workers=workers)

    wanted = take(loader(0), 4)
    assert any(batch.transcripts for batch in wanted[0])
    same_steps(take(loader(1), 4), wanted)


@pytest.mark.long
def test_a_run_begun_with_two_workers_goes_on_alike_with_any_number():
    whole = StepLoader(new_pipeline("codec2"), 2, workers=2)
    for _ in range(3):
        next(whole)
    states = plainly_stored(whole.states)
    wanted = take(whole, 3)
    for now in (0, 1, 2, 3, 4):  # the parts of two workers stand at different steps
        same_steps(take(StepLoader(new_pipeline("codec2"), 2, workers=now, start_step=3, states=states), 3), wanted)


def test_a_run_on_two_processes_goes_on_alike_on_one_and_on_four():
    wanted = take(StepLoader(new_pipeline("codec2"), 4), 5)
    halves = [StepLoader(new_pipeline("codec2"), 4, process_shards(4, rank, 2)) for rank in range(2)]
    begun = [[next(loader), next(loader)] for loader in halves]
    same_steps([a + b for a, b in zip(*begun, strict=True)], wanted[:2])
    states = plainly_stored(merge([loader.states for loader in halves]))
    assert sorted(states) == [f"{shard}.0" for shard in range(4)]
    same_steps(take(StepLoader(new_pipeline("codec2"), 4, start_step=2, states=states), 3), wanted[2:])
    quarters = [
        take(StepLoader(new_pipeline("codec2"), 4, process_shards(4, rank, 4), start_step=2, states=states), 3)
        for rank in range(4)
    ]
    same_steps([[a, b, c, d] for (a,), (b,), (c,), (d,) in zip(*quarters, strict=True)], wanted[2:])


def test_resuming_makes_the_waiting_draws_again_and_nothing_else():
    """The loader is never replayed: what it costs to go on does not grow with the length of the run."""
    codec = codec_of(MODELS["codec2"])

    def pipeline(source: ToySource) -> Pipeline:
        tasks, maker = TaskMixture({"T1T2": 1.0}), maker_of(MODELS["codec2"])
        return Pipeline(Mixture([source], [1.0]), [tasks], maker, PackingConfig(2, 160, 6))

    shard = PackerShard(pipeline(ToySource("toy", None, codec)), 0, 1)
    for _ in range(20):
        batch = shard.batch()
    source = ToySource("toy", None, codec)
    resumed = PackerShard(pipeline(source), 0, 1, state=batch.state)
    assert source.made == batch.state["buffer"] and 0 < len(source.made) < 20 < batch.state["next"]
    same(resumed.batch(), shard.batch())


def test_every_draw_is_used_once_whatever_the_shards_and_workers():
    for shards, parts in ((1, 1), (2, 1), (2, 3)):
        pipeline = new_pipeline("codec2")
        drawn: list[int] = []
        fetch = pipeline.fetch
        pipeline.fetch = lambda n, packers, fetch=fetch, drawn=drawn: (drawn.append(n), fetch(n, packers))[1]
        for shard in range(shards):
            for part in range(parts):
                packer = PackerShard(pipeline, shard, shards, part, parts)
                packer.batch()
                mine = [n for n in drawn if n % shards == shard and n // shards % parts == part]
                assert mine == [shard + shards * (part + parts * k) for k in range(len(mine))]
        assert len(drawn) == len(set(drawn))


def test_a_state_that_does_not_fit_is_refused():
    loader = StepLoader(new_pipeline("codec2"), 2)
    next(loader)
    with pytest.raises(UserError, match=r"resume with the same micro_batches"):
        next(StepLoader(new_pipeline("codec2"), 3, start_step=1, states=loader.states))
    with pytest.raises(UserError, match="micro_batches is 3, which 2 processes cannot share"):
        process_shards(3, 0, 2)


def broken(name: str) -> Pipeline:
    """A mixture whose second source cannot be heard."""
    pipeline = new_pipeline(name)

    class Mute(ToySource):
        def row(self, index):
            row = super().row(index)
            return replace(row, turns=tuple(replace(turn, question_audio=None, question_text="") for turn in row.turns))

    pipeline.mixture.sources[1] = Mute("mute.parquet", 7, codec_of(MODELS[name]))
    return pipeline


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_mistake_found_by_a_worker_is_the_same_one_line(workers):
    loader = StepLoader(broken("codec2"), 1, workers=workers)
    line = r"^mute.parquet row \d, turn 0: there is no question_\w+, which task \w+ needs"
    with pytest.raises(UserError, match=line) as error:
        for _ in range(10):
            next(loader)
    assert "\n" not in str(error.value)
    with pytest.raises(StopIteration):
        next(loader)


PROGRAM = """
import multiprocessing, sys, time
from tests.train.data.toys import MODELS, pipeline_of
from train.data.batching.loader import StepLoader
loader = StepLoader(pipeline_of(MODELS["codec2"]), 1, workers=2)
next(loader)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
{then}
"""


def start(then: str) -> tuple[subprocess.Popen, list[int]]:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM.format(then=then)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return program, [int(pid) for pid in program.stdout.readline().split()]


def gone(pids: list[int], seconds: float = 20) -> bool:
    """Whether they end in time (a zombie that nobody has collected has ended)."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_workers_leave_signals_to_the_run_and_end_with_it_even_when_it_is_killed():
    program, workers = start("time.sleep(600)")
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert all(_runs(pid) for pid in workers)
    program.kill()
    program.wait()
    assert gone(workers)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_workers_end_with_a_program_that_leaves_the_loader_open():
    program, workers = start("pass")
    try:
        assert len(workers) == 2 and gone(workers)
        assert program.wait(timeout=20) == 0
    finally:
        program.kill()
        program.wait()


def test_workers_end_when_the_loader_is_closed():
    loader = StepLoader(new_pipeline("codec2"), 1, workers=2)
    before = set(multiprocessing.active_children())
    next(loader)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    loader.close()
    assert gone([worker.pid for worker in workers])


def test_batches_are_pinned_for_a_run_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not because there is one in the machine: pinning opens it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    take(StepLoader(new_pipeline("codec2"), 1), 1)  # would fail without a driver
    pinned: list[bool] = []
    loader = "torchdata.stateful_dataloader.StatefulDataLoader"
    monkeypatch.setattr(loader, lambda *given, **options: pinned.append(options["pin_memory"]))
    for pin in (False, True):
        StepLoader(new_pipeline("codec2"), 1, pin=pin)
    assert pinned == [False, True]
