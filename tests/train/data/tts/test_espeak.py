"""espeak-ng says the same words with the same samples, whatever was said before, by whom and where."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch

from omni.errors import UserError
from train.data.tts import espeak as voice
from train.data.tts.espeak import SAMPLE_RATE, check_voice, languages, phonemes, synthesise, variants

VOICES = ["en-us+f3", "en-gb-scotland+m2", "en-us+whisper", "en-gb-x-rp+klatt4", "en-us+Reed"]


@pytest.fixture(scope="module")
def said() -> dict[str, torch.Tensor]:
    return {name: synthesise("what is three plus five", name)[0] for name in VOICES}


@pytest.mark.parametrize("name", VOICES)
def test_what_was_said_before_changes_nothing(name, said):
    for other in VOICES:
        synthesise("four seven one", other, rate=230, pitch=10)
        again, rate = synthesise("what is three plus five", name)
        assert rate == SAMPLE_RATE == 22050
        assert torch.equal(again, said[name])


def test_threads_and_forked_processes_say_the_same(said):
    with ThreadPoolExecutor(4) as pool:
        spoken = pool.map(lambda v: synthesise("what is three plus five", v)[0], VOICES * 3)
        for name, audio in zip(VOICES * 3, spoken, strict=True):
            assert torch.equal(audio, said[name])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_checksum, VOICES) == [_sum(said[name]) for name in VOICES]


def _checksum(name: str) -> int:
    return _sum(synthesise("what is three plus five", name)[0])


def _sum(audio: torch.Tensor) -> int:
    return int((audio * 32768).long().mul(torch.arange(1, len(audio) + 1)).sum())


def test_its_own_folder_serves_as_well_as_the_linked_one(said, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))  # no folder can be made in a file
    voice._home.cache_clear()
    try:
        assert voice._home() == voice._installed()[1].parent
        for name in VOICES:
            assert torch.equal(synthesise("what is three plus five", name)[0], said[name])
        assert len(synthesise("one", "en-gb+f1")[0])  # known by no file name of its own
    finally:
        monkeypatch.undo()
        voice._home.cache_clear()


def end(*_: int | FrameType | None) -> NoReturn:
    raise SystemExit(143)


def test_what_a_signal_s_handler_raises_in_the_middle_of_a_text_ends_it(said: Any) -> None:
    """Python runs a handler as the library calls back, where ctypes drops what it raises; the text would take seconds."""
    before, hook, long = signal.signal(signal.SIGALRM, end), sys.unraisablehook, "three plus five " * 2000
    try:
        for delay in (0.02, 0.025, 0.03):
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(SystemExit):
                synthesise(long, VOICES[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sys.unraisablehook is hook
    assert torch.equal(synthesise("what is three plus five", VOICES[0])[0], said[VOICES[0]])


def test_an_error_while_samples_are_collected_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: object) -> NoReturn:
        calls.append(1)
        raise MemoryError("no room")

    monkeypatch.setattr(voice.ctypes, "string_at", fail)
    with pytest.raises(MemoryError, match="no room"):
        synthesise("three plus five " * 20)
    assert len(calls) == 1  # the library was told to stop


def test_sounds_of_words():
    assert [phonemes(word) for word in ("six", "three", "window")] == [
        ("s", "\u026a", "k", "s"),
        ("θ", "\u0279", "i"),
        ("w", "\u026a", "n", "d", "oʊ"),
    ]
    assert phonemes("six", "de")[0] == "z"
    assert phonemes("yes. no") == phonemes("yes") + phonemes("no")  # a clause after the other
    assert phonemes("") == ()
    assert not {"(", ")", "-"} & set("".join(phonemes("\u0928\u092e\u0938\u094d\u0924\u0947")))  # said in another language
    with pytest.raises(UserError, match="did you mean 'en-us'"):
        phonemes("six", "en-uz")


def test_voices_that_ship():
    assert {"en-us", "en-gb", "en-gb-scotland", "en-029"} <= set(languages())
    assert {"f1", "f5", "m1", "m8", "klatt"} <= set(variants())
    check_voice("en-us")
