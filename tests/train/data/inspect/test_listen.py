"""`data listen`: a row comes back as it is stored, and as a model is shown it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni.audio.io import read_audio
from omni.checkpoint.folder import save_folder
from omni.checkpoint.places import CODEC
from omni.codec import registry as codecs
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from tests.train.data.inspect.test_stats import model
from tests.train.data.inspect.toys import RATE, Beeper, beeping, row, stored
from tests.train.data.toys import TOKENIZER
from train.commands.data import run_listen as main
from train.data.inspect.checks import Codecs
from train.data.inspect.listen import draw, find_row
from train.data.inspect.scan import Scan, Target
from train.data.rows.row import Codes, Sound


@pytest.mark.parametrize("name", ["10", "rows-00001.parquet:2", "r10"])
def test_rows_are_found_by_number_place_and_id(name: str, tmp_path: Path) -> None:
    data = stored(tmp_path, [row(i) for i in range(12)])
    assert find_row(Scan(data), name).where == f"{data / 'rows-00001.parquet'} row 2"


@pytest.mark.parametrize("codec", ["codec2", "snac"])
def test_sounds_come_back(codec: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(codecs.CODECS, codec, beeping(codec))
    both = replace(row(1, codec), turns=(*row(1, codec).turns, *row(2, codec).turns))
    data, out = stored(tmp_path / "data", [row(0, codec), both]), tmp_path / "out"
    assert main([str(data), "1", "--out", str(out)]) == 0
    for number, turn in enumerate(both.turns):
        for side in ("question", "answer"):
            stored_sound: Sound = getattr(turn, f"{side}_audio")
            assert torch.equal(read_audio(out / f"{side}-{number}.wav", RATE), stored_sound.load(RATE))
        assert isinstance(turn.answer_codes, Codes)
        decoded = Beeper(codec).decode(turn.answer_codes.frames)
        assert torch.allclose(read_audio(out / f"answer-{number}-codes.wav", RATE), decoded, atol=1e-4)
    text = capsys.readouterr().out
    assert text.count(": '") >= 4 and "as A1A2" not in text


@pytest.mark.parametrize("named", [False, True], ids=["the model's", "another"])
def test_a_model_brings_its_codec(named: bool, tmp_path: Path, monkeypatch, capsys) -> None:
    """Weights and all, unless others are named: codes sound, and the row is drawn as this model is shown it."""
    asked: list[Path | None] = []
    monkeypatch.setitem(codecs.CODECS, "snac", beeping("snac", lambda folder, device: asked.append(folder) or Beeper("snac")))
    place, out, config = tmp_path / "model", tmp_path / "out", model("snac")
    save_folder(place, config, SpeechModel(config).state_dict(), TOKENIZER)
    (place / CODEC).mkdir()
    more = ["--codec_folder", str(tmp_path / "mine")] if named else []
    assert main([str(stored(tmp_path / "data", [row(0, "snac")])), "0", "--out", str(out), "--model", str(place), *more]) == 0
    assert asked == [tmp_path / "mine" if named else place / CODEC]
    assert (out / "answer-0-codes.wav").is_file() and "as A1A2: " in capsys.readouterr().out


@pytest.mark.parametrize("codec", ["codec2", "snac"])
@pytest.mark.parametrize("task", ["A1A2", "T1T2"])
def test_prompt_and_targets_are_drawn(codec: str, task: str) -> None:
    drawn = draw(row(3, codec), Target(model(codec), TOKENIZER), Codecs(), task, columns=200)
    lines = drawn.splitlines()
    codes = row(3, codec).turns[0].answer_codes
    assert lines[0].startswith(f"as {task}: ") and lines[1].startswith("column") and isinstance(codes, Codes)
    said = next(line.split() for line in lines if line.startswith("audio0"))[1:]
    trained = [cell[:-1] for cell in said if cell.endswith("*")]
    spoken = [str(c) for c in codes.frames[0].tolist()]
    assert [cell for cell in trained if cell.isdigit()] == (spoken if task == "A1A2" else [])
    assert ("~" in said) == (task == "A1A2")
    text = next(line for line in lines if line.startswith("text"))
    assert "".join(c[0] for c in text.split()[1:] if c.endswith("*") and len(c) == 2).startswith("onenoughtthree")


def test_the_task_is_the_rows_own_or_the_first_that_fits() -> None:
    target = Target(model("codec2"), TOKENIZER)
    assert draw(row(0), target, Codecs()).startswith("as A1A2")
    assert draw(row(0, question_audio=None), target, Codecs()).startswith("as T1A2")
    assert draw(row(0, task="T1T2"), target, Codecs()).startswith("as T1T2")
    assert "its last time steps, " in draw(row(0), target, Codecs(), columns=3)
    with pytest.raises(UserError, match="there is no question_audio, which task A1A2 needs"):
        draw(row(0, question_audio=None), target, Codecs(), "A1A2")
    with pytest.raises(UserError, match=r"snac needs a folder"):
        draw(row(0, answer_codes=None), Target(model("snac"), TOKENIZER), Codecs(), "A1A2")
    bare = row(0, question_audio=None, question_text="")
    with pytest.raises(UserError, match="no task"):
        draw(bare, target, Codecs())


def test_broken_parts_are_told_and_the_rest_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = row(0, question_audio=Sound(data=b"RIFF"), answer_codes=Codes("snac", torch.zeros(7, 3, dtype=torch.int32)))
    assert main([str(stored(tmp_path / "data", [bad])), "0", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "question 0: no sound: " in out and "not decoded: codec snac needs a folder" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["answer-0.wav"]


@pytest.mark.parametrize(
    ("data", "name", "folder"),
    [
        ("set", "1", "listen-set-1"),
        ("set", "rows-00000.parquet:1", "listen-set-rows-00000-1"),
        ("set/rows-00000.parquet", "../r 1", "listen-rows-00000-r-1"),
    ],
)
def test_files_go_into_a_folder_of_their_own(data: str, name: str, folder: str, tmp_path: Path, monkeypatch) -> None:
    stored(tmp_path / "set", [row(0, question_audio=None, answer_audio=None, answer_codes=None), row(1, id="../r 1")])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main([f"../{data}", "0"]) == main([f"../{data}", name]) == 0  # a row of texts makes none
    assert [path.name for path in (tmp_path / "here").iterdir()] == [folder]
    assert sorted(path.name for path in (tmp_path / "here" / folder).glob("[aq]*-0.wav")) == ["answer-0.wav", "question-0.wav"]


@pytest.mark.parametrize("file", ["question-0.wav", "answer-0.wav", "answer-0-codes.wav"])
def test_another_sound_of_that_name_is_not_lost(file: str, tmp_path: Path, monkeypatch) -> None:
    """The same row again changes nothing."""
    monkeypatch.setitem(codecs.CODECS, "codec2", beeping("codec2"))
    data, out = stored(tmp_path / "data", [row(0)]), tmp_path / "out"
    command = [str(data), "0", "--out", str(out)]
    assert main(command) == main(command) == 0
    mine = (out / file).read_bytes()
    (out / file).write_bytes(b"precious")
    with pytest.raises(UserError, match=f"{out / file} is another sound: name another folder with --out, or"):
        main(command)
    assert (out / file).read_bytes() == b"precious"
    assert main([*command, "--overwrite"]) == 0 and (out / file).read_bytes() == mine
