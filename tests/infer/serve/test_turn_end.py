"""The model says where a turn ends in `semantic_vad`, over the frames that are made for the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from infer.serve.host import EngineHost
from infer.serve.settings import ServeSettings
from infer.turns.detector import SURE, SemanticVad, TurnDetector
from infer.turns.vad import FRAME_SECONDS
from omni.codec.codec2 import Codec2Codec
from omni.generate.listening import RULES, TurnFrames, TurnListener
from omni.generate.speech_lm import SpeechLM
from omni.text import Tokenizer
from tests.generate.session_toys import inside
from tests.infer.conftest import turn_model
from tests.infer.serve.caller import LocalEngine
from tests.infer.serve.conftest import Client, pcm, with_client
from tests.infer.turns.test_turns import at24, say
from tests.soon import soon


def decided(settings: Any, said: bool | None) -> float:
    """Seconds from the end of speech to that of the turn."""
    detector, events = TurnDetector(settings), []
    for frame in range(round(12 / FRAME_SECONDS)):
        events += detector.push(0.9 if frame < 20 else 0.1, False, said)
    return events[-1].decided - events[-1].at if len(events) > 1 else float("inf")


def test_the_model_ends_a_turn_at_once_or_leaves_it_to_the_longest_wait() -> None:
    for eagerness, longest in (("low", 8), ("medium", 4), ("high", 2), ("auto", 4)):
        settings = SemanticVad(eagerness=eagerness)
        assert decided(settings, True) == pytest.approx(FRAME_SECONDS)
        assert decided(settings, False) == pytest.approx(longest, abs=FRAME_SECONDS)
        assert decided(settings, None) == pytest.approx(SURE[eagerness], abs=FRAME_SECONDS)


def has_ended(frames: TurnFrames | None, start: float, now: float, voiced: float, eagerness: Any) -> bool | None:
    """What a detector says at a second of a turn that began, and was voiced last, at others."""
    detector = TurnDetector(SemanticVad(eagerness=eagerness), now)
    detector.speaking, detector.voiced = True, voiced
    return detector.said(frames, start)


def test_a_turn_that_is_not_listened_to_is_not_judged() -> None:
    assert has_ended(None, 0.0, 2.0, 1.0, "high") is None
    frames = TurnFrames(25.0)
    assert has_ended(frames, 0.0, 2.0, 1.0, "high") is False
    frames.put(0, torch.ones(40, 2))
    assert has_ended(frames, 5.0, 6.5, 6.0, "low") is True
    assert has_ended(frames, 5.0, 6.3, 6.0, "low") is False  # so short a silence ends nothing
    assert has_ended(frames, 5.0, 7.4, 6.95, "low") is False  # what is known is of before the last speech


@pytest.mark.parametrize("eagerness", RULES)
def test_only_a_voice_that_the_head_knows_is_waited_for(eagerness: str) -> None:
    def ends(voice: float, end: float, spoken: float = 2.0) -> float:
        """Seconds of silence after which a turn ends."""
        frames = TurnFrames(25.0)
        frames.put(0, torch.tensor([voice, end]).expand(500, 2))
        return next(
            silence for silence in np.arange(0, 9, 0.032) if has_ended(frames, 0.0, spoken + silence, spoken, eagerness)
        )

    assert ends(0.999, 0.9) < 0.45  # the end is sure
    for unsure in ((0.8, 0.01), (0.999, 0.15), (0.999, 0.01, 0.5)):  # of the voice, of the end, of too short a sound
        assert 0.9 < ends(*unsure) < 1.1
    with pytest.raises(StopIteration):
        ends(0.999, 0.01)


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[EngineHost]:
    """Its model finds the end of a turn in every frame, or in none."""
    host = EngineHost(lambda: LocalEngine(SpeechLM(turn_model(9.0, request.param), Tokenizer.bytes(), Codec2Codec())))
    yield host
    host.close()


def talk(host: EngineHost, settings: ServeSettings, seconds: float, body: Any = None) -> list[dict[str, Any]]:
    """The events of a question with so much silence behind it, as it is spoken at ten times the speed."""
    sound = at24(say("what is two plus three"))
    quiet = torch.zeros(round(24_000 * seconds)).short().numpy()

    async def run(client: Client) -> list[dict[str, Any]]:
        for samples in (sound, quiet):
            for start in range(0, len(samples), 960):
                await client.send("input_audio_buffer.append", audio=pcm(samples[start : start + 960]))
                await asyncio.sleep(0.004)
        if body is not None:
            body(client)
        return client.events

    detection = {"type": "semantic_vad", "create_response": False}
    given = {"type": "realtime", "audio": {"input": {"turn_detection": detection}}}
    events: list[dict[str, Any]] = with_client(run, host, settings, given)
    return events


@pytest.mark.long
@pytest.mark.parametrize("host", [9.0, -9.0], indirect=True)
def test_a_session_commits_where_the_model_says_so(
    host: EngineHost, settings: ServeSettings, request: pytest.FixtureRequest
) -> None:
    kinds = [event["type"] for event in talk(host, settings, 1.2)]
    assert "input_audio_buffer.speech_started" in kinds
    sure = request.node.callspec.params["host"] > 0
    assert ("input_audio_buffer.committed" in kinds) == sure  # the other waits for four seconds, which did not come


@pytest.mark.long
@pytest.mark.parametrize("host", [-9.0], indirect=True)
def test_the_session_knows_what_the_head_says_of_the_sound(host: EngineHost, settings: ServeSettings) -> None:
    def body(client: Client) -> None:
        turn = client.session.hearing._turn
        assert turn is not None and turn.listening is not None
        stream = inside(turn.listening.session)._hears
        soon(lambda: not stream.due)
        time.sleep(0.05)
        heard = torch.cat([stream.sound, stream._peeked])
        assert len(heard) / 16_000 > client.session.hearing.buffer.end - client.session.hearing._first - 0.15
        listener = TurnListener.of(host.engine.model)
        wanted = listener.probabilities(listener.encoder.stream().push(heard))
        assert turn.listening.turn.known.shape == wanted.shape and torch.allclose(turn.listening.turn.known, wanted, atol=1e-5)

    assert "input_audio_buffer.committed" not in [event["type"] for event in talk(host, settings, 0.8, body)]


@pytest.mark.long
@pytest.mark.parametrize("host", [-9.0], indirect=True)
def test_an_engine_that_hears_nothing_leaves_it_to_the_longest_wait(
    host: EngineHost, settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni.engine.intake.Intake.listen", lambda *given: False)
    events = talk(host, settings, 4.4)
    (ended,) = [event for event in events if event["type"] == "input_audio_buffer.speech_stopped"]
    assert "input_audio_buffer.committed" in [event["type"] for event in events] and ended["audio_end_ms"] < 2500
