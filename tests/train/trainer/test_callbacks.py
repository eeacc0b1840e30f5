"""Callbacks: called as a run goes on, in its first process; what fails in one ends the run after the state is saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni.errors import UserError
from tests.train.distributed.test_fabric import two_processes
from tests.train.toys import FailingCallback, toy_config, toy_fit, toy_parts
from train.checkpoint import retention
from train.config.sections import CheckpointConfig, LogConfig, ValidationConfig
from train.trainer.parts import CALLBACKS, Callback, Callbacks, Outcome, Parts, register_callback

FIGURES = {"exact_match": 0.5}


@register_callback("notes")
class Notes(Callback):
    """Writes down every call; fails in the event `fail`."""

    fail = ""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls: list[tuple[Any, ...]] = []

    def note(self, event: str, *args: Any) -> None:
        self.calls.append((event, *args))
        if event == self.fail:
            raise RuntimeError("out of ink")

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self.note("step", step, "loss" in figures)

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        self.note("validation", step, figures)

    def on_save(self, step: int, checkpoint: Path) -> None:
        assert checkpoint.is_dir() and checkpoint.parent.parent == self.folder
        self.note("save", step, checkpoint.name)

    def on_end(self, outcome: Outcome) -> None:
        self.note("end", outcome.step, outcome.signal, outcome.model)


def parts_of(**changes: Any) -> Parts:
    return toy_parts(validate=lambda weights, step: dict(FIGURES), **changes)


def config_of(folder: Path, **changes: Any) -> Any:
    return toy_config(
        folder,
        log=LogConfig(every=2, progress="off"),
        validation=ValidationConfig(every_steps=4),
        checkpoint=CheckpointConfig(every_steps=3, every_minutes=None),
        **changes,
    )


def test_all_are_called_in_order(tmp_path: Path) -> None:
    notes = CALLBACKS.find("notes")(tmp_path)
    assert isinstance(notes, Notes)
    parts = parts_of(export=lambda weights: tmp_path / "model")
    toy_fit(config_of(tmp_path), parts, [notes, Callback(tmp_path)])
    best = [("validation", 4, FIGURES), ("save", 4, "step-00000004")]  # the first validation is the best so far
    assert notes.calls == [
        ("step", 1, False), ("step", 2, True), ("step", 3, False), ("save", 3, "step-00000003"), ("step", 4, True), *best,
        ("step", 5, False), ("step", 6, True), ("save", 6, "step-00000006"), ("step", 7, False),
        ("step", 8, True), ("validation", 8, FIGURES), ("save", 8, "step-00000008"), ("end", 8, 0, tmp_path / "model"),
    ]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("event", "step"), [("step", 1), ("save", 3), ("validation", 4), ("end", 8)])
def test_what_fails_ends_the_run_after_the_state_is_saved(tmp_path: Path, event: str, step: int) -> None:
    notes = Notes(tmp_path)
    notes.fail = event
    config = config_of(tmp_path)
    with pytest.raises(UserError, match=f"callback notes: on_{event} failed with RuntimeError: out of ink"):
        toy_fit(config, parts_of(), [notes])
    assert notes.calls[-1][:2] == (event, step)
    newest = retention.newest(tmp_path / "checkpoints")
    assert newest is not None and newest.name == f"step-{step:08d}"
    whole = toy_fit(config_of(tmp_path / "whole"), parts_of())[1]
    assert all(value.equal(whole[name]) for name, value in toy_fit(config, parts_of())[1].items())


def test_the_first_process_alone_calls_them() -> None:
    calls = Callbacks([FailingCallback(1)], SimpleNamespace(first=False))  # type: ignore[arg-type]
    calls.on_step(1, {})
    assert calls.failure is None


@pytest.mark.long
def test_all_processes_end_where_the_first_ones_callback_fails(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "fabric": {"devices": 2, "strategy": "ddp"}, "callback": 5}
    assert two_processes(options) == [2, 2]
    newest = retention.newest(tmp_path / "checkpoints")
    assert newest is not None and newest.name == "step-00000005"
