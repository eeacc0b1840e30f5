"""What a run does with its time and memory, in its log; and what it says where memory runs out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from omni.errors import UserError
from omni.utils.profiling import GIB
from tests.golden.toys import RECIPE, inside, place
from tests.train.toys import ALONE, ToyModel, toy_config, toy_fit, toy_parts
from train import cli
from train.config.sections import LogConfig
from train.plan import plan
from train.trainer import usage
from train.trainer.logs import METRICS, read_table
from train.trainer.metrics import StepMetrics
from train.trainer.step import PlainStep
from train.trainer.usage import Usage, bytes_of, is_out_of_memory, out_of_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ASKED = 1 << 52
METER = StepMetrics(("A1A2",), ("text",), "cpu", ALONE)


def test_the_share_of_waiting_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step waits a second for its data, and takes three more; what comes between steps does not count."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in ("step", "metrics"):
        monkeypatch.setattr(f"train.trainer.{module}.time", clock)

    def before(step: int) -> None:
        now[0] += 1.0

    def idle(progress: float) -> list[nn.Parameter]:
        now[0] += 1.5  # asked for twice in a step
        return []

    def saved(*_: object) -> None:
        now[0] += 100.0

    monkeypatch.setattr("train.trainer.parts.Callbacks.on_step", saved)
    toy_fit(toy_config(tmp_path, log=LogConfig(every=4, progress="off")), toy_parts(before, idle=idle))
    assert [row["data_wait"] for row in read_table(tmp_path / METRICS)] == [0.25, 0.25]


def row_of(usage: Usage) -> dict[str, float]:
    """What the row of steps that took ten seconds gets."""
    usage.meter.measured, figures = 10.0, dict[str, float]()
    usage.on_log(1, figures)
    return figures


def test_shares_are_means_over_processes() -> None:
    others = torch.tensor([6.0, 0.0, 10.0], dtype=torch.float64)
    group: Any = SimpleNamespace(sum=lambda own: own + others)
    found = Usage(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]), None, METER, CPU, group)
    found.waited = 1.0
    first = row_of(found)
    assert first["data_wait"] == pytest.approx(7 / 20) and "host_gap" not in first
    assert row_of(found)["data_wait"] == pytest.approx(6 / 20)


class Stream:
    """A CUDA device without work of its own: `until` is when it has done what is queued, `now` the host's time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.until = self.held = 0.0
        self.waits = 0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = stream.until = max(stream.until, stream.now)

            def elapsed_time(self, end: Any) -> float:
                if end.at > stream.now:
                    raise RuntimeError("the device has not come so far")
                return 1e3 * float(end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(stream.held * GIB))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(stream, "held", 1.0))


def test_the_share_of_time_in_which_a_gpu_has_nothing_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at the row of the log; where the device still works through the host's wait there is no gap."""
    stream = Stream(monkeypatch)
    found = Usage(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]), None, METER, CUDA, ALONE)
    for wait in (2.0, 5.0):  # each after three seconds of work: the device is idle for none, and for two
        stream.until = stream.now + 3.0
        with found.idle():
            stream.now += wait
        stream.now = max(stream.now, stream.until)
    stream.held = 7.0
    first = row_of(found)
    assert first["host_gap"] == pytest.approx(0.2) and first["memory/peak"] == 7.0
    second = row_of(found)
    assert second["host_gap"] == 0.0 and second["memory/peak"] == 1.0


def test_a_step_queues_nothing_as_it_fetches_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, seen = [0], list[int]()

    @contextmanager
    def counted(self: Usage) -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def idle(progress: float) -> list[nn.Parameter]:
        seen.append(inside[0])  # asked for within a step
        return []

    monkeypatch.setattr(Usage, "idle", counted)
    monkeypatch.setattr(StepMetrics, "figures", lambda meter, shown=False: seen.append(10 * inside[0]) or {"loss": 0.0})
    log = LogConfig(every=8, progress="lines")
    toy_fit(toy_config(tmp_path, log=log), toy_parts(lambda step: seen.append(100 * inside[0]), idle=idle))
    assert seen[:4] == [100, 0, 0, 10] and set(seen) == {0, 10, 100}


@pytest.mark.parametrize("peak", [100.0, None])
def test_the_share_of_the_peak_is_in_the_log(peak: float | None) -> None:
    meter = StepMetrics(("A1A2",), ("text",), "cpu", ALONE, peak=peak)
    meter.step(10.0, 30.0, torch.zeros(()), torch.zeros(()))
    meter.work[2] = 2.0
    assert meter.figures().get("mfu") == (peak and pytest.approx(0.15)) and meter.measured == 2.0


def test_memory_by_part(tmp_path: Path) -> None:
    """AdamW has two moments and a count; the average and gradients are of what is trained."""
    toy_fit(toy_config(tmp_path, trainable=("audio_*",), log=LogConfig(every=4, progress="off")))
    model = ToyModel()
    weights = sum(4 * p.numel() for p in model.parameters())
    trained = [p for name, p in model.named_parameters() if name.startswith("audio_")]
    one = sum(4 * p.numel() for p in trained)
    rows = read_table(tmp_path / METRICS)
    for row in rows:
        sizes = {name: round(row[f"memory/{name}"] * GIB) for name in ("weights", "gradients", "optimizer", "average")}
        assert sizes == {"weights": weights, "gradients": one, "optimizer": 2 * one + 4 * len(trained), "average": one}
        assert 0.05 < row["memory/peak"] < 50
    assert list(rows[0])[-6:] == ["data_wait", *(f"memory/{name}" for name in (*sizes, "peak"))]


def test_shared_tensors_count_once() -> None:
    one = torch.zeros(8)
    assert bytes_of([one, one, torch.zeros(2, dtype=torch.bfloat16)]) == 36


def test_an_error_of_memory_is_told_from_others() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(ASKED, dtype=torch.uint8)
    assert is_out_of_memory(error.value) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_on_a_gpu_the_device_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Stream(monkeypatch).held = 3.0
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 4 * GIB))
    model = nn.Linear(1 << 14, 1 << 14, bias=False, device="meta")
    found = Usage(model, torch.optim.SGD(model.parameters()), None, METER, CUDA, ALONE)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4 GiB")
    assert str(out_of_memory(error, CUDA, found, tmp_path, 7)).splitlines() == [
        "memory ran out in step 7: 20.00 MiB were asked for; cuda has 4.00 GiB, 0.50 GiB of it free",
        "  the run holds activations and all else 2.00 GiB, weights 1.00 GiB",
        f"  the last checkpoint is {tmp_path}",
    ]

    def full(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    said = str(out_of_memory(RuntimeError("CUDA error: out of memory"), CUDA)).splitlines()
    assert said == ["memory ran out: the request has no size; cuda is full", "  no checkpoint was written yet"]
    with pytest.raises(RuntimeError) as host:  # of a checkpoint's copy, such as
        torch.empty(ASKED, dtype=torch.uint8)
    said = str(out_of_memory(host.value, CUDA, found, None)).splitlines()
    assert said[0].startswith("memory ran out: 4194304.00 GiB were asked for; the machine has ")
    assert said[1:] == ["  the run holds weights 1.00 GiB", "  no checkpoint was written yet"]


@pytest.mark.long
@pytest.mark.untrained("*")
def test_a_run_without_memory_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its third step; the state of the second is not lost."""
    gradients, taken, held = PlainStep.gradients, [0], []

    def huge(self: PlainStep, step: Any, denominators: Tensor, progress: float) -> None:
        taken[0] += 1
        gradients(self, step, denominators, progress)
        if taken[0] == 3:
            held.append(weakref.ref(self.module))
            torch.empty(ASKED, dtype=torch.uint8)

    estimate = plan.savings_here

    def freed(*given: Any) -> Any:
        gc.collect()
        assert held.pop()() is None, "the run still holds its memory while others estimate"
        return estimate(*given)

    monkeypatch.setattr(plan, "savings_here", freed)
    monkeypatch.setattr(PlainStep, "gradients", huge)
    with inside(tmp_path):
        place(tmp_path, "model", "rows")
        changed = {**RECIPE, "optimizer": {"lr": 0.01}, "ema": 0.9, "validation": {"questions": 0}}
        Path("run.yaml").write_text(yaml.safe_dump({**changed, "run_folder": "run"}))
        assert cli.main(["fit", "run.yaml"]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith("error: memory ran out in step 3: 4194304.00 GiB were asked for; the machine has ")
        held = [part.rpartition(" ")[0].rpartition(" ")[0] for part in said[1].removeprefix("  the run holds ").split(", ")]
        assert held == ["activations and all else", "optimizer", *sorted(held[2:], reverse=True)]
        assert {"weights", "gradients", "average"} == set(held[2:])
        assert said[2] == "  the last checkpoint is run/checkpoints/step-00000002"
        assert said[3] == "  what saves memory, by the plan's arithmetic:"
        saved = [float(line.partition(" saves ")[2].split()[0]) for line in said[4:]]
        assert 2 <= len(saved) <= 3 and saved == sorted(saved, reverse=True)
        assert any(line.startswith("    --fabric.checkpointing true  saves ") and line.endswith("more work)") for line in said)
        refused = [line for line in said if line.endswith("a resume refuses the change)")]
        assert all("--fabric.precision" in line or "--data." in line for line in refused) and refused
        taken[0] = 2
        with pytest.raises(UserError) as error:
            cli.main(["fit", "run.yaml", "--debug"])
        causes = [error.value.__cause__, error.value.__cause__.__cause__]  # type: ignore[union-attr]
        assert "you tried to allocate" in str(causes[1])


def test_every_process_reports_its_own_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of mistakes that all processes have the first one speaks for all."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    shared = UserError("no")
    shared.shared = True
    for error, code, said in ((shared, 0, ""), (usage.OutOfMemory("memory ran out"), 2, "error: memory ran out\n")):

        def fail(argv: list[str], error: UserError = error) -> int:
            raise error

        monkeypatch.setattr("train.commands.fit.main", fail)
        assert cli.main(["fit", "nano"]) == code and capsys.readouterr().err == said
