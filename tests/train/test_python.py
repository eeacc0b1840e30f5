"""Training from Python, without a YAML file of one's own: `from train import fit, recipe`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import train
from omni import SpeechLM
from train import FitConfig, fit, recipe

SMALL = {
    "budget": {"steps": 2},
    "model.encoder.layers": 1,
    "model.decoder.layers": 1,
    "data.packing.rows": 1,
    "data.workers": 0,
    "validation.questions": 2,
    "log.progress": "off",
}


@pytest.mark.untrained("*")
def test_a_run_gives_its_figures_and_its_model(tmp_path: Path) -> None:
    config = recipe("nano-scratch", **SMALL, run_folder=str(tmp_path / "run"))
    assert isinstance(config, FitConfig) and config.budget.steps == 2 and config.budget.minutes == 10
    outcome = fit(config)
    assert outcome is not None and outcome.step == 2 and outcome.model == tmp_path / "run" / "model"
    assert {"loss", "exact_match"} <= outcome.figures.keys()
    assert SpeechLM.from_pretrained(outcome.model).model.layout.n_audio == 4
    again = fit(replace(config, budget=replace(config.budget, steps=3), resume="extend"))
    assert again is not None and again.step == 3


@pytest.mark.long
def test_the_door_is_light_and_says_what_it_has() -> None:
    code = (
        "import sys, train; assert 'torch' not in sys.modules; from train import recipe; recipe('nano'); print(train.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == str(train.__all__).split() and not done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        _ = train.train
