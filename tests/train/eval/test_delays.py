"""One evaluation for each length of the encoder's chunks, and a table of figures beside the delay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from omni.checkpoint.folder import save_folder
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from tests.train.data.toys import TOKENIZER
from tests.train.eval.test_eval import run
from tests.train.eval.toys import QUICK, random_model, read_lines, save_model, write_librispeech

pytestmark = pytest.mark.usefixtures("quick_disk")


def save_listening(folder: Path) -> Path:
    model = random_model()
    config = replace(model.config, encoder=replace(model.config.encoder, mode="chunked", train_chunk_ms=(40, 400)))
    listening = SpeechModel(config)
    listening.load_state_dict(model.state_dict())
    save_folder(folder, config, listening.state_dict(), TOKENIZER)
    return folder


@pytest.mark.long
def test_each_length_is_evaluated_and_they_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data, out = save_listening(tmp_path / "model"), write_librispeech(tmp_path / "libri"), tmp_path / "out"
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
