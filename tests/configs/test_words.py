"""Words kept from run to run: they sound as they do unkept, each is said once, and an error loses nothing said before."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from digits.options import RecordedDigitsConfig
from digits.recorded import RecordedDigits, speak_ahead
from digits.words import keep_words, say_word

from omni.audio.resample import resample
from omni.errors import UserError
from tests.train.data.toys import ToyCodec
from train.data.readers.templates.sentences import NUMBERS
from train.data.tts.voices import make_voice


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture
def voice(tmp_path: Path, calls: Path) -> str:
    """A program that says a word as a tone of its own; it writes down what it was asked, and cannot say "never"."""
    script = tmp_path / "say.py"
    script.write_text(
        "import sys, numpy, soundfile\n"
        f"open({str(calls)!r}, 'a').write(sys.argv[1] + chr(10))\n"
        "sys.exit('no such word') if sys.argv[1] == 'never' else None\n"
        "tone = 0.5 * numpy.sin(numpy.arange(4000) * 0.02 * (1 + sum(map(ord, sys.argv[1])) % 50))\n"
        "soundfile.write(sys.argv[2], tone, 22050)\n"
    )
    return f"command:{sys.executable} {script} {{text}} {{out}}"


@pytest.mark.long
def test_a_kept_word_sounds_as_it_does_unkept(voice, calls, tmp_path):
    folder = str(tmp_path / "kept")
    assert keep_words({voice: ["one", "zwölf", "one"]}, 8000, folder, "off") == 2
    said = calls.read_text()
    for word in ("one", "zwölf"):
        kept = say_word(voice, word, 8000, folder)
        assert calls.read_text() == said  # read, not said
        assert torch.equal(kept, say_word(voice, word, 8000))
        plain = make_voice(voice).say(word, "en", 0).load(16000)
        # At half the bandwidth, but for the 16 bits of a sample.
        narrow = resample(resample(plain, 16000, 8000), 8000, 16000)
        assert kept.shape == narrow.shape and (kept - narrow).abs().max() < 1e-4 and kept.abs().max() > 0.3
        said = calls.read_text()


@pytest.mark.long
def test_only_what_lacks_is_said(voice, calls, tmp_path):
    folder = str(tmp_path / "kept")
    keep_words({voice: ["one", "two"]}, 8000, folder, "off")
    first = say_word(voice, "one", 8000, folder)
    assert keep_words({voice: ["two", "three"]}, 8000, folder, "off") == 1
    assert keep_words({voice: ["one", "two", "three"]}, 8000, folder, "off") == 0
    assert sorted(calls.read_text().split()) == ["one", "three", "two"]
    assert keep_words({voice: ["one"]}, 16000, folder, "off") == 1  # another bandwidth is another sound
    say_word.cache_clear()
    assert torch.equal(say_word(voice, "one", 8000, folder), first)
    assert calls.read_text().split().count("one") == 2
    assert not [path for path in (tmp_path / "kept").iterdir() if path.suffix != ".safetensors"]


def test_a_word_that_cannot_be_said_leaves_what_was_kept(voice, tmp_path):
    folder = tmp_path / "kept"
    keep_words({voice: ["one"]}, 8000, str(folder), "off")
    (file,) = folder.iterdir()
    before = file.read_bytes()
    with pytest.raises(UserError, match="ended with 1: no such word"):
        keep_words({voice: ["two", "never"]}, 8000, str(folder), "off")
    assert [path.name for path in folder.iterdir()] == [file.name] and file.read_bytes() == before


@pytest.mark.long
def test_a_source_speaks_before_training_all_that_it_may_ask_for(voice, calls, tmp_path):
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    for digit in range(10):
        soundfile.write(recordings / f"{digit}_anna_0.wav", 0.1 * np.sin(np.arange(2000) * 0.1), 8000)
    german = "null ains zwo droi fier fumf segs sibn agt noin"
    config = RecordedDigitsConfig(
        str(recordings),
        more=1.0,
        more_voices={"en": (voice,), "de": (voice + " foreign",)},
        accents={"de": german.replace("ains", "ains|eins")},
        otherwise=0.5,
        words="window dog",
        wordy=0.5,
        voice_folder=str(tmp_path / "kept"),
    )
    assert speak_ahead(config, "off") == 10 + 2 + 11
    said = sorted(calls.read_text().split())
    assert said == sorted([*NUMBERS[:10], "window", "dog", "eins", *german.split()])
    source = RecordedDigits(config, ToyCodec((12, 12, 6, 8)))
    assert {source.row(i).speaker for i in range(40)} == {voice, voice + " foreign"}
    assert sorted(calls.read_text().split()) == said  # nothing was asked for again
