"""Text placed in its sound: speaking time, pauses, and what of it counts as heard."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from omni.checkpoint.folder import save_folder
from omni.checkpoint.places import CONFIG
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.generate.speech_time import (
    DEFAULT,
    EXTRA,
    CharacterReader,
    Loudness,
    SpeechTime,
    align_text,
    estimate,
    heard_characters,
    matched,
)
from omni.layout import Layout
from omni.text import Tokenizer
from tests.generate.conftest import make_model

TEXTS = ["Yes, in 2000. And 1,500 more: so be it!", "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u518d\u898b", "  two  spaces ", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_classes_do_not_depend_on_the_pieces(text: str) -> None:
    reader = CharacterReader()
    assert [kind for piece in text for kind in reader.classes(piece)] == CharacterReader().classes(text)


def test_pauses_stand_between_sentences_and_not_at_the_end() -> None:
    classes = CharacterReader().classes("A. B, 20.")
    assert " ".join(classes) == "letter other stop letter other comma digit zero other"
    assert CharacterReader().classes("\u4f60\uff0c\u597d\u3002") == ["wide", "comma", "wide", "stop"]


def test_the_estimate_finds_a_voice_and_leaves_out_what_does_not_fit() -> None:
    voice = {**DEFAULT, "letter": 0.08, "space": 0.03, "comma": 0.4}
    texts = [" ".join(["word"] * (i % 9 + 1)) + ", and" * (i % 4) + " longer" + "er" * (i % 5) for i in range(2000)]
    spoken = [(text, 0.3 + sum(SpeechTime(voice).durations(text))) for text in texts]
    found = estimate([*spoken, *[("nothing of this is said", 25.0)] * 100])
    assert found is not None
    assert [found.seconds[name] for name in ("letter", "space", "comma")] == pytest.approx([0.08, 0.03, 0.4], abs=0.02)
    assert estimate([("", 1.0), ("no sound", 0.0)]) is None


def test_the_estimate_is_kept_in_the_model_folder(tmp_path: Path) -> None:
    model, mine = make_model(Layout.preset("codec2")), SpeechTime({**DEFAULT, "letter": 0.0712})
    for name, extra in (("new", {EXTRA: mine.plain()}), ("old", {})):
        save_folder(tmp_path / name, model.config, model.state_dict(), Tokenizer.bytes(), extra=extra)
    assert SpeechLM.from_pretrained(tmp_path / "new").speech_time == mine
    assert SpeechLM.from_pretrained(tmp_path / "old").speech_time == SpeechTime()
    data = json.loads((tmp_path / "new" / CONFIG).read_text())
    for broken in (3, {}, {**mine.plain(), "version": 2}, {"version": 1, "seconds": {**DEFAULT, "digit": -1}}):
        data["extra"][EXTRA] = broken
        (tmp_path / "new" / CONFIG).write_text(json.dumps(data))
        with pytest.raises(UserError, match="extra: speech_time is .*; it must hold version 1"):
            SpeechLM.from_pretrained(tmp_path / "new")


def test_loudness_does_not_depend_on_the_pieces() -> None:
    sound = torch.cat([torch.zeros(300), torch.ones(2000), torch.zeros(2000), torch.ones(1000), torch.zeros(700)])
    whole, pieces = Loudness(8000), Loudness(8000)
    whole.push(sound)
    for piece in sound.split(77):
        pieces.push(piece)
    assert pieces.levels() == whole.levels()
    assert whole.speech() == [(pytest.approx(0.03), pytest.approx(0.29)), (pytest.approx(0.53), pytest.approx(0.67))]


def test_a_short_silence_is_no_pause_and_no_sound_is_no_speech() -> None:
    loudness = Loudness(1000)
    assert loudness.speech() == []
    loudness.push(torch.cat([torch.ones(100), torch.zeros(60), torch.ones(100)]))
    assert loudness.speech() == [(0.0, 0.26)]
    quiet = Loudness(1000)
    quiet.push(torch.zeros(500))
    assert quiet.speech() == []


SLOW = "One, two. Three four five six seven eight, nine ten."


def said(pace: float, start: float) -> tuple[list[float], list[tuple[float, float]], float]:
    """When each character starts at another pace than estimated, and the stretches of speech that this makes."""
    times, kinds = align_text(SLOW, SpeechTime()), CharacterReader().classes(SLOW)
    times = [start + pace * t for t in times]
    marks = [i for i, kind in enumerate(kinds) if kind in ("comma", "stop")]
    borders = [start, *[t for i in marks for t in (times[i], times[i + 1])], times[-1]]
    return times, list(zip(borders[::2], borders[1::2], strict=True)), times[-1]


@pytest.mark.parametrize("pace", [0.8, 1.25])
def test_pauses_and_the_end_correct_the_estimate(pace: float) -> None:
    times, speech, end = said(pace, start=0.2)
    assert align_text(SLOW, SpeechTime(), speech, end) == pytest.approx(times, abs=1e-6)
    alone = align_text(SLOW, SpeechTime(), speech[:1], None)
    known = align_text(SLOW, SpeechTime(), speech[:3], None)
    at = SLOW.index("Three")
    assert known[at] == pytest.approx(times[at], abs=1e-6) and abs(alone[at] - times[at]) > 0.1


def test_places_never_go_back_whatever_the_sound_says() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        borders = (torch.rand(8, generator=g) * 4).sort().values.tolist()
        speech = list(zip(borders[::2], borders[1::2], strict=True))
        for end in (None, speech[-1][1], 0.1):
            times = align_text(SLOW, SpeechTime(), speech, end)
            assert len(times) == len(SLOW) + 1 and all(b >= a for a, b in pairwise(times))


def test_a_word_is_heard_when_its_middle_was_played() -> None:
    text, time = "abcd efgh", SpeechTime({**dict.fromkeys(DEFAULT, 0.0), "letter": 0.1})
    heard = [text[: heard_characters(text, time, played)] for played in (0.0, 0.19, 0.21, 0.59, 0.61)]
    assert heard == ["", "", "abcd", "abcd", "abcd efgh"]
    assert text[: heard_characters(text, time, 0.3, [(0.0, 1.6)], 1.6)] == ""  # twice as slow, known at the end
    assert heard_characters(text + " ", time, 0.7, [], 0.7) == 10  # all of the sound is all of the text
    assert heard_characters("", time, 1.0) == 0


def test_marks_and_pauses_are_matched_in_order() -> None:
    marks = [(1.0, 1.3, 1.0), (3.0, 3.4, 3.0)]
    assert matched(0.0, marks, []) == [] and matched(0.0, [], [(1.0, 2.0)]) == []
    assert matched(0.0, marks, [(1.1, 1.3), (3.1, 3.4)]) == [(0, 0), (1, 1)]
    assert matched(0.0, marks, [(3.1, 3.5)]) == [(1, 0)]  # no pause at the comma
    assert matched(0.0, marks, [(1.1, 1.3), (2.0, 2.1), (3.0, 3.4)]) == [(0, 0), (1, 2)]  # a breath between
