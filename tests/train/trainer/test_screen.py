"""What a run says on the screen: at its start, of its steps, and that nothing of it changes what is logged."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import Tensor

from tests.train.eval.toys import save_model
from tests.train.toys import ALONE, OF_THE_MACHINE, toy_batch, toy_config, toy_fit, toy_parts
from train.cli import main
from train.config.sections import BudgetConfig, LogConfig, ValidationConfig
from train.console import progress as console
from train.console.progress import TrainProgress, losses_line
from train.trainer import build as fit
from train.trainer import loop
from train.trainer.logs import METRICS, read_table
from train.trainer.metrics import StepMetrics
from train.trainer.step_times import StepTimes

LINES = LogConfig(every=5, progress="lines")


@pytest.fixture(autouse=True)
def no_lines_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LINE_SECONDS", 1000.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What step times are measured by: one number, in seconds."""
    now = [0.0]
    monkeypatch.setattr("train.trainer.feed.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(loop, "StepTimes", lambda: StepTimes(lambda: now[0]))
    return now


def steps_said(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("step ") and " took " not in line]


def test_losses_are_told_by_target_text_and_audio_apart() -> None:
    figures = {"loss": 17.6, "loss/audio0": 9.0, "loss/text": 2.312, "loss/audio": 4.0, "loss/alignment": 7.1, "lr": 1e-3}
    screen = io.StringIO()
    TrainProgress("lines", stream=screen).row(10, 0.1, 5.0, figures)
    assert screen.getvalue() == "step 10 (10.0%) text 2.31 audio 4.00 lr 1.00e-03 45s left\n"
    waits = {"tokens_per_second": 1234.0, "mfu": 0.3456, "data_wait": 0.12, "host_gap": 0.049}
    TrainProgress("lines", stream=screen).row(10, 0.1, 5.0, {**figures, **waits})
    shown = "lr 1.00e-03 1.23k tokens/s MFU 34.6% 12% waiting for data 45s left"
    assert screen.getvalue().splitlines()[1] == f"step 10 (10.0%) text 2.31 audio 4.00 {shown}"
    assert losses_line({"loss": 1.0, "loss/text": 0.01234}) == "text 0.0123"
    assert losses_line({"loss": 1.0, "loss/alignment": 7.1}) == "alignment 7.10"
    assert losses_line({"loss": 1.5}) == "loss 1.50"


class Terminal(io.StringIO):
    """A terminal of this size."""

    def __init__(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(console, "columns", lambda stream: columns)

    def isatty(self) -> bool:
        return True


def test_what_is_said_after_a_bar_comes_below_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar stays as it was, without the time that was left."""
    bar = TrainProgress("auto", stream=(screen := Terminal(100, monkeypatch)))
    bar.row(10, 0.1, 5.0, {"loss": 1.5, "lr": 1e-3})
    before = len(screen.getvalue())
    bar.close()
    bar.say("stopped")
    bar.close()
    after = screen.getvalue()[before:]
    assert after.endswith("\nstopped\n") and after.count("step 10") == 1 and "left" not in after


def test_the_first_three_steps_of_every_start_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = toy_config(tmp_path, budget=BudgetConfig(steps=12), log=LINES)
    toy_fit(config)
    assert steps_said(capfd.readouterr().err) == [1, 2, 3, 5, 10, 12]
    toy_fit(replace(config, budget=BudgetConfig(steps=20), resume="force"))
    assert steps_said(capfd.readouterr().err) == [13, 14, 15, 20]


def test_lines_take_nothing_from_the_rows_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LINE_SECONDS", 0.0)
    for name in ("lines", "off"):
        toy_fit(toy_config(tmp_path / name, log=replace(LINES, progress=name)))
    said, silent = (read_table(tmp_path / name / METRICS) for name in ("lines", "off"))
    for row in (*said, *silent):
        for of_the_clock in OF_THE_MACHINE:
            del row[of_the_clock]
    assert said == silent and [row["step"] for row in said] == [5, 8]


def test_a_line_is_of_the_steps_since_the_last_one(tmp_path: Path) -> None:
    """Also after a start that goes on within a row of the log."""
    objective = toy_parts().objective
    losses = [objective(toy_batch(shard, 0), torch.ones(3)) for shard in range(3)]
    meter = StepMetrics(("A1A2", "T1T2"), ("audio0", "text"), "cpu", ALONE)
    for each in losses:
        meter.add(each)
        assert meter.look()["loss/text"] == pytest.approx(float(each.sums[:, 1].sum() / each.counts[:, 1].sum()))
    again = StepMetrics(("A1A2", "T1T2"), ("audio0", "text"), "cpu", ALONE)
    again.restore(meter.state())
    again.add(losses[0])
    assert again.look()["loss/text"] == pytest.approx(float(losses[0].sums[:, 1].sum() / losses[0].counts[:, 1].sum()))
    sums, counts = (sum(float(getattr(x, kind)[:, 1].sum()) for x in losses) for kind in ("sums", "counts"))
    assert meter.figures()["loss/text"] == pytest.approx(sums / counts)
    meter.add(losses[1])
    assert meter.look()["loss/text"] == pytest.approx(float(losses[1].sums[:, 1].sum() / losses[1].counts[:, 1].sum()))


def test_a_slow_step_is_told_of_with_its_cause(tmp_path: Path, clock: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    """The validation after the step before is none: it has a line of its own."""

    def before(step: int) -> None:
        clock[0] += 5.0 if step == 6 else 0.1

    def validate(weights: dict[str, Tensor], step: int) -> dict[str, float]:
        clock[0] += 60.0
        return {"exact_match": 0.5}

    config = toy_config(tmp_path, log=LINES, validation=ValidationConfig(every_steps=6))
    toy_fit(config, toy_parts(before, validate=validate))
    told = [line for line in capfd.readouterr().err.splitlines() if " took " in line]
    assert told == ["step 7 took 5.0 s, 0.1 s are usual: waiting for data took 5.0 s"]


def test_what_is_usual_begins_again_where_other_parameters_are_trained(
    tmp_path: Path, clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    parts = toy_parts()
    head = parts.objective.get_parameter("model.text_head.weight")
    ended: list[Tensor] = []

    def idle(progress: float) -> list[torch.nn.Parameter]:
        clock[0] += 0.1 if progress < 0.5 else 2.0
        if progress >= 0.5:
            ended.append(head.detach().clone())
        return [head] if progress < 0.5 else []

    first = head.detach().clone()
    toy_fit(toy_config(tmp_path, budget=BudgetConfig(steps=30), log=LINES), replace(parts, idle=idle))
    assert ended[0].equal(first) and not ended[-1].equal(first)
    assert " took " not in capfd.readouterr().err


# --- the start of a whole run -----------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    digits = {"arithmetic": 1.0, "rare": 0.0, "answer_rate": 400, "rate": [400, 400]}
    config = {
        "run_folder": str(tmp_path / "run"), "budget": {"steps": 1}, "model": {"init_from": str(tmp_path / "model")},
        "data": {"packing": {"rows": 1, "length": 256, "buffer": 2}, "sources": [{"kind": "spoken-digits", "options": digits}]},
        "fabric": {"accelerator": "cpu", "devices": 1}, "trainable": ["decoder.*"],
        "validation": {"questions": 2, "max_seconds": 0.2},
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_a_start_says_what_it_is_about_to_do(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(recipe)]) == 0
    said = capfd.readouterr().err.splitlines()
    at = next(i for i, line in enumerate(said) if line.startswith("step 1 "))
    assert said[:2] == [f"training {tmp_path}/model in {tmp_path}/run for 1 step", "  devices     1 x cpu, 32-true"]
    labels = [line.split()[0] for line in said[2:at]]
    assert labels == ["model", "trainable", "data", "held"]
    whole, trainable = (int(line.split()[1].replace(",", "")) for line in said[2:4])
    assert 0 < trainable < whole
    assert said[4] == "  data        spoken-digits: made while training" and said[5] == "  held out    2 rows, 2 examples"
    assert main(["fit", str(recipe), "--budget.steps", "2", "--resume", "force"]) == 0
    resumed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("  resumed")]
    assert len(resumed) == 1 and "step-00000001, after 1 steps and " in resumed[0]
    assert main(["fit", str(recipe), "--resume", "restart", "--log.progress", "off"]) == 0
    assert "training" not in capfd.readouterr().err


def test_a_loss_that_no_row_measures_is_refused_before_the_first_step(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(recipe), "--checkpoint.metric", "loss/text", "--data.packing.length", "20"]) == 2
    told = capfd.readouterr().err.splitlines()[-1]
    assert "checkpoint.metric is loss/text, but none of the 2 held-out rows makes an example" in told


def test_the_first_lines_come_before_anything_is_loaded(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        assert "training " in capfd.readouterr().err
        raise SystemExit(7)

    monkeypatch.setattr(fit, "build_initial", load)
    with pytest.raises(SystemExit, match="7"):
        main(["fit", str(recipe)])
