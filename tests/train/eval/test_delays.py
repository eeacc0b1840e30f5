"""An encoder that hears in chunks: its figures beside the delay, and how far its frames are from those of its teacher."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from omni.audio.io import read_audio
from omni.checkpoint.folder import save_folder
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from tests.train.data.toys import TOKENIZER
from tests.train.eval.test_eval import run
from tests.train.eval.toys import QUICK, noise, random_model, read_lines, save_model, write_librispeech


def save_listening(folder: Path, seed: int = 1, mode: str = "chunked") -> SpeechModel:
    model = random_model(seed)
    chunks = {"chunk_ms": 100, "train_chunk_ms": (40, 400)} if mode == "chunked" else {}
    config = replace(model.config, encoder=replace(model.config.encoder, mode=mode, **chunks))
    listening = SpeechModel(config).eval()
    listening.load_state_dict(model.state_dict())
    save_folder(folder, config, listening.state_dict(), TOKENIZER)
    return listening


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    (tmp_path / "sounds/deep").mkdir(parents=True)
    for index, name in enumerate(("a.wav", "b.wav", "deep/c.wav")):
        soundfile.write(tmp_path / "sounds" / name, noise(index, 0.3 + 0.2 * index), 16_000)
    return tmp_path / "sounds"


def test_the_figure_of_each_length_is_the_mean_over_all_frames(
    tmp_path: Path, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, out = save_listening(tmp_path / "model"), tmp_path / "out"
    teacher = save_model(tmp_path / "teacher", seed=0)
    whole = SpeechModel(student.config).eval()
    whole.load_state_dict(random_model(0).state_dict())
    whole.set_chunk(0)
    given = (tmp_path / "model", recordings, "--teacher", teacher, "--out", out)
    assert run(*given, "--chunks", "40,100,0") == 0
    assert "distance from the teacher" in capsys.readouterr().out
    found = json.loads((out / "delays.json").read_text())
    assert list(found) == ["40", "100", "0"] and (out / "delays.md").is_file() and (out / "delays.png").is_file()
    for chunk, figures in found.items():
        student.set_chunk(int(chunk))
        each = []
        for file in sorted(recordings.rglob("*.wav")):
            heard, taught = (model.encoder.encode([read_audio(file, 16_000)])[0] for model in (student, whole))
            each += ((heard - taught).norm(dim=1) / taught.norm(dim=1)).square().tolist()
        assert figures["distance"]["value"] == pytest.approx(np.mean(each), rel=1e-4)
        assert figures["distance"]["questions"] == 3
    assert run(*given) == 0  # its own length
    assert list(json.loads((out / "delays.json").read_text())) == ["100"]


def test_an_encoder_is_at_no_distance_from_itself_heard_whole(tmp_path: Path, recordings: Path) -> None:
    for mode, same in (("variable", True), ("chunked", True), ("padded", False)):
        save_listening(tmp_path / f"{mode}-model"), save_listening(tmp_path / mode, mode=mode)
        out = tmp_path / f"{mode}-out"
        assert run(tmp_path / f"{mode}-model", recordings, "--teacher", tmp_path / mode, "--chunks", "0", "--out", out) == 0
        value = json.loads((out / "delays.json").read_text())["0"]["distance"]["value"]
        assert (value == 0) == same


def test_recordings_that_cannot_be_heard_are_left_out_and_told(
    tmp_path: Path, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_listening(tmp_path / "model")
    (recordings / "d.wav").write_text("no sound")
    given = (tmp_path / "model", recordings, "--teacher", tmp_path / "model", "--out", tmp_path / "out")
    assert run(*given) == 0
    assert "1 recording left out; the first: " in capsys.readouterr().out
    for file in recordings.rglob("[abc].wav"):
        file.unlink()
    with pytest.raises(UserError, match="none of the 1 recordings can be heard; the first: .*d.wav"):
        run(*given)


@pytest.mark.long
def test_each_length_is_evaluated_and_they_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_listening(tmp_path / "model")
    model, data, out = tmp_path / "model", write_librispeech(tmp_path / "libri"), tmp_path / "out"
    assert run(model, data, "--out", out, "--chunks", "40,100,0", *QUICK) == 0
    said = capsys.readouterr().out
    assert "figures by delay" in said and "whole" in said and "mean wait" in said
    figures = json.loads((out / "delays.json").read_text())
    assert list(figures) == ["40", "100", "0"] and "wer" in figures["40"]
    assert (out / "delays.png").is_file()
    assert (out / "delays.md").read_text().splitlines()[2].startswith("| 40 ms | 20 ms | ")
    answers = [
        [r["response"] for r in read_lines(out / f"chunk-{n}" / "answers.jsonl") if "broken" not in r] for n in (40, 100, 0)
    ]
    assert answers[0] != answers[2] and len(answers[0]) == 10


def test_a_model_that_hears_whole_questions_has_no_chunks(tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "model"), write_librispeech(tmp_path / "libri")
    with pytest.raises(UserError, match="hears whole clips only"):
        run(model, data, "--out", tmp_path / "out", "--chunks", "40", *QUICK)


def test_a_chunk_that_was_not_trained_is_told_with_what_was() -> None:
    model = random_model()
    encoder = replace(model.config.encoder, mode="chunked", train_chunk_ms=(40, 400))
    with pytest.warns(UserWarning, match="chunk_ms is 20, and the encoder was trained with chunks of 40 to 400 ms"):
        assert encoder.with_chunk(20).chunk_ms == 20  # type: ignore[attr-defined]
