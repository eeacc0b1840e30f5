"""The graph guard in a run, and `omni-train doctor`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.errors import UserError
from omni.layout import IGNORE
from omni.model.blocks import Block
from omni.model.speech_model import SpeechModel
from tests.train.objective.test_objective import MODELS, make_examples, pack
from tests.train.toys import ToyBatch, ToyModel, ToyObjective, toy_config, toy_fit, toy_parts
from train.cli import main
from train.commands.fit import examine
from train.config.parse import read_fit_config
from train.config.sections import LogConfig
from train.data.batching.batch import Batch
from train.trainer.step import GuardedStep, Targets

SMALL = [
    "configs/nano-scratch.yaml", "--data.packing.rows", "2", "--data.packing.buffer", "4", "--model.decoder.layers", "1",
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
    assert words in said and f"tests/train/trainer/test_guard.py:{line_of(culprit)} in forward: {culprit}" in said
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


def test_the_doctor_finds_nothing_wrong_with_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *SMALL, "--steps", "1", "--fabric.checkpointing", "true"]) == 0
    assert "nano-scratch: 1 step, every operation traced: nothing found" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_the_doctor_ends_after_the_step_in_which_a_signal_comes(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, taken = GuardedStep.__call__, []

    def step(self: GuardedStep, *args: Any) -> None:
        os.kill(os.getpid(), number)
        plain(self, *args)
        taken.append(self.number)

    monkeypatch.setattr(GuardedStep, "__call__", step)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *SMALL, "--steps", "3"])
    out, err = capsys.readouterr()
    assert (ended.value.code, taken, out) == (128 + number, [1], "")
    assert err == f"stopped by {number.name} after step 1 of 3; nothing is reported\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["0", "0.15"])
def test_the_doctor_looks_at_each_phase_of_a_recipe(first: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A mistake in the decoder is found where the recipe aligns first, too: before, only the aligning phase was traced."""
    plain = Block.forward

    def cut(self, *args, **kwargs):
        return plain(self, *args, **kwargs).detach()  # the culprit

    monkeypatch.setattr(Block, "forward", cut)
    assert main(["doctor", *SMALL, "--objective.align_first", first, "--steps=1"]) == 1
    said = capsys.readouterr().out
    assert "[no_gradient]" in said and "detached from the loss by detach" in said and "projector.project" in said
    assert f"test_guard.py:{line_of('plain(self, *args')}" in said


def without(streams: slice) -> property:
    """`Batch.supervised` without targets on these streams."""

    def supervised(batch: Batch) -> list[Tensor]:
        targets = batch.targets.clone()
        targets[:, streams] = IGNORE
        return [(targets[:, k].reshape(-1) != IGNORE).nonzero().squeeze(1) for k in range(targets.shape[1])]

    return property(supervised)


def test_the_doctor_names_streams_and_tasks_without_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a stream that no task has, nor a task that is drawn rarely or never."""
    written = [*SMALL, "--data.sources.0.tasks"]
    assert examine(read_fit_config([*written, "{T1T2: 1.0, T1A2: 1.0e-9, A1A2: 0}"])[0], 1) == []
    monkeypatch.setattr(Batch, "supervised", without(slice(0, 4)))
    found = examine(read_fit_config([*written, "{T1T2: 0.5, T1A1: 0.5}"])[0], 2)
    missed = [f for f in found if f.kind == "no_target"]
    assert len(missed) == 1
    assert missed[0].message.startswith("T1A1, audio0, audio1, audio2, audio3 got no target in 1 steps")


def test_a_stream_that_no_batch_has_targets_for_is_missed() -> None:
    model = SpeechModel(MODELS["codec2"])
    batch = pack(model, [make_examples(model, ["T1T2", "A1A2"])], 96)
    batch.targets[:, 0] = IGNORE
    weights = torch.ones(len(model.layout))
    weights[0] = 0
    missed, unwanted = Targets(model.layout), Targets(model.layout, weights)
    (finding,) = (finding for _ in range(100) for finding in missed.look([batch, None]))
    assert finding.message.startswith("audio0 got no target in 30 steps")
    assert not any(unwanted.look([batch, None]) for _ in range(100))
