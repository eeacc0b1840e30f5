"""The model says where a turn ends in `semantic_vad`: by its frames, however the sound comes, and before the longest wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.serve.host import EngineHost
from infer.serve.realtime.turn_end import SessionTurnEnd, TurnEnds
from infer.serve.settings import ServeSettings
from infer.turns.detector import SURE, TurnDetector
from infer.turns.settings import SemanticVad
from infer.turns.vad import FRAME_SECONDS
from omni.errors import UserError
from omni.generate.turn_end import TurnListener
from omni.model.speech_model import SpeechModel
from tests.generate.test_turn_end import CONFIG, question
from tests.infer.serve.conftest import Client, pcm
from tests.infer.turns.test_turns import at24, say

RATE = 25
"""Encoder frames of a second."""


class Scripted:
    """A listener whose frames end the turn from a second of the sound on; it takes `longest` samples at most."""

    frames_per_second = float(RATE)

    def __init__(self, end: float, longest: int = 10**9) -> None:
        self.end, self.longest = end, longest

    def stream(self) -> Scripted:
        new = Scripted(self.end, self.longest)
        new.samples = 0
        return new

    def push(self, audio: Tensor) -> Tensor:
        before, self.samples = self.samples, self.samples + len(audio)
        if self.samples > self.longest:
            raise UserError("too long")
        frames = torch.arange(before * RATE // 16_000, self.samples * RATE // 16_000)
        return torch.stack([frames < 0, frames >= self.end * RATE], dim=1).float()


def in_pieces(ends: TurnEnds, sound: np.ndarray, size: int) -> list[bool | None]:
    """Decisions every 40 ms for a turn that begins with a sound, at 24 kHz."""

    async def body() -> list[bool | None]:
        turn = SessionTurnEnd(ends)
        await turn.begin(2.0, sound[:size])
        for start in range(size, len(sound), size):
            await turn.push(sound[start : start + size])
        return [turn.ended(2.0 + frame / RATE, "medium") for frame in range(len(sound) * RATE // 24_000)]

    return asyncio.run(body())


def test_any_split_of_the_sound_gives_the_same_decisions() -> None:
    torch.manual_seed(0)
    model = SpeechModel(CONFIG).eval()
    model.turn_head.bias.data[1] = -0.4  # p(end) is around the threshold
    ends = TurnEnds(TurnListener.of(model))
    sound = (question(0.4).repeat_interleave(3)[::2].numpy() * 32767).astype(np.int16)
    once = in_pieces(ends, sound, len(sound))
    assert set(once) == {True, False}
    assert in_pieces(ends, sound, 480) == in_pieces(ends, sound, 7001) == once


def test_a_turn_that_is_over_or_too_long_is_judged_no_more() -> None:
    sound = np.zeros(24_000, np.int16)
    ends = TurnEnds(Scripted(0.5, longest=20_000))  # type: ignore[arg-type]

    async def body() -> None:
        turn = SessionTurnEnd(ends)
        await turn.push(sound)
        assert turn.ended(0.0, "high") is None
        await turn.begin(1.0, sound)
        assert [turn.ended(1.0 + t, "high") for t in (0.3, 0.5, 0.6, 0.9, 5.0)] == [False, False, True, True, True]
        await turn.push(sound)  # the encoder takes no more: silence decides
        assert turn.ended(2.0, "high") is None
        await turn.begin(5.0, sound)
        turn.stop()
        assert turn.ended(6.0, "high") is None
        silent = SessionTurnEnd(None)
        await silent.begin(0.0, sound)
        assert silent.ended(1.0, "high") is None

    asyncio.run(body())


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


@pytest.mark.parametrize("end", [1.0, 60.0])
def test_a_session_commits_where_the_model_says_so(host: EngineHost, settings: ServeSettings, end: float) -> None:
    sound = at24(say("what is two plus three"))
    ends = TurnEnds(Scripted(end))  # type: ignore[arg-type]

    async def body() -> list[dict[str, Any]]:
        given = {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "semantic_vad", "create_response": False}}}}
        client = Client(host, replace(settings, turn_ends=ends), given)
        try:
            for start in range(0, len(sound), 4800):
                await client.send("input_audio_buffer.append", audio=pcm(sound[start : start + 4800]))
            return client.events
        finally:
            await client.session.close()

    kinds = [event["type"] for event in asyncio.run(body())]
    assert "input_audio_buffer.speech_started" in kinds
    assert ("input_audio_buffer.committed" in kinds) == (end == 1.0)  # the other waits for four seconds, which did not come
