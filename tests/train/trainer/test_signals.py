"""What a signal brings about, and what the screen says of it: at the first, in a validation, and at a second Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tests.soon import soon
from tests.train.toys import toy_config, toy_fit, toy_held_out, toy_parts
from train.checkpoint import retention
from train.config.sections import CheckpointConfig, LogConfig, ValidationConfig
from train.trainer import signals
from train.trainer.logs import METRICS, VALIDATION, read_table
from train.trainer.signals import BrokenOff, Stop, break_off

LINES = LogConfig(every=1, progress="lines")


def kill(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def waits(lines: list[str], count: int) -> None:
    """Waits until so many lines were said by the other thread."""
    soon(lambda: len(lines) >= count, 5)


def test_the_first_signal_says_what_it_brings_about_and_ctrl_c_after_it_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(signals, "SAME", 0.0)
    with pytest.raises(KeyboardInterrupt), Stop(said.append) as stop:
        stop.phase = "validation"
        break_off()
        kill(signal.SIGTERM)
        waits(said, 1)
        kill(signal.SIGTERM)
        with pytest.raises(BrokenOff):
            break_off()
        kill()
    assert stop.number == signal.SIGTERM and len(said) == 1
    assert said[0].startswith("SIGTERM: the validation is broken off, and the state saved; Ctrl-C again ends")
    break_off()


def test_a_signal_within_a_step_ends_the_run_after_it(tmp_path: Path) -> None:
    parts = toy_parts()
    flops: list[int] = []

    def idle(progress: float) -> list:
        flops.append(1)
        if len(flops) == 6:  # asked twice in a step
            kill(signal.SIGTERM)
        return []

    outcome, _ = toy_fit(toy_config(tmp_path), replace(parts, idle=idle))
    assert (outcome.step, outcome.signal) == (3, signal.SIGTERM)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["answers", "loss", "end"])
def test_a_validation_that_is_broken_off_is_made_when_the_run_goes_on(
    tmp_path: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def validate(weights: dict[str, Tensor], step: int) -> dict[str, float]:
        asked.append(step)
        if len(asked) == 1 and where != "loss":
            kill(signal.SIGTERM)
        break_off()
        return {"exact_match": 0.5}

    plan = ValidationConfig() if where == "end" else ValidationConfig(every_steps=3)
    config = toy_config(tmp_path, validation=plan, log=LINES, checkpoint=CheckpointConfig(every_minutes=None, keep_best=0))
    parts = toy_parts(validate=validate)
    if where == "loss":
        parts = replace(parts, held_out=Killing(toy_held_out(0, 1)))
    outcome, _ = toy_fit(config, parts)
    stopped = 8 if where == "end" else 3
    assert (outcome.step, outcome.signal, outcome.figures) == (stopped, signal.SIGTERM, {})
    said = capfd.readouterr().err
    assert "SIGTERM: the validation is broken off" in said and "validation at step" not in said
    assert f"stopped by SIGTERM after step {stopped}" in said and not read_table(tmp_path / VALIDATION)
    outcome, _ = toy_fit(config, toy_parts(validate=validate))
    assert (outcome.step, outcome.signal) == (8, 0)
    assert [row["step"] for row in read_table(tmp_path / VALIDATION)] == ([8] if where == "end" else [3, 6, 8])
    assert [row["step"] for row in read_table(tmp_path / METRICS)] == list(range(1, 9))


class Killing(list):
    """Batches, with a signal after the first."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            kill(signal.SIGTERM)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("every", "line"), [(None, "3 steps since the start are lost"), (2, "1 step since {} is lost")])
def test_a_second_ctrl_c_says_what_is_lost(
    tmp_path: Path, every: int | None, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def before(step: int) -> None:
        if step == 3:
            kill()
            kill()  # by torchrun, which sends on what the terminal has sent
            time.sleep(signals.SAME)
            kill()

    plan = CheckpointConfig(every_steps=every, every_minutes=None, asynchronous=False)
    with pytest.raises(KeyboardInterrupt):
        toy_fit(toy_config(tmp_path, log=LINES, checkpoint=plan), toy_parts(before))
    saved = retention.newest(tmp_path / "checkpoints")
    assert f"ended without saving: {line.format(saved)}" in capfd.readouterr().err.splitlines()


def test_questions_are_broken_off_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a batch of answers asks again and again whether it is still wanted."""
    from omni.generate import speech_lm

    closed: list[int] = []
    engine: Any = SimpleNamespace(ask=lambda running: None)
    session = SimpleNamespace(begin=lambda answer, message: None, close=lambda: closed.append(1))
    answer = SimpleNamespace(number=1, ended=False)
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise BrokenOff

    monkeypatch.setattr(speech_lm, "CHECK_SECONDS", 0.01)
    with pytest.raises(BrokenOff), speech_lm.checked(check):
        speech_lm.answer_all(engine, range(2), lambda n: (session, answer), 2)  # type: ignore[arg-type, return-value]
    assert len(closed) == 2
