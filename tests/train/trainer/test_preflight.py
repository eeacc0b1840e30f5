"""What a configuration names and is not there is told at once, before any weights are read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni.checkpoint.folder import save_folder
from omni.config import preset
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.train.config.test_config import CONFIGS, small
from train.checkpoint.retention import FORMAT, STATE
from train.config.parse import read_fit_config
from train.config.run import FitConfig, plain_config
from train.trainer.build import fit
from train.trainer.initial_model import changed
from train.trainer.preflight import check_machine, check_start


def read(recipe: str, *overrides: str) -> FitConfig:
    return read_fit_config([str(CONFIGS / recipe), *overrides])[0]


def lacking(config: FitConfig) -> list[str]:
    """The lines of what is lacking."""
    with pytest.raises(UserError) as caught:
        check_start(config)
    head, *lines = str(caught.value).splitlines()
    assert not lines or head == f"{len(lines)} things are lacking:"
    return [line.strip() for line in lines] or [head]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of a small tied model that speaks SNAC, without the codec's weights."""
    place = tmp_path_factory.mktemp("models") / "base"
    audio = [{"kind": "audio", "size": 4096, "specials": 64, "delay": i + 1} for i in range(7)]
    layout = {"streams": [*audio, {"kind": "text", "size": 256, "specials": 64}]}
    section = small(decoder={**small().decoder, "tie_text": True}, layout=layout, codec="snac")
    with torch.device("meta"):
        state = SpeechModel(changed(preset("nano"), section)).state_dict()
    empty = {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in state.items()}
    save_folder(place, changed(preset("nano"), section), empty, Tokenizer.bytes())
    return place


def test_all_missing_paths_of_a_stage_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "tts").mkdir(parents=True)  # empty
    config = read("mini-omni/stage3.yaml", "--model.codec_folder", "weights/snac", "--model.tokenizer", "t.json")
    lines = lacking(config)
    assert [re.split(r"; |: name|: prepare", line)[0] for line in lines] == [
        "model folder runs/mini-omni-stage2/model does not exist",
        "model.tokenizer: tokenizer t.json does not exist",
        "model.codec_folder: codec folder weights/snac does not exist",
        "data.sources.0.path: data file data/conversations does not exist",
        "data.sources.0.held_out: data file data/conversations-held-out does not exist",
        "data.sources.1.path: data file data/asr does not exist",
        "data.sources.2.path: data folder data/tts holds no .parquet file",
    ]


def test_paths_and_patterns_are_told_together_and_no_weights_are_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.trainer.build.build_fabric", lambda config: pytest.fail("a process was about to start"))
    monkeypatch.setattr("omni.checkpoint.folder.load_file", lambda file: pytest.fail("weights were read"))
    patterns = "[decoder.blocks.*, decoder.text_head.*, decoder.bloks.*, adaptor.*]"
    config = read("voiceassistant/stage2.yaml", "--model.init_from", str(base), "--trainable", patterns)
    lines = lacking(config)
    assert [line.partition(";")[0] for line in lines] == [
        "data.sources.0.path: data file data/voiceassistant does not exist: name a Parquet file of rows, or a folder of them",
        "trainable: pattern 'decoder.bloks.*' matches no parameter",
        "trainable: pattern 'adaptor.*' matches no parameter",
    ]
    with pytest.raises(UserError, match="3 things are lacking"):
        fit(config)
    lines = lacking(read("voiceassistant/stage3.yaml", "--model.init_from", str(base), "--trainable", "[projector.*]"))
    assert any(
        "model.codec_folder: task A1A2 answers in speech, but no weights of the codec 'snac' are given" in s for s in lines
    )


def test_a_truncated_folder_is_refused_by_its_size(base: Path, tmp_path: Path) -> None:
    import shutil

    broken = Path(shutil.copytree(base, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"{}")
    lines = lacking(read("voiceassistant/stage2.yaml", "--model.init_from", str(broken)))
    assert any("model.safetensors is truncated: 2 bytes of" in line for line in lines)


def test_another_configuration_is_refused_before_a_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.trainer.build.build_fabric", lambda config: pytest.fail("a process was about to start"))
    config = read("nano.yaml", "--run_folder", str(tmp_path))
    place = tmp_path / "checkpoints" / "step-00000001"
    place.mkdir(parents=True)
    (place / STATE).write_text(json.dumps({"format": FORMAT, "step": 1, "config": plain_config(config)}))
    with pytest.raises(UserError, match="seed is 7, but the run in .* was started with 0"):
        fit(replace(config, seed=7))


def test_more_workers_than_the_machine_runs_are_refused(tmp_path: Path) -> None:
    config = read("nano.yaml", "--run_folder", str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"data\.workers is 10000, but there are \d+ core\(s\) here, for at most \d+ workers"):
        fit(replace(config, data=replace(config.data, workers=10**4)))
    check_machine(replace(config, data=replace(config.data, workers=8, prefetch=8)))
    assert not (tmp_path / "run").exists()
