"""When turns begin and end: of probabilities that are given, and of speech that silero hears."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torchaudio.functional as audio

from infer.turns.detector import SURE, SemanticVad, ServerVad, TurnDetector
from infer.turns.vad import FRAME_SECONDS, SpeechStream, VoiceActivity
from train.data.tts.espeak import synthesise, variants

BACKCHANNELS = ("mm-hmm", "mhm", "uh-huh", "yeah", "okay", "right", "hm", "oh", "sure", "yes")


def follow(settings: Any, pieces: list[tuple[float, float]], playing: bool = False) -> list[tuple[str, float, float]]:
    """Events of stretches of (seconds, probability): kind, `at` and `decided`."""
    detector, events = TurnDetector(settings), []
    for seconds, probability in pieces:
        for _ in range(round(seconds / FRAME_SECONDS)):
            events += detector.push(probability, playing)
    return [(event.kind, event.at, event.decided) for event in events]


def test_a_turn_of_server_vad() -> None:
    settings = ServerVad(prefix_padding_ms=200, silence_duration_ms=320)
    events = follow(settings, [(0.96, 0.1), (0.64, 0.9), (0.96, 0.1)])
    assert [kind for kind, *_ in events] == ["began", "ended"]
    (_, at, decided), (_, end, noticed) = events
    assert at == pytest.approx(0.96) and decided == pytest.approx(0.96 + 2 * FRAME_SECONDS)
    assert end == pytest.approx(1.6) and noticed == pytest.approx(1.6 + 0.32)


def test_what_begins_and_ends_no_turn() -> None:
    assert follow(ServerVad(), [(1, 0.1), (FRAME_SECONDS, 0.99), (1, 0.1)]) == []  # a click
    short = [(0.32, 0.9), (0.32, 0.1), (0.32, 0.9), (0.32, 0.4), (0.32, 0.1)]  # a pause, and breath
    assert [kind for kind, *_ in follow(ServerVad(), short)] == ["began"]
    assert follow(ServerVad(threshold=0.95), [(1, 0.9)]) == []


@pytest.mark.parametrize("eagerness", ["low", "medium", "high", "auto"])
def test_semantic_vad_waits_by_its_eagerness(eagerness: Any) -> None:
    settings = SemanticVad(eagerness=eagerness)
    events = follow(settings, [(0.64, 0.9), (10, 0.1)])
    assert events[-1][2] - events[-1][1] == pytest.approx(SURE[eagerness], abs=FRAME_SECONDS)
    longest = {"low": 8, "medium": 4, "high": 2, "auto": 4}[eagerness]
    events = follow(settings, [(0.64, 0.9), (10, 0.4)])  # breath that never ends
    assert events[-1][2] - events[-1][1] == pytest.approx(longest, abs=FRAME_SECONDS)


def test_a_short_sound_makes_an_answer_softer_and_a_longer_one_ends_it() -> None:
    events = follow(SemanticVad(), [(0.96, 0.1), (0.48, 0.9), (0.96, 0.1)], playing=True)
    assert [kind for kind, *_ in events] == ["duck", "restore"]
    events = follow(SemanticVad(), [(0.96, 0.1), (0.96, 0.9)], playing=True)
    assert [kind for kind, *_ in events] == ["duck", "began"]
    assert events[1][2] - events[0][2] <= 0.6 and events[1][1] == pytest.approx(0.96)
    events = follow(SemanticVad(), [(0.96, 0.1), (0.96, 0.9)])  # nothing plays
    assert [kind for kind, *_ in events] == ["began"]
    settings = SemanticVad(interrupt_response=False)
    assert [kind for kind, *_ in follow(settings, [(0.96, 0.9)], playing=True)] == ["began"]


@pytest.mark.parametrize("pause", [0.16, 0.4, 0.9])
def test_an_interruption_begins_before_its_pause(pause: float) -> None:
    more = [(0.96, 0.1), (0.2, 0.9), (pause, 0.1), (0.96, 0.9)]
    events = follow(SemanticVad(), more, playing=True)
    assert [kind for kind, *_ in events] == ["duck", "restore", "duck", "began"]
    assert events[-1][1] == events[0][1] == pytest.approx(0.96)
    twice = follow(SemanticVad(), [*more[:3], *more[1:]], playing=True)
    assert twice[-1][1] == pytest.approx(0.96)


def test_what_lies_too_long_before_an_interruption_is_no_part_of_it() -> None:
    events = follow(SemanticVad(), [(0.96, 0.1), (0.32, 0.9), (1.28, 0.1), (0.96, 0.9)], playing=True)
    assert events[-1][1] == pytest.approx(0.96 + 0.32 + 1.28)
    often = [(0.96, 0.1), *[(0.32, 0.9), (0.64, 0.1)] * 10, (0.96, 0.9)]  # "mm-hmm" for ten seconds
    events = follow(SemanticVad(), often, playing=True)
    assert events[-1][0] == "began" and events[-1][2] - events[-1][1] < 4.0
    ended = [(0.96, 0.1), (0.96, 0.9), (5.0, 0.1), (0.96, 0.9)]  # nor is a turn that was answered
    assert follow(SemanticVad(), ended, playing=True)[-1][1] == pytest.approx(0.96 + 0.96 + 5.0, abs=0.05)


def test_silence_after_an_answer_is_told_once() -> None:
    detector = TurnDetector(ServerVad(idle_timeout_ms=5000))
    detector.idle_since = detector.now
    kinds = [event.kind for _ in range(500) for event in detector.push(0.1, False)]
    assert kinds == ["idle"]


def say(text: str, voice: str = "en-us", rate: int = 175) -> np.ndarray:
    """Samples [S] at 16 kHz, between seconds of faint noise."""
    samples, given = synthesise(text, voice, rate)
    spoken = audio.resample(samples, given, 16_000).numpy()
    sound = np.concatenate([np.zeros(16_000), spoken, np.zeros(16_000)])
    return (sound + np.random.default_rng(0).normal(0, 0.002, len(sound))).astype(np.float32)


def at24(sound: np.ndarray) -> np.ndarray:
    import torch

    return audio.resample(torch.from_numpy(sound), 16_000, 24_000).numpy()


def hear(sounds: list[np.ndarray], piece: int = 0) -> list[list[float]]:
    """Probabilities of each sound, heard together, in pieces of so many samples."""

    async def body() -> list[list[float]]:
        vad = VoiceActivity()

        async def one(sound: np.ndarray) -> list[float]:
            stream, found = SpeechStream(), list[float]()
            heard = (at24(sound) * 32767).astype(np.int16)
            for start in range(0, len(heard), piece or len(heard)):
                found += await vad.push(stream, heard[start : start + (piece or len(heard))])
            return found

        return await asyncio.gather(*map(one, sounds))

    return asyncio.run(body())


@pytest.mark.long
def test_streams_in_company_and_in_pieces_hear_what_one_alone_hears() -> None:
    sounds = [say("what is two plus three"), say("mm-hmm", "en-us+f3"), say("repeat one two", "en-gb")]
    together = hear(sounds, piece=700)
    for sound, found in zip(sounds, together, strict=True):
        assert np.allclose(hear([sound])[0], found, atol=1e-4)
        assert max(found) > 0.9 and max(found[:25]) < 0.4


@pytest.mark.long
def test_backchannels_do_not_end_an_answer_and_questions_do() -> None:
    voices = ["en-us+" + variant for variant in variants()]
    sounds, generator = [], np.random.default_rng(0)
    for number in range(100):
        if number % 5 == 4:
            cough = generator.normal(0, 1, 4000) * np.exp(-np.arange(4000) / 1000)
            sounds.append(np.concatenate([np.zeros(16_000), 0.3 * cough / np.abs(cough).max(), np.zeros(16_000)]))
        else:
            word, voice = BACKCHANNELS[number % 10], voices[int(generator.integers(len(voices)))]
            sounds.append(say(word, voice, int(generator.integers(200, 280))))
    stopped = ducked = 0
    for found in hear([sound.astype(np.float32) for sound in sounds]):
        detector = TurnDetector(SemanticVad())
        kinds = [event.kind for probability in found for event in detector.push(probability, True)]
        stopped, ducked = stopped + ("began" in kinds), ducked + ("duck" in kinds)
    assert stopped <= 5 and ducked >= 60
    for found in hear([say("what is two plus three", voice) for voice in voices[:8]]):
        detector = TurnDetector(SemanticVad())
        assert "began" in [event.kind for probability in found for event in detector.push(probability, True)]
