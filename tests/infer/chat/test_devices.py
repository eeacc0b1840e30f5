"""Microphones and loudspeakers: how they are chosen, and what is said where they cannot be used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer.chat.devices import find_device
from infer.chat.streams import Loudspeaker
from omni.errors import UserError
from tests.infer.chat.conftest import Talks
from tests.infer.chat.fake_sound import LATENCY, RATE, FakeSound, FakeStream

MICROPHONES = "there are 'Built-in Microphone' (0), 'USB Headset' (2)"


def test_devices_are_chosen_by_number_name_or_as_the_default() -> None:
    sound = FakeSound()
    chosen: list[tuple[Any, Any, int]] = [
        ("input", None, 0),
        ("input", "2", 2),
        ("input", "headset", 2),
        ("output", None, 1),
        ("output", "usb", 2),
    ]
    for kind, given, index in chosen:
        assert find_device(sound, kind, given).index == index


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("input", "7", f"--device_in 7 is no microphone; {MICROPHONES}"),
        ("input", "alsa", "--device_in 'alsa' is the name of several: 'Built-in Microphone' (0), 'USB Headset' (2); give the"),
    ],
)
def test_a_device_that_is_none_is_told_with_those_there_are(kind: Any, given: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        find_device(FakeSound(), kind, given)
    assert str(raised.value).startswith(said)


def test_without_a_default_or_any_device_it_says_what_to_do() -> None:
    sound = FakeSound()
    sound.default = {}
    with pytest.raises(UserError, match=r"names no microphone; choose one with --device_in: there are 'Built-in Mic"):
        find_device(sound, "input", None)
    sound.devices = sound.devices[1:2]
    with pytest.raises(UserError, match="the system names no microphone: there is no microphone at all; connect one"):
        find_device(sound, "input", None)


def test_devices_are_listed_without_a_model(talk: Talks) -> None:
    done = talk(None, "--device_in", "list", "--model", "nowhere").done
    assert done.code == 0 and "Built-in Speakers" in done.text and "microphone" in done.text
    assert "48000" in done.text and len(done.text.strip().splitlines()) == 4
    empty = FakeSound()
    empty.devices, empty.default = [], {}
    assert "finds no microphone and no loudspeaker" in talk(None, "--device_in", "list", sound=empty).done.text


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_device_that_takes_no_form_is_told_with_what_was_tried(talk: Talks, kind: str) -> None:
    sound = FakeSound()
    sound.takes[kind] = ((44_100,), (1,))
    done = talk(None, sound=sound).done
    assert done.code == 2 and done.err.count("error: ") == 1 and "cannot be opened (" in done.err
    for form in ("48000 Hz in 1 channel: Invalid sample rate", "48000 Hz in 2 channels: "):
        assert form in done.err
    assert f"choose another with --device_{kind.removesuffix('put')}: there are " in done.err


def test_a_device_that_does_not_start_is_told(talk: Talks) -> None:
    sound = FakeSound()
    sound.refuse_start = {"input"}
    done = talk(None, sound=sound).done
    assert done.code == 2 and "'Built-in Microphone' (0) cannot be started (Device unavailable" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--turn_detection", '{"threshold": 1.5}'), "turn_detection.threshold: Input should be less than or equal to 1"),
        (("--turn_detection", "soon"), "Input tag 'soon' found using 'type'"),
        (("--turn_detection", "{soon"), "--turn_detection '{soon' is no JSON"),
        (("--turn_detection", "none", "--headphones"), "leave --headphones out"),
        (("--server", "http://localhost:1", "--seed", "1"), "leave out --model, --seed"),
        (("--save", "no/such/folder"), "there is no folder 'no/such'; make it first"),
        (("--save", "full"), "has files in it; name a new folder"),
    ],
)
def test_mistakes_are_one_line(talk: Talks, tmp_path: Any, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    done = talk(None, *words).done
    assert done.code == 2 and said in done.err.splitlines()[-1] and done.err.count("error: ") == 1


def loudspeaker(rate: int = RATE, channels: int = 1) -> tuple[FakeSound, Loudspeaker, FakeStream]:
    """One on a device of a rate and channels."""
    sound = FakeSound()
    sound.takes["output"] = ((rate,), (channels,))
    speaker = Loudspeaker(sound, find_device(sound, "output", None), lambda event: None)
    speaker.begin()
    return sound, speaker, sound.streams["output"]


def pass_time(sound: FakeSound, seconds: float) -> None:
    for _ in range(round(seconds * 50)):
        sound.samples += RATE // 50
        sound.streams["output"].fill(0.02)


def test_what_was_played_is_what_the_clock_has_reached_less_the_gaps() -> None:
    sound, speaker, stream = loudspeaker()
    samples = np.arange(1, 4801, dtype=np.float32) / 32768
    speaker.write(samples[:2400])
    pass_time(sound, 0.1)
    assert speaker.played == pytest.approx(0.1 - 0.02 - LATENCY, abs=1e-3) and speaker.waits
    pass_time(sound, 0.4)
    assert speaker.played == 0.1 and not speaker.waits  # the model is late: a gap
    speaker.write(samples[2400:])
    speaker.end()
    pass_time(sound, 0.1)
    heard = stream.heard()
    assert abs(round(speaker.played * RATE) - np.count_nonzero(heard)) <= 1
    pass_time(sound, 0.1)
    assert not speaker.waits and speaker.played == 0.2
    data = np.concatenate([piece for _, piece in stream.pieces])
    assert np.array_equal(data[data != 0], np.arange(1, 4801))


def test_a_stop_silences_at_once_and_the_next_answer_begins_from_nothing() -> None:
    sound, speaker, stream = loudspeaker()
    speaker.write(np.full(RATE, 0.5, np.float32))
    pass_time(sound, 0.2)
    sound.samples += 77
    played = speaker.stop()
    assert abs(round(played * RATE) - len(sound.silenced[-1])) <= 1 and stream.calls == ["start", "abort"]
    assert not speaker.waits
    speaker.begin()
    assert stream.calls == ["start", "abort", "start"] and speaker.played == 0.0
    speaker.write(np.full(240, 0.25, np.float32))
    speaker.end()
    del stream.pieces[:]
    pass_time(sound, 0.2)
    data = np.concatenate([piece for _, piece in stream.pieces])
    assert np.count_nonzero(data) == 240 and data.max() == 8192 and speaker.played == 0.01


def test_a_clock_that_tells_nothing_is_replaced_by_the_latency() -> None:
    sound, speaker, _ = loudspeaker()
    speaker.write(np.full(RATE, 0.5, np.float32))
    sound.samples += RATE // 50
    speaker._fill(memoryview(bytearray(960)), 480, SimpleNamespace(currentTime=0.0, outputBufferDacTime=0.0), None)
    assert speaker.played == 0.0
    sound.samples += round((LATENCY + 0.01) * RATE)
    assert speaker.played == pytest.approx(0.01, abs=2e-4)


def test_a_loudspeaker_of_another_rate_and_two_channels_plays_the_same_seconds() -> None:
    sound, speaker, stream = loudspeaker(48_000, 2)
    wave = np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE).astype(np.float32) / 2
    speaker.write(wave[:9000])
    speaker.write(wave[9000:])
    speaker.end()
    pass_time(sound, 1.3)
    assert not speaker.waits and speaker.played == pytest.approx(1.0, abs=1e-3)
    data = np.concatenate([piece for _, piece in stream.pieces]).astype(np.float32) / 32768
    wanted = np.sin(np.arange(48_000) * 2 * np.pi * 440 / 48_000) / 2
    assert np.abs(data[2000:46_000] - wanted[2000:46_000]).max() < 0.01
