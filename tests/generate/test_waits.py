"""What waits for a GPU between two steps: nothing. Counted over fake tensors of a GPU, with the runner's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from omni.generate.rows import RunnerRow
from omni.generate.runner import Fork, Runner, pack, prefill
from omni.generate.sampling import Sampler, Sampling, per_stream, write_rows
from omni.lora.attach import selection_of
from omni.model.speech_model import SpeechModel
from tests.generate.conftest import LAYOUTS, make_model
from tests.generate.test_runner import ask, start
from tests.waits import FakeGPU

SAMPLING = Sampling(1.0, top_k=4, top_p=0.9, repetition_penalty=1.1)
WHICH = [0, 1, 2, 3]


class Event:
    def record(self) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with FakeGPU() as gpu:
        yield gpu


@pytest.fixture(params=[{}, {"window": 9}], ids=["full", "window"])
def model(request: pytest.FixtureRequest, gpu: FakeGPU) -> SpeechModel:
    with torch.device("cuda"):
        return make_model(LAYOUTS["sampled"], **request.param).requires_grad_(False)


@pytest.fixture
def counted(gpu: FakeGPU) -> Callable[[Callable[[], Any]], tuple[list[str], int]]:
    """Does some work; returns what waits, and the number of copies that do not."""

    def count(work: Callable[[], Any]) -> tuple[list[str], int]:
        with gpu.counting() as (found, copies):
            work()
        return found, len(copies)

    return count


@pytest.mark.long
def test_nothing_waits_from_prefill_to_the_end(model: SpeechModel, counted: Any) -> None:
    layout = model.layout
    runner = Runner(model, 4, 60, graph=False)
    starts = [start(layout, i, SAMPLING) for i in WHICH]
    hidden: Any = None
    rows: list[RunnerRow] = []

    def fill() -> None:
        nonlocal hidden
        hidden = prefill(model, runner.cache, range(len(WHICH)), pack(layout, [ask(layout, i) for i in WHICH], []), 8)

    assert counted(fill) == ([], 1)  # one copy for the prompts of all rows, whatever the pieces
    begun = counted(lambda: rows.extend(runner.begin(range(len(starts)), hidden, starts)))
    assert begun == ([], 2)  # the rows' numbers, and the first columns
    for _ in range(2):
        assert counted(runner.step) == ([], 1)
    assert counted(lambda: runner.leave(rows[1])) == ([], 0)
    assert counted(runner.step) == ([], 1)
    live = [row for row in rows if row.live]
    assert counted(lambda: runner.step(live[:1] + live[2:])) == ([], 2)  # the results, and who rests
    assert counted(lambda: runner.cache.rewind(0, 3)) == ([], 0)
    assert counted(runner.cache.reset) == ([], 0) == counted(lambda: runner.cache.reset([2]))


@pytest.mark.sampled(1)
def test_a_fork_and_rows_that_are_not_neighbours(model: SpeechModel, counted: Any) -> None:
    layout, cache = model.layout, model.make_cache(4, 60, chunk=60)
    one = ask(layout, 3)
    found, copies = counted(lambda: prefill(model, cache, (0,), pack(layout, [one], []), fork=Fork(1, one.tokens[:, 0])))
    assert not found and copies == (1 if cache.window is None else 2)
    assert counted(lambda: cache.select([3, 1])) == ([], 1)
    rows: list[Any] = [(None, "edits"), None]
    assert counted(lambda: selection_of(model, rows, "cuda")) == ([], 1)


def test_the_count_can_fail(counted: Any) -> None:
    with torch.inference_mode():
        x, y = torch.zeros(4, device="cuda"), torch.zeros(4, 3, device="cuda")
        waiting: list[Callable[[], Any]] = [
            lambda: x.__setitem__(1, 5),
            lambda: torch.tensor([1, 2], device="cuda"),
            lambda: x.cpu(),
            lambda: x.copy_(torch.zeros(4)),
            lambda: x.__setitem__(x > 0, -1),
        ]
        for work in waiting:
            assert len(counted(work)[0]) == 1
        passing: list[Callable[[], Any]] = [lambda: x.__setitem__(slice(1, 2), 5), lambda: y.__setitem__(1, 5), lambda: x * 2]
        for work in passing:
            assert counted(work) == ([], 0)
        assert counted(lambda: torch.zeros(4).to("cuda", non_blocking=True)) == ([], 1)


def test_what_is_staged_arrives_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(0)
    whole, truths = (torch.zeros(6, dtype=kind) for kind in (torch.long, torch.bool))
    targets = [whole, torch.zeros(6, 2, 3, dtype=torch.long), truths, torch.zeros(6, 4)]
    values = [
        torch.tensor([-(1 << 63), 1 << 62, -1]),
        torch.randint(-9, 9, (3, 2, 3), generator=g),
        torch.tensor([True, False, True]),
        torch.tensor([[0.1, -0.0, float("inf"), 1e-42]] * 3) * torch.tensor([[1.0], [-1.0], [3.0]]),
    ]
    write_rows(targets, [4, 0, 2], values)
    for target, value in zip(targets, values, strict=True):
        assert torch.equal(target[[4, 0, 2]], value) and not target[[1, 3, 5]].any()
    assert torch.equal(targets[3][[4, 0, 2]].view(torch.int32), values[3].view(torch.int32))


def test_rows_set_together_equal_rows_set_alone() -> None:
    layout = LAYOUTS["pad"]
    plans = [
        per_stream(layout, {"text": SAMPLING, "audio": Sampling(0.7)}),
        per_stream(layout, Sampling()),
        per_stream(layout, SAMPLING),
    ]
    keys, rows = [1 << 62, -5, 7], [3, 0, 2]
    alone, together = Sampler(layout, 4), Sampler(layout, 4)
    for row, plan, key in zip(rows, plans, keys, strict=True):
        write_rows(alone.targets, [row], alone.prepare([row], [plan], [key]))
    write_rows(together.targets, rows, together.prepare(rows, plans, keys))
    assert all(map(torch.equal, alone.targets, together.targets)) and alone.modes(range(4)) == together.modes(range(4))
