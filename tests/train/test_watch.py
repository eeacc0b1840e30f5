"""The graph guard in a run, and `python -m train doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from omni.errors import UserError
from omni.model.adapter import Adapter
from tests.train.toys import ToyBatch, ToyModel, ToyObjective, toy_config, toy_fit, toy_parts
from train.bench import Row
from train.bench_guard import guard
from train.cli import main
from train.config import LogConfig
from train.doctor import examine
from train.loop import Loop
from train.parse import read_fit_config

SMALL = [
    "configs/nano.yaml", "--data.packing.rows", "2", "--data.packing.buffer", "4", "--model.decoder.layers", "1",
    "--model.encoder.layers", "1", "--objective.align_first", "0",
]  # fmt: skip


class Written(ToyModel):
    """A model that scales what it has just used, in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        y = x.tanh()
        y.mul_(2)  # the culprit
        return x + y


class Keeping(ToyModel):
    """A model that keeps its last state, and adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        if self.last is not None:
            x = x + 0.1 * self.last
        self.last = x.mean()  # the culprit
        return x


def line_of(word: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if word in line and "culprit" in line)


@pytest.mark.parametrize(
    ("model", "culprit", "words"),
    [
        (Written, "y.mul_(2)", "was saved for backward and then changed in place"),
        (Keeping, "self.last = x", "carries the graph of one backward call of this step into the next"),
    ],
)
def test_a_run_that_fails_ends_with_the_line(tmp_path: Path, model: type[ToyModel], culprit: str, words: str) -> None:
    torch.manual_seed(0)
    parts = toy_parts(objective=ToyObjective(model()))
    with pytest.raises(UserError) as caught:
        toy_fit(toy_config(tmp_path, guard=True), parts)
    said = str(caught.value)
    assert words in said and f"tests/train/test_watch.py:{line_of(culprit)} in forward: {culprit}" in said
    assert "remedy:" in said and said.startswith("step ")


def test_a_sound_run_is_not_changed_and_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LogConfig(every=1, progress="lines")
    _, plain = toy_fit(toy_config(tmp_path / "plain", log=lines))
    _, watched = toy_fit(toy_config(tmp_path / "watched", guard=True, log=lines))
    assert all(t.equal(watched[name]) for name, t in plain.items())
    assert "guard" not in capsys.readouterr().out


class Deaf(ToyObjective):
    """Half of the model never gets a gradient."""

    def forward(self, batch: ToyBatch, denominators: Tensor, progress: float = 1.0):
        with torch.no_grad():
            kept = self.model.text_head.weight.clone()
        losses = super().forward(batch, denominators, progress)
        total = losses.total - self.model.text_head(torch.zeros(1, 32)).sum() * 0
        return losses._replace(total=total.detach() + (self.model.audio_head.weight * kept.mean()).sum())


def test_what_is_found_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = toy_config(tmp_path, guard=True, log=LogConfig(every=1, progress="lines"), optimizer=toy_config("x").optimizer)
    toy_fit(config, toy_parts(objective=Deaf(ToyModel())))
    said = "".join(capsys.readouterr())
    assert said.count("guard, step") == 1 and "received no gradient" in said and "text_embedding.weight" in said


# --- the cost ---------------------------------------------------------------------------------------------------------


def test_the_table_of_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both phases of a recipe that aligns first, each way timed; what a ratio is, is for a quiet machine to say."""
    data = yaml.safe_load(Path("configs/nano.yaml").read_text())
    data["model"] = {"preset": "nano", "decoder": {"layers": 1}, "encoder": {"layers": 1}}
    data["data"]["packing"] = {"rows": 1, "length": 256, "buffer": 4}
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(data))
    taken: list[tuple[float, bool, bool]] = []
    plain = Loop.train

    def train(self: Loop, step: Any) -> None:
        taken.append((self._used(), *under_guard(self)))
        plain(self, step)

    monkeypatch.setattr(Loop, "train", train)
    rows = guard(str(file), torch.device("cpu"), steps=1, rounds=1)
    assert [row.name for row in rows] == [
        f"{way}, {phase}"
        for phase in ("aligning", "all of the model")
        for way in ("plain step", "watched / plain step", "traced / plain step")
    ]
    assert all(isinstance(row, Row) and row.value > 0 for row in rows)
    quiet, looked, traced = (False, False), (True, False), (True, True)
    turns = [looked, quiet, looked, traced], [quiet, looked, looked, traced]
    assert taken == [(used, *state) for used in (0.0, 0.5) for turn in turns for state in turn]


def under_guard(loop: Loop) -> tuple[bool, bool]:
    """Whether a guard watches the run's parameters now, and whether it traces."""
    watched = any(p._post_accumulate_grad_hooks for p in loop.objective.parameters())
    return watched, _get_current_dispatch_mode() is not None


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_doctor_finds_nothing_wrong_with_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *SMALL, "--steps", "1", "--fabric.checkpointing", "true"]) == 0
    assert "nano: 1 steps, every operation traced: nothing found" in capsys.readouterr().out


def test_the_doctor_names_the_line_that_cuts_the_graph(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    plain = Adapter.forward

    def cut(self, frames, counts):
        return plain(self, frames, counts).detach()  # the culprit

    monkeypatch.setattr(Adapter, "forward", cut)
    assert main(["doctor", *SMALL, "--steps", "1"]) == 1
    said = capsys.readouterr().out
    assert "[no_gradient]" in said and "detached from the loss by detach" in said and "adapter.project" in said
    assert f"test_watch.py:{line_of('plain(self')}" in said


def test_the_doctor_names_a_stream_without_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that no task has."""
    config = read_fit_config([*SMALL, "--data.sources.0.tasks", "{T1T2: 1.0}"])[0]
    assert examine(config, 1) == []
    monkeypatch.setattr("train.doctor.tasks_of", lambda data: [__import__("omni.tasks").tasks.TASKS["T1A2"]])
    (found,) = examine(config, 1)
    assert found.kind == "no_target" and "audio0, audio1, audio2, audio3 got no target" in found.what


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--steps", "0"], "--steps is '0'"), (["--modle.preset", "x"], "did you mean")]
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "configs/nano.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err
