"""A run that starts from a model folder may add a turn head, keeps one, and may drop it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from omni.checkpoint.folder import save_folder
from omni.errors import UserError
from omni.text import Tokenizer
from tests.train.config.test_config import SMALL, folder, small
from train.config.run import FitConfig
from train.config.sections import BudgetConfig, ModelSection
from train.data.config import DataConfig, SourceConfig
from train.plan.memory import meta_model
from train.plan.plan import count_parameters
from train.trainer.initial_model import build_initial, shape_of

__all__ = ["folder"]


@pytest.mark.parametrize("with_preset", [False, True])
def test_a_run_may_add_a_turn_head_to_a_folder_and_keeps_one(folder: str, with_preset: bool, tmp_path: Path) -> None:
    chunked = {"encoder": {**SMALL["encoder"], "mode": "chunked"}}
    given = small(**chunked) if with_preset else ModelSection("nano", encoder={"mode": "chunked"})
    section = dataclasses.replace(given, init_from=folder, preset="nano" if with_preset else None, turn=True)
    assert build_initial(dataclasses.replace(section, turn=None), 0).model.turn_head is None
    model, stored = build_initial(section, 0).model, build_initial(ModelSection(init_from=folder), 0).model.state_dict()
    assert shape_of(section) == model.config and model.config.turn
    state = model.state_dict()
    assert all(state[name].equal(t) for name, t in stored.items())
    assert {name for name in state if name not in stored} == {"turn_head.weight", "turn_head.bias"}
    save_folder(tmp_path / "turns", model.config, state, Tokenizer.bytes())
    again = build_initial(dataclasses.replace(section, init_from=str(tmp_path / "turns"), turn=None), 1).model
    assert all(t.equal(state[name]) for name, t in again.state_dict().items())
    dropped = build_initial(dataclasses.replace(section, init_from=str(tmp_path / "turns"), turn=False), 1).model
    assert dropped.turn_head is None and dropped.state_dict().keys() == stored.keys()
    counts = count_parameters(
        meta_model(FitConfig(BudgetConfig(steps=1), section, DataConfig((SourceConfig("spoken-digits"),))), model.config)
    )
    assert sum(every for every, _ in counts.values()) == sum(p.numel() for p in model.parameters())
    with pytest.raises(UserError, match="turn is true, but the encoder's frames hear what comes after them"):
        build_initial(ModelSection(init_from=folder, turn=True), 0)
