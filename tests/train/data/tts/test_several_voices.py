"""Questions in several voices: one for each row, flite among them; rate, pitch, silence and pauses; and a run on such rows."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from omni.errors import UserError
from tests.train.data.readers.test_templates import write
from train.config.parse import read_fit_config
from train.data.config import SourceConfig
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig, voice_of
from train.data.readers import ReaderOptions
from train.data.readers.templates.sentences import NUMBERS
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Sound
from train.data.tts.voices import SpeakingConfig, SpeakingVoice, make_voice
from train.trainer.build import fit

FLITE = f"""#!{sys.executable}
import sys, wave
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(__file__ + ".log", "a") as log:
    print(sys.argv[1:], file=log)
with wave.open(given["-o"], "wb") as file:
    file.setnchannels(1), file.setsampwidth(2), file.setframerate(16000)
    file.writeframes(bytes([0, 16]) * 1600)
"""


@pytest.fixture
def flite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program flite on the PATH that says a tenth of a second; the log of its calls."""
    program = tmp_path / "bin" / "flite"
    program.parent.mkdir()
    program.write_text(FLITE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program.with_name("flite.log")


@pytest.mark.long
def test_rows_are_asked_by_one_voice_each_and_train(tmp_path: Path, flite: Path) -> None:
    config = PrepareConfig(
        ReaderOptions(rows=24),
        speak="question,answer",
        voice={"espeak": 2, "flite:slt": 1, "espeak:en-us+klatt": 1},
        answer_voice="espeak:en-us",
        speaking=SpeakingConfig(silence=(0.1, 0.2), pause=0.5),
        codec="codec2",
        workers=0,
    )
    done = prepare(write(tmp_path), tmp_path / "rows", config)
    assert (done.rows, done.broken) == (24, 0) and done.spoken_questions == done.turns > 24
    assert prepare(tmp_path / "dialogues.yaml", tmp_path / "rows", config) == done  # the settings are the same, as stored
    rows = list(StoredRows(tmp_path / "rows", tmp_path / "cache"))
    kinds = Counter("flite" if row.speaker == "flite:slt" else row.speaker.partition("+")[2] for row in rows)
    assert kinds["flite"] and kinds["klatt"] and len(kinds) > 8
    by_flite = [turn for row in rows if row.speaker == "flite:slt" for turn in row.turns]
    assert len(flite.read_text().splitlines()) == len(by_flite)
    for turn in by_flite:
        assert turn.question_audio is not None
        sound = turn.question_audio.load(16000)
        loud = sound.abs() > 0.1
        assert 1600 + 2 * 1600 <= len(sound) <= 1600 + 2 * 3200 and int(loud.sum()) == 1600
    small = ["--data.packing.rows", "1", "--data.packing.length", "512", "--model.decoder.layers", "1", "--data.workers", "0"]
    once = ["--budget.minutes", "null", "--budget.steps", "1", "--validation.questions", "0", "--log.progress", "off"]
    run, _ = read_fit_config(["configs/nano-scratch.yaml", *small, *once, "--run_folder", str(tmp_path / "run")])
    source = SourceConfig("stored", path=str(tmp_path / "rows"), tasks={"A1A2": 1.0})
    assert (
        fit(dataclasses.replace(run, data=dataclasses.replace(run.data, sources=(source,), words=tuple(NUMBERS)))) is not None
    )


def test_a_seed_has_one_voice_whatever_is_said() -> None:
    voice = make_voice({"espeak:en-us+f2": 1, "espeak:en-gb+m3": 1})
    for seed in range(4):
        alone = make_voice(voice.speaker("en", seed))
        for text in ("one", "two"):
            assert torch.equal(voice.say(text, "en", seed).load(16000), alone.say(text, "en", 0).load(16000))
    many = make_voice("espeak")
    assert len({many.speaker("en", seed) for seed in range(40)}) > 20


def test_flite_is_called_with_rate_and_pitch(flite: Path) -> None:
    voice = make_voice("flite", SpeakingConfig(rate=(100, 100), pitch=(100, 100)))
    said = voice.say("it's; one", "en", 3)
    assert len(said.load(16000)) == 1600 and voice.speaker("en", 3) in {
        f"flite:{n}" for n in ("kal", "kal16", "awb", "rms", "slt")
    }
    call = flite.read_text()
    assert "'duration_stretch=1.7500', '--setf', 'f0_shift=1.4142', '-t', \"it's; one\", '-o'" in call
    make_voice("flite:slt").say("one", "en-GB", 0)
    assert "['-voice', 'slt', '--setf', 'duration_stretch=1.0000', '--setf', 'f0_shift=1.0000'" in flite.read_text()
    with pytest.raises(UserError, match="flite speaks English, not 'de'"):
        make_voice("flite:slt").say("eins", "de", 0)


class Echo:
    """A voice that keeps what it is asked to say."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str, language: str, seed: int) -> Sound:
        self.said.append(text)
        return Sound(torch.ones(100), 1000)

    def speaker(self, language: str, seed: int) -> str:
        return "echo"


def test_pauses_and_silence_are_drawn_for_each_question() -> None:
    echo = Echo()
    voice = SpeakingVoice(echo, SpeakingConfig(silence=(0.1, 0.3), pause=0.5))
    found = [voice.say("what is one plus two", "en", seed).load(1000) for seed in range(60)]
    assert all(len(sound) > 300 and 100 <= int(sound.argmax()) <= 300 and sound.sum() == 100 for sound in found)
    paused = [text for text in echo.said if "," in text]
    assert 15 < len(paused) < 45 and len(set(paused)) == 4  # after each word but the last
    assert all(text.replace(",", "") == "what is one plus two" and text.count(",") < 2 for text in echo.said)
    assert torch.equal(voice.say("what is one plus two", "en", 7).load(1000), found[7])
    assert voice.say("one", "en", 0) and echo.said[-1] == "one"


def test_hesitant_questions_are_spoken_in_two_parts() -> None:
    echo = Echo()
    voice = SpeakingVoice(echo, SpeakingConfig(silence=(0.1, 0.1), hesitant=0.4, hesitation=(0.3, 0.5)))
    lengths, halved = set[int](), 0
    for seed in range(60):
        echo.said.clear()
        sound = voice.say("what is one plus two", "en", seed).load(1000)
        assert " ".join(echo.said) == "what is one plus two" and sound.sum() == 100 * len(echo.said)
        spoken = sound.nonzero().flatten().tolist()
        assert spoken[0] == 100 and len(sound) == spoken[-1] + 101
        if len(echo.said) == 2:
            gap = spoken[100] - spoken[99] - 1
            assert 300 <= gap <= 500
            lengths.add(len(echo.said[0].split()))
            halved += 1
    assert 12 < halved < 36 and lengths == {1, 2, 3, 4}
    assert len(voice.say("one", "en", 0).load(1000)) == 300


def test_answers_have_neither(tmp_path: Path) -> None:
    config = PrepareConfig(speak="question,answer", voice={"espeak": 1.0}, speaking=SpeakingConfig(silence=(1.0, 1.0)))
    assert config.answering == "espeak:+f3"
    question, answer = (voice_of(config, side).say("one", "en", 0) for side in ("question", "answer"))
    assert len(question.load(16000)) > 2 * 16000 > len(answer.load(16000))
