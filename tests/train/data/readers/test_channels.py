"""Channels of the recordings that cuts and NeMo's lists name: mixed where none is named, as everywhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import soundfile

from tests.train.data.readers.toys import RATE, cut, noise, only_broken, rows, write_lines
from train.data.rows.row import Sound

ONE, OTHER = noise(4.0, 0), noise(4.0, 1)
MIX = (ONE + OTHER) / 2


def same(sound: Sound | None, wanted: np.ndarray, start: float = 0.0, seconds: float = 4.0) -> None:
    assert sound is not None
    wanted = wanted[round(start * RATE) : round((start + seconds) * RATE)]
    np.testing.assert_allclose(sound.load(RATE).numpy(), wanted, atol=3 / 32768)


def nemo(**fields: Any) -> dict[str, Any]:
    return {"audio_filepath": "long.wav", "duration": 4.0, "text": "a"} | fields


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, MIX),
        ({"channel_selector": "average"}, MIX),
        ({"channel_selector": 0}, ONE),
        ({"channel_selector": 1}, OTHER),
        ({"channel": 1}, OTHER),
    ],
)
def test_a_nemo_line_mixes_the_channels_unless_it_names_one(tmp_path, fields, wanted):
    cut(tmp_path)
    whole, part = rows(write_lines(tmp_path / "a.jsonl", [nemo(**fields), nemo(offset=1.0, **fields | {"duration": 2.0})]))
    same(whole.turns[0].question_audio, wanted)
    same(part.turns[0].question_audio, wanted, 1.0, 2.0)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"channel_selector": 2}, "has no channel 2: it has 2, counted from 0"),
        ({"channel_selector": "left"}, "field 'channel_selector' is 'left', no channel: give its number"),
        ({"audio_filepath": "three.wav"}, "three.wav has 3 channels and only 1 or 2 are mixed: name one of 0 to 2"),
    ],
)
def test_channels_that_are_not_there(tmp_path, fields, why):
    cut(tmp_path)
    soundfile.write(tmp_path / "three.wav", np.zeros((4 * RATE, 3), np.float32), RATE)
    assert why in only_broken(write_lines(tmp_path / "a.jsonl", [nemo(), nemo(**fields)])).why


def test_lines_of_one_recording_have_ids_of_their_own(tmp_path):
    cut(tmp_path)
    lines = [nemo(), *(nemo(offset=start, duration=seconds) for start, seconds in ((0.0, 1.0), (0.0, 2.0), (1.2345, 1.0)))]
    lines += [nemo(offset=2.0, duration=1.0), nemo(channel_selector=0), nemo(channel_selector=1), nemo(id="mine", offset=0.5)]
    lines[-1]["duration"] = 1.0
    found = [row.id for row in rows(write_lines(tmp_path / "a.jsonl", lines))]
    assert len(set(found)) == len(lines) and found[0] == "long.wav" and found[1] == "long.wav@0-1" and found[-1] == "mine"


@pytest.mark.parametrize(
    ("channel", "said", "wanted"),
    [(0, 0, ONE), (1, 1, OTHER), (None, None, MIX), ([0, 1], None, MIX), ([0, 1], 1, OTHER), ([1], None, OTHER)],
)
def test_a_cut_mixes_the_channels_that_nothing_chooses_from(tmp_path, channel, said, wanted):
    entry = cut(tmp_path)["supervisions"][0] | {"channel": said}
    (row,) = rows(write_lines(tmp_path / "a.jsonl", [cut(tmp_path, channel=channel, supervisions=[entry])]))
    same(row.turns[0].question_audio, wanted, 1.0, 2.0)


def test_a_target_of_two_channels_is_mixed(tmp_path):
    target = cut(tmp_path)["recording"]
    (row,) = rows(write_lines(tmp_path / "a.jsonl", [cut(tmp_path, custom={"target_audio": target})]))
    same(row.turns[0].answer_audio, MIX)
    same(row.turns[0].question_audio, ONE, 1.25, 1.0)


def test_an_answer_lies_in_the_channel_that_its_supervision_names(tmp_path):
    asked = {"start": 0.0, "duration": 0.5, "text": "a", "speaker": "user"}
    answered = {"start": 1.0, "duration": 0.5, "text": "b", "speaker": "agent", "channel": 1}
    (row,) = rows(write_lines(tmp_path / "a.jsonl", [cut(tmp_path, supervisions=[asked, answered])]))
    same(row.turns[0].question_audio, ONE, 1.0, 0.5)
    same(row.turns[0].answer_audio, OTHER, 2.0, 0.5)


def test_channels_in_several_files_are_not_mixed(tmp_path):
    recording = cut(tmp_path)["recording"]
    sources = [{"type": "file", "channels": [place], "source": "target.wav"} for place in (0, 1)]
    said = cut(tmp_path)["supervisions"][0] | {"channel": None}
    parted = cut(tmp_path, recording=recording | {"sources": sources}, supervisions=[said], channel=[0, 1])
    for channel, why in (([0, 1], "channel 0 and 1 is in none of the recording's 2 files"), (None, "no channel is named")):
        assert why in only_broken(write_lines(tmp_path / "a.jsonl", [cut(tmp_path), parted | {"channel": channel}])).why
    nowhere = cut(tmp_path, recording=recording | {"sources": []})
    assert (
        "field 'sources' is [], not a list of objects"
        in only_broken(write_lines(tmp_path / "a.jsonl", [cut(tmp_path), nowhere])).why
    )
