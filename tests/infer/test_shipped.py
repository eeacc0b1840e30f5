"""The model that ships with the package: when it answers, what is told, adapters by name, and answers without the codec."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infer.__main__ import main
from infer.checks import read_adapters
from omni import pretrained
from omni.checkpoint.folder import read_config, stored_dtype
from omni.codec import codec2
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from tests.infer.conftest import Done, write_adapter, write_question

DEMONSTRATION = Path("runs/nano/model")
SHORT = ("--max_seconds", "0.3", "--json")


@pytest.fixture
def ships(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model, with two adapters and a question, in the place of the one that ships; this folder is empty."""
    place = tmp_path / "package"
    nano = Path(shutil.copytree(folder, place / "nano"))
    for number, name in enumerate(("rms", "slt")):
        write_adapter(nano / "adapters" / name, number)
    write_question(nano / "question.wav")
    monkeypatch.setattr(pretrained, "SHIPPED", place)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return nano


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`pycodec2` is not installed."""
    monkeypatch.setitem(sys.modules, "pycodec2", None)
    codec2.library_path.cache_clear()
    yield
    codec2.library_path.cache_clear()


@pytest.fixture
def ask(capsysbinary: pytest.CaptureFixture[bytes]):
    def call(*words: object) -> Done:
        capsysbinary.readouterr()
        code = main(["ask", *map(str, words)])
        out, err = capsysbinary.readouterr()
        return Done(code, out, err.decode())

    return call


@pytest.mark.long
def test_it_answers_where_no_model_is_named_and_the_demonstration_left_none(ships: Path, ask) -> None:
    done = ask("--text", "hello", "--task", "T1T2", *SHORT)
    assert (done.code, done.err) == (0, "model: the one that ships with omni-speech (--model names another)\n")
    shutil.copytree(ships, DEMONSTRATION)
    done = ask("--text", "hello", "--task", "T1T2", *SHORT)
    assert (done.code, done.err) == (0, "model: runs/nano/model (--model names another)\n")
    for named in (ships, "nano"):
        done = ask("--text", "hello", "--task", "T1T2", *SHORT, "--model", named)
        assert (done.code, done.err) == (0, "")


def test_a_folder_of_its_name_comes_first(ships: Path, ask) -> None:
    Path("nano").mkdir()
    assert "nano has no config.json" in ask("--text", "hello", "--model", "nano").err
    with pytest.raises(UserError, match=r"nano has no config\.json"):
        SpeechLM.from_pretrained("nano")


def test_python_takes_it_by_name(ships: Path, lm: SpeechLM) -> None:
    question = ships / "question.wav"
    found = SpeechLM.from_pretrained("nano").generate(question, max_seconds=0.3)
    assert torch.equal(found.codes, lm.generate(question, max_seconds=0.3).codes)


def test_without_its_weights_the_message_says_what_to_do(ships: Path, ask) -> None:
    (ships / "model.safetensors").unlink()
    done = ask("--text", "hello")
    assert done.code == 2 and "no model in runs/nano/model yet" in done.err and "omni-train demo" in done.err
    assert "--model" in done.err and done.err.count("\n") == 1
    with pytest.raises(UserError, match=r"no weights in .*nano; `omni-train demo` trains one, or name a model folder"):
        SpeechLM.from_pretrained("nano")
    assert "no weights in" in ask("--text", "hello", "--model", "nano").err


def test_its_question_is_asked_where_no_file_of_that_name_is_here(ships: Path, ask) -> None:
    done = ask("question.wav", *SHORT)
    assert done.code == 0 and "question.wav: the one that ships with omni-speech\n" in done.err
    wanted = json.loads(ask(ships / "question.wav", *SHORT).out)["text"]
    assert json.loads(done.out)["text"] == wanted
    write_question(Path("question.wav"), seed=5)
    done = ask("question.wav", *SHORT)
    assert "question.wav" not in done.err and json.loads(done.out)["text"] != wanted
    assert "'other.wav': No such file" in ask("other.wav").err


def test_adapters_in_a_model_folder_are_called_by_their_names(ships: Path, ask, monkeypatch: pytest.MonkeyPatch) -> None:
    by_folder = ask("question.wav", *SHORT, "--adapter", ships / "adapters" / "slt")
    by_name = ask("question.wav", *SHORT, "--adapter", "slt")
    assert by_name.code == 0 and json.loads(by_name.out)["text"] == json.loads(by_folder.out)["text"]
    assert json.loads(ask("question.wav", *SHORT).out)["text"] != json.loads(by_name.out)["text"]
    unknown = ask("question.wav", "--adapter", "slr")
    assert unknown.code == 2 and "adapter slr is neither a folder nor in" in unknown.err
    assert "did you mean 'slt'? known: rms, slt" in unknown.err
    lm = SpeechLM.from_pretrained("nano")
    assert [lm.load_adapter(name) for name in ("slt", "rms")] == ["slt", "rms"]
    shutil.copytree(ships / "adapters" / "rms", "slt")  # a folder of that name comes first
    assert json.loads(ask("question.wav", *SHORT, "--adapter", "slt").out)["text"] != json.loads(by_name.out)["text"]


def test_a_server_offers_them_as_voices(ships: Path) -> None:
    own = {name: str(ships / "adapters" / name) for name in ("rms", "slt")}
    assert read_adapters((), str(ships)) == own
    assert read_adapters(("slt=.", "mine=."), str(ships)) == {**own, "slt": ".", "mine": "."}


def test_without_the_codec_it_answers_in_text_and_says_what_brings_the_sound(
    ships: Path, ask, lm: SpeechLM, mute: None
) -> None:
    done = ask("question.wav", "--max_seconds", "0.32", "--max_tokens", "8", "--json")
    answer = json.loads(done.out)
    assert done.code == 0 and answer["audio"] is None and answer["error"] is None
    assert answer["text"].startswith(lm.generate(ships / "question.wav", max_seconds=0.32).text)  # which is cut with the sound
    assert 'answers are text alone: codec2 needs the package pycodec2: pip install "omni-speech[nano]"' in done.err
    assert not Path("answer.wav").exists()
    for words in (("--out", "a.wav"), ("--task", "A1A2"), ("--out", "-")):
        done = ask("question.wav", *words)
        assert done.code == 2 and 'pip install "omni-speech[nano]"' in done.err and not done.out
    found = SpeechLM.from_pretrained("nano")
    assert found.codec is None and found.generate(ships / "question.wav", max_tokens=8).audio is None


@pytest.mark.skipif(pretrained.shipped("nano") is None, reason="this copy of the package has no weights")
def test_the_one_that_ships_is_small_and_answers_its_question(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = pretrained.SHIPPED / "nano"
    assert sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) <= 8 * 2**20
    assert stored_dtype(place) == torch.bfloat16 and read_config(place).ctc == 0
    done = ask("question.wav")
    assert done.code == 0 and done.text.splitlines()[0] == "eleven"
