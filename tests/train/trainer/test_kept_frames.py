"""Runs over a frozen encoder whose frames are kept with the rows: they train as those that encode, or say why they encode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch
from whisper.model import AudioEncoder

from omni.checkpoint.folder import load_folder
from omni.encoder.whisper import WhisperEncoder
from omni.utils.hardware import multiplies_bf16
from tests.close import assert_near
from tests.train.trainer.test_distillation import made, run_of, save_base
from train.cli import main
from train.config.run import FitConfig
from train.config.sections import LogConfig, ModelSection
from train.data.config import AugmentConfig
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Sound
from train.objective.config import ObjectiveConfig
from train.trainer.logs import METRICS, read_table

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A padded base, another one, and rows of the same sounds without frames, with those of the base, and changed before."""
    place, rng = tmp_path_factory.mktemp("frames"), torch.Generator().manual_seed(0)
    save_base(place / "base", "padded")
    save_base(place / "other", "padded", seed=1)
    rows = []
    for number in range(12):
        samples = 0.1 * torch.randn(4000 + 1500 * number, generator=rng)
        soundfile.write(place / f"{number}.wav", samples.numpy(), 16_000)
        rows.append({"question_audio": f"{number}.wav", "question_text": f"number {number}"})
    (place / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
    frames = ["--frames", str(place / "base")]
    changed = [*frames, "--augment", "{speed: [0.8, 0.9], noise_snr_db: [5, 10], band_probability: 0.5}"]
    for out, options in (("plain", []), ("kept", frames), ("changed", changed)):
        assert main(["data", "prepare", str(place / "table.jsonl"), str(place / out), "--workers", "1", *options]) == 0
    return place


def frozen(folder: Path, base: Path, rows: Path, **changes: object) -> FitConfig:
    log, objective = LogConfig(every=1, progress="lines"), ObjectiveConfig()
    options = {"trainable": ("projector.*",), "model": ModelSection(init_from=str(base)), "log": log, "objective": objective}
    config = run_of(folder, str(base), rows, **options, **changes)
    return replace(config, checkpoint=replace(config.checkpoint, metric="loss"))


def losses(config: FitConfig) -> list[float]:
    """Of all steps, and of the held-out rows."""
    outcome = made(config)
    return [*(row["loss"] for row in read_table(Path(config.run_folder) / METRICS)), outcome.figures["loss"]]


@pytest.mark.parametrize("rows", ["kept", "changed"])
def test_kept_frames_are_those_of_whispers_own_encoder(place: Path, rows: str) -> None:
    encoder = load_folder(place / "base", mute=True).model.encoder
    config = encoder.config
    whisper = AudioEncoder(config.n_mels, config.positions, config.width, config.heads, config.layers)
    whisper.load_state_dict(encoder.whisper.state_dict())
    for row, plain in ((StoredRows(place / out)[number] for out in (rows, "plain")) for number in range(12)):
        audio, kept = row.turns[0].question_audio, row.turns[0].question_frames
        assert audio is not None and kept is not None and kept.encoder == encoder.fingerprint()
        slower = audio.info().samples / plain.turns[0].question_audio.info().samples  # type: ignore[union-attr]
        assert 1.1 < slower < 1.26 if rows == "changed" else slower == 1
        with torch.no_grad():
            wanted = whisper(config.features(audio.load(16_000))[None])[0, : kept.counts[0]]
        assert_near(kept.clips[0].float(), wanted, 2**-6 if multiplies_bf16("cpu") else 2**-8)


def test_a_run_from_kept_frames_is_one_that_encodes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    plain = losses(frozen(tmp_path / "plain", place / "base", place / "plain"))
    assert "the frames kept" not in "".join(capfd.readouterr())
    for method in ("forward", "_encode"):
        monkeypatch.setattr(WhisperEncoder, method, None)
    monkeypatch.setattr(Sound, "load", None)
    kept = losses(frozen(tmp_path / "kept", place / "base", place / "kept"))
    assert "the frames kept with the rows are taken" in "".join(capfd.readouterr())
    assert kept == pytest.approx(plain, rel=1e-3) and len(set(plain)) == len(plain)


@pytest.mark.parametrize("changed", ["other", "augment", "trained"])
def test_frames_that_a_run_cannot_use_are_not_trained_on(place: Path, tmp_path: Path, changed: str, capfd) -> None:
    changes: dict[str, object] = {"trainable": ("*",)} if changed == "trained" else {}
    both = []
    for rows in ("plain", "kept"):
        config = frozen(tmp_path / rows, place / ("other" if changed == "other" else "base"), place / rows)
        if changed == "augment":
            config = replace(config, data=replace(config.data, augment=AugmentConfig(feature_noise=(-3.0, -1.0))))
        both.append(losses(replace(config, **changes)))
    assert both[0] == both[1]
    reason = {"other": "none of this encoder", "augment": "data.augment", "trained": "the encoder is trained"}[changed]
    assert f"are not taken: {reason}" in "".join(capfd.readouterr()).replace("some rows have ", "")
