"""Recorded digits: a string is what its recordings say, a held-out speaker is never trained on, and mistakes are named."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from digits.options import RecordedDigitsConfig, SpokenDigitsConfig
from digits.recorded import RecordedDigits, find_recordings, speak_ahead, trimmed
from digits.words import keep_words, say_word

from omni.audio.resample import resample
from omni.errors import UserError
from omni.tasks import find_task
from omni.text import Tokenizer
from tests.train.data.toys import ToyCodec
from train.data.build import build_alignment, held_out_rows
from train.data.config import DataConfig, SourceConfig
from train.data.readers.templates.sentences import NUMBERS
from train.data.tts.espeak import synthesise
from train.data.tts.voices import make_voice

CODEC = ToyCodec((12, 12, 6, 8))
RATE = 8000
BASE = {"anna": 300, "berta": 1300, "clara": 2300}
SPACING = 90
"""A toy speaker says digit d as a tone at its own base frequency plus d times this, in Hz."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recordings")
    time = np.arange(RATE // 4) / RATE
    for speaker, base in BASE.items():
        for digit in range(10):
            for index in (0, 1, 10):
                tone = 0.1 * np.sin(2 * np.pi * (base + SPACING * digit) * time)
                soundfile.write(place / f"{digit}_{speaker}_{index}.wav", tone, RATE)
    (place / "README.md").write_text("not a recording")
    return place


def heard(samples: torch.Tensor, pause: float) -> list[tuple[str, int]]:
    """Who says which digits: the strongest frequency of each piece of tone, counted from the start."""
    length, step = 4000, 4000 + round(pause * 16000)
    out = []
    for start in range(0, len(samples) - length + 1, step):
        spectrum = torch.fft.rfft(samples[start : start + length]).abs()
        frequency = int(spectrum.argmax()) * 16000 / length
        speaker = max((s for s, base in BASE.items() if base <= frequency + 20), key=lambda s: BASE[s])
        out.append((speaker, round((frequency - BASE[speaker]) / SPACING)))
    return out


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_string_sounds_as_it_reads(folder, pause):
    config = RecordedDigitsConfig(
        str(folder), ("berta",), pause=(pause, pause), silence=(0.0, 0.0), speed=(1.0, 1.0), level_db=(-6.0, 6.0)
    )
    source = RecordedDigits(config, CODEC)
    spoken: set[str] = set()
    for row in [*(source.row(i) for i in range(30)), *source.held_out(8)]:
        turn = row.turns[0]
        assert turn.question_audio is not None
        said = heard(turn.question_audio.load(16000), pause)
        assert [speaker for speaker, _ in said] == [row.speaker] * len(said)
        assert " ".join(NUMBERS[digit] for _, digit in said) == turn.question_text == turn.answer_text
        assert torch.equal(turn.answer_codes.frames, source.answers.answer_codes(turn.answer_text))
        spoken.add(row.speaker)
    assert spoken == set(BASE)


def test_a_held_out_speaker_is_only_examined(folder):
    source = RecordedDigits(RecordedDigitsConfig(str(folder), ("berta", "anna")), CODEC)
    assert {source.row(i).speaker for i in range(40)} == {"clara"}
    assert [row.speaker for row in source.held_out(4)] == ["berta", "anna", "berta", "anna"]


def test_an_utterance_is_the_same_whenever_it_is_made(folder):
    config = RecordedDigitsConfig(str(folder), ("berta",), answers=SpokenDigitsConfig(reuse=2))
    first, second = RecordedDigits(config, CODEC, seed=3), RecordedDigits(config, CODEC, seed=3)
    rows = [first.row(i) for i in range(5)]
    for i in (4, 0, 2):
        again = second.row(i)
        assert again.turns[0].question_text == rows[i].turns[0].question_text
        assert torch.equal(again.turns[0].question_audio.samples, rows[i].turns[0].question_audio.samples)
    assert first.repeats and first.identity(0) == first.identity(1024) != first.identity(1)


def test_quiet_edges_are_cut_at_the_level_that_is_asked(folder):
    steps = [0.001, 0.03, 0.3, 0.03, 0.001]  # 60, 30 and 10 dB below 1
    frames = torch.cat([torch.full((160,), level) for level in (*steps[:3], 1.0, *steps[2:])])
    assert [len(trimmed(frames, db)) // 160 for db in (-70.0, -50.0, -20.0, -5.0, 0.0)] == [7, 5, 3, 1, 1]
    assert torch.equal(trimmed(frames, -5.0), torch.ones(160))
    config = RecordedDigitsConfig(str(folder), ("anna",), pause=(0, 0), silence=(0, 0), speed=(1, 1))
    plain, cut = (RecordedDigits(replace(config, trim_db=trim), CODEC) for trim in (None, (-0.01, 0.0)))
    lengths = [[len(s.row(i).turns[0].question_audio.samples) for i in range(8)] for s in (plain, cut)]
    assert all(b < a for a, b in zip(*lengths, strict=True))
    same = [[len(row.turns[0].question_audio.samples) for row in s.held_out(8)] for s in (plain, cut)]
    assert same[0] == same[1]  # who is examined is heard as recorded


def beside_the_tone(samples: torch.Tensor) -> torch.Tensor:
    """Power spectrum [2001] of a digit's 4,000 samples without its strongest frequency."""
    spectrum = torch.fft.rfft(samples * torch.hann_window(4000)).abs().square()
    peak = int(spectrum.argmax())
    spectrum[max(0, peak - 4) : peak + 5] = 0
    return spectrum


def test_a_recorders_noise_lies_under_the_digits_and_not_in_the_pauses(folder):
    clean = RecordedDigitsConfig(
        str(folder), ("anna",), pause=(0.3, 0.3), silence=(0.1, 0.1), floor_db=(-120, -120), speed=(1, 1), level_db=(0, 0)
    )
    loud = replace(clean, noise_db=(-30.0, -30.0), answers=SpokenDigitsConfig(question_rate=8000))
    noisy, some = (RecordedDigits(replace(loud, noisy=share), CODEC) for share in (1.0, 0.4))
    for i in range(6):
        sound = noisy.row(i).turns[0].question_audio.load(16000)
        digit = sound[1600:5600]
        spectrum = beside_the_tone(digit)
        low, high = float(spectrum[:1000].sum()), float(spectrum[1050:].sum())  # below and above 4 kHz
        power = 2 * (low + high) / 4000 / (4000 * 0.375)
        assert 10 * math.log10(power / float(digit.abs().max()) ** 2) == pytest.approx(-30, abs=1.5)
        assert high < 0.1 * low  # as a recording at 8 kHz has it
        assert float(sound[:1500].abs().max()) < 1e-5 * float(sound.abs().max())
    held = [row.turns[0].question_audio.load(16000)[1600:5600] for row in noisy.held_out(4)]
    shares = [float(beside_the_tone(x).sum() / (x * x).sum()) for x in held]
    assert max(shares) < 0.1  # who is examined is heard as recorded
    drawn = [some.row(i).turns[0].question_audio.load(16000)[1600:5600] for i in range(60)]
    shares = [float(beside_the_tone(x).sum() / (x * x).sum()) for x in drawn]
    assert 12 <= sum(share > 0.5 for share in shares) <= 36


def test_a_share_of_strings_is_said_by_synthetic_voices_digit_by_digit(folder):
    config = RecordedDigitsConfig(
        str(folder), ("anna",), pause=(0.3, 0.3), silence=(0.1, 0.1), floor_db=(-90, -90), speed=(1, 1), voices=0.5
    )
    source = RecordedDigits(replace(config, answers=SpokenDigitsConfig(variants=("f1", "m1"), rare=0.0)), CODEC)
    rows = [source.row(i) for i in range(60)]
    spoken = [row for row in rows if row.speaker not in BASE]
    assert 15 < len(spoken) < 45 and {row.speaker.partition("+")[2] for row in spoken} == {"f1", "m1"}
    for row in spoken[:12]:
        sound = row.turns[0].question_audio.load(16000)
        loud = torch.nn.functional.avg_pool1d(sound.square()[None, None], 160)[0, 0] > sound.square().max() * 1e-4
        gaps = "".join("x" if frame else "." for frame in loud.tolist()).strip(".")
        assert gaps.count("." * 25) >= len(row.turns[0].answer_text.split()) - 1
        assert row.source == f"recorded-digits/{row.speaker}"
    again = RecordedDigits(replace(config, answers=SpokenDigitsConfig(variants=("f1", "m1"), rare=0.0)), CODEC)
    for i in (7, 3):
        assert torch.equal(again.row(i).turns[0].question_audio.samples, rows[i].turns[0].question_audio.samples)


@pytest.fixture
def asked(monkeypatch):
    """Voices and texts that are said; a voice keeps silent for "un"."""
    asked = []

    def say(text, voice, *rest):
        asked.append((voice, text))
        return (torch.zeros(800), 0) if text == "un" else synthesise(text, voice)

    monkeypatch.setattr("digits.recorded.synthesise", say)
    return asked


def test_voices_of_other_languages_read_what_they_are_given(folder, asked):
    spelled = "siro uan tu tri for faif siks seven eit nain"
    config = RecordedDigitsConfig(str(folder), ("anna",), voices=1.0, accents={"es": spelled}, accented=0.5)
    source = RecordedDigits(replace(config, answers=SpokenDigitsConfig(variants=("f1", "m1"), rare=0.0)), CODEC)
    accented = 0
    for i in range(40):
        row = source.row(i)
        foreign = row.speaker.startswith("es+")
        words = spelled.split() if foreign else NUMBERS
        wanted = [(row.speaker, words[NUMBERS.index(word)]) for word in row.turns[0].question_text.split()]
        assert asked == wanted  # said as it is spelled, and written as in English
        accented += foreign
        asked.clear()
    assert 10 < accented < 30


@pytest.mark.long
def test_words_are_also_said_otherwise(folder, asked):
    config = RecordedDigitsConfig(
        str(folder),
        ("anna",),
        voices=1.0,
        digit_weights=(0, 1, 0, 0, 0, 0, 3, 0, 0, 0),
        english="zero one|un two three four five six|icks|ick seven eight nine",
        otherwise=0.5,
    )
    source = RecordedDigits(replace(config, answers=SpokenDigitsConfig(variants=("f1",), rare=0.0)), CODEC)
    written = [word for i in range(100) for word in source.row(i).turns[0].question_text.split()]
    said = {word: [text for _, text in asked].count(word) for word in ("one", "un", "six", "icks", "ick")}
    ones, sixes = written.count("one"), written.count("six")
    assert ones + sixes == len(written) and 2.2 < sixes / ones < 4.2
    assert said["one"] == ones and 0.3 < said["un"] / ones < 0.7  # a voice that keeps silent says it as usual
    assert said["six"] + said["icks"] + said["ick"] == sixes and min(said["icks"], said["ick"]) > 0.15 * sixes
    asked_of = {digit for row in source.held_out(40) for digit in row.turns[0].question_text.split()}
    assert asked_of == set(NUMBERS[:10])  # who is examined says every digit equally often


@pytest.mark.long
def test_synthetic_voices_also_say_other_words(folder, tmp_path, asked):
    script = tmp_path / "say.py"
    script.write_text(
        "import sys, numpy, soundfile\n"
        "soundfile.write(sys.argv[2], numpy.sin(numpy.arange(6000) * 0.01 * len(sys.argv[1])), 22050)\n"
    )
    english, foreign = (f"command:{sys.executable} {script} {{text}} {{out}}{end}" for end in ("", " foreign"))
    plain = RecordedDigitsConfig(
        str(folder),
        ("anna",),
        voices=0.3,
        more=0.4,
        accented=1.0,
        accents={"de": "null ains zwo droi fier fumf segs sibn agt noin"},
        more_voices={"en": (english,), "de": (foreign,)},
    )
    source = RecordedDigits(replace(plain, words="window dog", wordy=0.5), CODEC)
    rows = [source.row(i) for i in range(120)]
    wordy = [row for row in rows if row.task]
    assert 25 <= len(wordy) <= 60 and {row.task for row in wordy} == {"A1T1"}
    assert {word for row in wordy for word in row.turns[0].question_text.split()} == {"window", "dog"}
    assert not any(row.speaker in BASE or row.speaker == foreign or row.speaker.startswith("de+") for row in wordy)
    assert {row.speaker == english for row in wordy} == {True, False}
    assert all(row.turns[0].lacks(find_task("A1T1")) is None for row in wordy)
    said = [word for row in wordy if row.speaker != english for word in row.turns[0].question_text.split()]
    assert [text for _, text in asked if text in ("window", "dog")] == said
    for row in (row for row in rows if not row.task):
        assert set(row.turns[0].question_text.split()) <= set(NUMBERS)
    without = RecordedDigits(replace(plain, words="window dog"), CODEC)
    assert not any(without.row(i).task for i in range(40))


def test_validation_asks_the_held_out_speaker_alone(folder):
    people = SourceConfig("recorded-digits", options={"folder": str(folder), "held_out": ("anna",)})
    voices = SourceConfig("spoken-digits", options={"arithmetic": 0.0, "examined": False})
    config = DataConfig((people, voices), alignment="words")
    rows = held_out_rows(config, CODEC, 6)
    assert {row.source for row in rows} == {"recorded-digits/anna"} and len(rows) == 6
    alignment = build_alignment(config, Tokenizer.bytes())
    assert alignment.size > len(NUMBERS[:10])


def test_the_numbers_order_the_recordings(folder):
    names = [path.name for path in find_recordings(str(folder))["anna"][7]]
    assert names == ["7_anna_0.wav", "7_anna_1.wav", "7_anna_10.wav"]


def test_mistakes_are_named(folder, tmp_path):
    def build(**changes):
        return RecordedDigits(RecordedDigitsConfig(**{"folder": str(folder), **changes}), CODEC)

    german, words = {"de": ("espeak",)}, {"de": "a b c d e f g h i j"}
    for changes, text in (
        ({"folder": str(tmp_path / "nowhere")}, "does not exist: git clone"),
        ({"folder": str(tmp_path)}, "holds no files such as 7_jackson_12.wav"),
        ({"held_out": ("dora",)}, "'dora', but .* has anna, berta, clara"),
        ({"held_out": ("anna", "berta", "clara")}, "keeps every speaker"),
        ({"pause": (0.3, 0.1)}, r"pause is \(0.3, 0.1\); give the lowest and the highest, at least 0"),
        ({"words": "dog ca|t"}, r"options.words has 'ca\|t': write words of letters"),
        ({"wordy": 0.5, "words": "dog"}, "synthetic voices say nothing: raise options.voices or more"),
        ({"accents": words, "more_voices": {"en": ("espeak",), "de": ("espeak",)}}, "'espeak', which is there already"),
        ({"wordy": 0.5, "words": "dog", "more": 0.5, "more_voices": german, "accents": words}, "more_voices.en names no voice"),
        ({"voices": 0.6, "more": 0.5, "more_voices": {"en": ("espeak",)}}, "0.6 and options.more 0.5 are shares of one whole"),
        ({"accents": {"es": "uno dos"}}, "options.accents.es has 2 words: write zero to nine"),
        ({"accents": {"es": "a b|| c d e f g h i j"}}, r"options.accents.es has 'b\|\|': write a word before, between"),
        ({"more_voices": {"de": ("espeak",)}}, "options.more_voices.de: write zero to nine .* as options.accents.de"),
    ):
        with pytest.raises(UserError, match=text):
            build(**changes)
    (tmp_path / "3_dora_0.wav").write_bytes(b"")
    with pytest.raises(UserError, match="dora never says zero"):
        build(folder=str(tmp_path))
    with pytest.raises(UserError, match="names no speaker"):
        build().held_out(3)


def test_questions_of_a_telephone_lack_its_missing_half():
    from digits.spoken import SpokenDigits

    above = []
    for rate in (8000, 16000):
        row = SpokenDigits(SpokenDigitsConfig(question_rate=rate), CODEC, seed=2).row(1)
        power = torch.fft.rfft(row.turns[0].question_audio.load(16000)).abs().square()
        above.append(float(power[int(len(power) * 0.65) :].sum() / power.sum()))
    assert above[1] > 20 * above[0]
    with pytest.raises(UserError, match="question_rate"):
        SpokenDigitsConfig(question_rate=100)


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
