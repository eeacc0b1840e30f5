"""Questions are cut out of the microphone's sound bit for bit, as the server cuts them, however the sound is divided."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer.chat.questions import PressedQuestions, QuestionFinder, VoiceQuestions
from infer.serve.realtime.configuration import Configuration
from infer.serve.realtime.hearing import SessionInput
from infer.turns.detector import ServerVad
from infer.turns.vad import Silero, SpeechStream
from tests.infer.chat.fake_sound import RATE, LevelVad
from tests.infer.turns.test_turns import at24, say

PADDING = round(0.1 * RATE)


def sound(*pieces: tuple[float, float]) -> np.ndarray:
    """Noise of (seconds, level) each; no two samples of a second are alike."""
    generator = np.random.default_rng(0)
    return np.concatenate([generator.normal(0, level * 32768, round(s * RATE)) for s, level in pieces]).astype(np.int16)


def blocks(samples: np.ndarray, size: int | None = None, seed: int = 0) -> list[np.ndarray]:
    """A sound in blocks of a size, or of random ones."""
    if size is not None:
        return [samples[i : i + size] for i in range(0, len(samples), size)]
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(samples), 60))
    return np.split(samples, cuts)


def found(finder: QuestionFinder, given: list[np.ndarray]) -> list[tuple[int, int, np.ndarray, str]]:
    """First sample, end, sound and end's kind of each question."""
    out: list[tuple[int, int, np.ndarray, str]] = []
    began, pieces = 0, list[np.ndarray]()
    for block in given:
        for part in finder.push(block):
            if part.kind == "began":
                began, pieces = part.at, []
            elif part.samples is not None:
                assert len(part.samples)
                pieces.append(part.samples.copy())
            else:
                out.append((began, part.at, np.concatenate(pieces), part.kind))
    return out


def voice(padding: float = 0.1, longest: float = 30.0, model: Any = None, **settings: Any) -> VoiceQuestions:
    return VoiceQuestions(model or LevelVad(), ServerVad(**settings), padding, longest)


def by_server(samples: np.ndarray, model: Any) -> list[np.ndarray]:
    """The items that the server makes of a sound with its defaults."""
    items: list[np.ndarray] = []
    owner: Any = SimpleNamespace(
        longest=30.0,
        settings=SimpleNamespace(padding=0.1),
        configuration=Configuration(),
        metrics=SimpleNamespace(endpointed=lambda seconds: None),
        send=lambda event: None,
        add_spoken=lambda item, part: items.append(part) or SimpleNamespace(content=[SimpleNamespace()]),
    )

    async def push(stream: SpeechStream, part: np.ndarray) -> list[float]:
        found: list[float] = model.push(stream, part)
        return found

    async def interrupt() -> None:
        pass

    responses: Any = SimpleNamespace(
        playing=False,
        interrupt=interrupt,
        duck=lambda on: None,
        listen=lambda semantic: None,
        respond_to_turn=lambda *given: None,
    )

    partials: Any = SimpleNamespace(stop=lambda: None)

    async def hear() -> None:
        hearing = SessionInput(owner, responses, SimpleNamespace(push=push), partials)  # type: ignore[arg-type]
        for block in blocks(samples, 480):
            await hearing.append(block.astype("<i2").tobytes())

    asyncio.run(hear())
    return items


TALK = sound((0.8, 0.001), (0.9, 0.2), (0.3, 0.001), (0.5, 0.2), (0.9, 0.001), (0.06, 0.02), (0.5, 0.001), (0.7, 0.2), (1, 0))
"""Two questions, the first with a pause; between them a noise below the threshold."""


@pytest.mark.parametrize("division", [*range(5), "whole", "samples"])
def test_a_question_is_the_sound_between_its_bounds_in_any_division(division: Any) -> None:
    sizes = {"whole": len(TALK), "samples": 7}
    questions = found(voice(), blocks(TALK, sizes.get(division), seed=hash(division)))
    assert len(questions) == 2
    for began, ended, heard, _ in questions:
        assert np.array_equal(heard, TALK[began:ended])
    (first, pause_end, *_), (second, end, *_) = questions
    assert abs(first - (0.8 * RATE - PADDING)) <= 800 and abs(pause_end - (2.5 * RATE + PADDING)) <= 800
    assert abs(second - (3.96 * RATE - PADDING)) <= 800 and abs(end - (4.66 * RATE + PADDING)) <= 800


@pytest.mark.parametrize("model", [LevelVad, Silero])
def test_questions_are_those_of_the_server(model: Any) -> None:
    talk = TALK
    if model is Silero:
        talk = (np.concatenate([at24(say(text)) for text in ("what is two plus three", "and twice that")]) * 32767).astype(
            np.int16
        )
    questions = [heard for _, _, heard, _ in found(voice(model=model()), blocks(talk, 480))]
    assert len(questions) == 2
    for mine, of_server in zip(questions, by_server(talk, model()), strict=True):
        assert np.array_equal(mine, of_server)


def test_pieces_come_while_somebody_speaks_and_a_pause_once_speech_goes_on() -> None:
    finder, came = voice(), []
    for number, block in enumerate(blocks(TALK[: 3 * RATE], 480)):
        came += [(number * 480, len(p.samples)) for p in finder.push(block) if p.samples is not None]
    late = [at - sum(size for _, size in came[: i + 1]) for i, (at, _) in enumerate(came)]
    speech = [lag for (at, _), lag in zip(came, late, strict=True) if 1.0 * RATE < at < 1.6 * RATE]
    assert max(speech) - 0.7 * RATE < 0.07 * RATE  # behind the microphone by two frames at most
    assert not any(1.85 * RATE < at < 1.95 * RATE for at, _ in came)  # in the pause nothing is given


def test_noise_below_the_threshold_and_a_click_begin_no_question() -> None:
    assert found(voice(), blocks(sound((1, 0.001), (1, 0.03), (0.01, 0.5), (1, 0.001)), 480)) == []
    assert len(found(voice(threshold=0.1), blocks(sound((1, 0.001), (1, 0.03), (1, 0.001)), 480))) == 1


def test_nothing_is_lost_between_two_questions_and_nothing_is_in_both() -> None:
    talk = sound((0.5, 0.001), (0.5, 0.2), (0.25, 0.001), (0.5, 0.2), (0.5, 0.001))
    questions = found(voice(padding=0.5, silence_duration_ms=150), blocks(talk, 480))
    (_, first_end, _, _), (second, *_) = questions
    assert second == first_end  # the second's padding begins where the first has ended
    assert all(np.array_equal(heard, talk[began:ended]) for began, ended, heard, _ in questions)


def test_a_question_that_is_too_long_is_cut_and_the_next_one_goes_on_with_the_next_sample() -> None:
    talk = sound((0.5, 0.001), (5, 0.2), (1, 0.001))
    questions = found(voice(longest=2.5), blocks(talk, 480))
    assert [kind for *_, kind in questions] == ["cut", "cut", "ended"]
    assert [q[1] for q in questions[:-1]] == [q[0] for q in questions[1:]]
    assert max(len(q[2]) for q in questions) <= 2.1 * RATE
    assert np.array_equal(np.concatenate([q[2] for q in questions]), talk[questions[0][0] : questions[-1][1]])


def test_what_is_passed_over_is_in_no_question() -> None:
    before, echo, after = sound((0.5, 0.001)), sound((1, 0.2)), sound((0.02, 0.001), (0.5, 0.2), (1, 0.001))
    finder = voice()
    for block in blocks(before, 480):
        assert finder.push(block) == []
    for block in blocks(echo, 480):
        finder.pass_over(block)
    ((began, ended, heard, _),) = found(finder, blocks(after, 480))
    assert began == len(before) + len(echo)
    assert np.array_equal(heard, after[: ended - began])


def test_what_follows_a_dropped_question_is_none_of_its() -> None:
    finder = voice()
    talk = sound((0.5, 0.001), (0.5, 0.2))
    parts = [part for block in blocks(talk, 480) for part in finder.push(block)]
    assert parts[0].kind == "began"
    finder.drop()
    after = sound((0.7, 0.001), (0.5, 0.2), (1, 0.001))
    ((began, ended, heard, _),) = found(finder, blocks(after, 480))
    assert began > len(talk) + 0.5 * RATE
    assert np.array_equal(heard, after[began - len(talk) : ended - len(talk)])


def test_pressed_questions_are_what_comes_between_two_presses() -> None:
    finder, talk = PressedQuestions(30.0), sound((1, 0.1))
    parts = finder.push(talk[:5000]) + finder.press() + finder.push(talk[5000:9000]) + finder.push(talk[9000:11_000])
    parts += finder.press() + finder.push(talk[11_000:])
    assert [(part.kind, part.at) for part in parts if part.kind != "sound"] == [("began", 5000), ("ended", 11_000)]
    assert np.array_equal(np.concatenate([p.samples for p in parts if p.samples is not None]), talk[5000:11_000])


def test_a_pressed_question_is_cut_at_the_longest() -> None:
    finder, talk = PressedQuestions(1.0), sound((1, 0.1))
    parts = finder.press() + [part for block in blocks(talk, 480) for part in finder.push(block)]
    assert [part.kind for part in parts if part.kind != "sound"] == ["began", "cut"]
    assert sum(len(part.samples) for part in parts if part.samples is not None) == RATE // 2 == parts[-1].at
