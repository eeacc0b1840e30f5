"""Text-only rows become spoken ones: by espeak-ng, a program, a callable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from omni.codec.registry import load_codec
from omni.config import ModelConfig, ProjectorConfig
from omni.errors import UserError
from omni.layout import Layout
from tests.train.data.prepare.toys import ToySource, beep, tone
from tests.train.data.toys import DECODER, ENCODER, TOKENIZER
from train.data.batching.examples import ExampleMaker, Prepared
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig, PrepareTally
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Row
from train.data.tts.voices import make_voice

PROGRAM = """
import sys, wave
text, out = sys.argv[1:]
if text == "what is 3":
    sys.exit("I will not say that")
with wave.open(out, "wb") as file:
    file.setnchannels(1), file.setsampwidth(2), file.setframerate(8000)
    file.writeframes(bytes([0, 16]) * 100 * len(text))
"""


def spoken(out: Path, **options) -> tuple[PrepareTally, list[Row]]:
    config = PrepareConfig(workers=0, **options)
    done = prepare(Path(__file__), out, config, opener=lambda _: ToySource(8, "text"))
    return done, list(StoredRows(out, out.parent / "cache"))


def test_text_becomes_rows_to_train_speech_on(tmp_path):
    """Written rows are spoken on both sides and make examples of every task, those with speech in and out among them."""
    done, rows = spoken(tmp_path / "out", speak="question,answer", codec="codec2")
    assert done.spoken_questions == done.spoken_answers == done.encoded == 8
    codec = load_codec("codec2")
    model = ModelConfig(
        Layout.build(list(codec.codebook_sizes), 256, specials=8), ENCODER, ProjectorConfig("linear", stack=2), DECODER,
        codec="codec2",
    )  # fmt: skip
    maker = ExampleMaker(model, TOKENIZER, codec)
    for row in rows:
        for task in ("A1A2", "T1A2", "A1T2", "T1T2"):
            example = maker.make(0, Prepared(row), [task])
            assert (len(example.clips) == 1) == task.startswith("A1")
            assert len(example.columns) > 0
        assert row.turns[0].answer_codes is not None and row.turns[0].answer_codes.frames.shape[1] > 10  # 0.4 s of speech


def test_voices_vary_with_the_row_and_the_seed_and_not_otherwise(tmp_path):
    sounds = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        _, rows = spoken(tmp_path / name, speak="question", voice=f"{tone.__module__}:tone", seed=seed)
        sounds[name] = [row.turns[0].question_audio.data for row in rows]
    assert sounds["a"] == sounds["b"]
    assert len(set(sounds["a"])) > 5
    assert sum(x != y for x, y in zip(sounds["a"], sounds["c"], strict=True)) > 5


def test_espeak_speaks_each_row_in_a_voice_of_its_own():
    voice = make_voice("espeak")
    said = [voice.say("one two three", "en", seed).load(22050) for seed in (1, 2, 3)]
    assert len({len(samples) for samples in said}) == 3
    assert torch.equal(said[1], voice.say("one two three", "en", 2).load(22050))
    german = make_voice("espeak:+f3")
    assert not torch.equal(german.say("drei", "de", 0).load(22050), german.say("drei", "en", 0).load(22050))
    with pytest.raises(UserError, match="language 'tlh-x'"):
        voice.say("nuqneH", "tlh-x", 0)


def test_a_program(tmp_path):
    """Its words reach it as they are, whatever a shell would make of them; its failure is about one row."""
    program = tmp_path / "say it.py"
    program.write_text(PROGRAM)
    done, rows = spoken(tmp_path / "out", speak="question", voice=f"command:{sys.executable} '{program}' {{text}} {{out}}")
    assert (done.rows, done.broken) == (7, 1)
    assert "I will not say that" in (tmp_path / "out" / "broken.csv").read_text()
    assert all(len(row.turns[0].question_audio.load(8000)) == 900 for row in rows if row.turns[0].question_audio)
    voice = make_voice(f"command:{sys.executable} '{program}' {{text}} {{out}}")
    for text in ("$(rm -rf x) `y` ; {out} {text} \"'", "-"):
        assert len(voice.say(text, "en", 0).load(8000)) == 100 * len(text)
    for line, why in (("nothing-of-that-name {text} {out}", "cannot be run"), ("true {text} {out}", "wrote no file")):
        with pytest.raises(UserError, match=why):
            make_voice(f"command:{line}").say("a", "en", 0)
    for text in ("a\0b", "a\ud83d"):
        with pytest.raises(UserError, match="cannot be given this text"):
            voice.say(text, "en", 0)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_a_callable(workers, tmp_path):
    config = PrepareConfig(workers=workers, speak="question,answer", voice=f"{beep.__module__}:beep", codec="codec2")
    done = prepare(Path(__file__), tmp_path / "out", config, opener=lambda _: ToySource(40, "text"))
    assert done.broken == sum("7" in str(i) for i in range(40))
    assert "failed with KeyError" in (tmp_path / "out" / "broken.csv").read_text()
    row = StoredRows(tmp_path / "out", tmp_path / "cache")[0]
    assert len(row.turns[0].question_audio.load(16000)) == 200 * len("what is 0")
