"""What is understood while somebody speaks: told to those who asked, where the engine has time, and never in the way."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from infer.serve.host import EngineHost
from infer.serve.realtime import hearing
from infer.serve.realtime.hearing import PARTIAL, Transcripts
from tests.infer.serve.conftest import Client, noise, pcm
from tests.infer.serve.test_turn_sound import chunked, host
from tests.infer.serve.test_turns import append, at24, say

__all__ = ["chunked", "host"]


def session(wanted: bool = True, detection: Any = None) -> dict[str, Any]:
    """A session that asks for what is understood, or does not."""
    return {
        "type": "realtime",
        "audio": {"input": {"turn_detection": detection}},
        "omni": {"partial_transcripts": wanted},
    }


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model writes without end."""
    monkeypatch.setattr(hearing, "TRANSCRIPT_TOKENS", 6)
    monkeypatch.setattr(hearing, "EVERY", 0.05)


async def speak(client: Client, seconds: float = 1.5, seed: int = 0) -> None:
    """Append noise at four times the speed."""
    for piece in np.array_split(noise(seconds, seed), round(seconds * 25)):
        await client.send("input_audio_buffer.append", audio=pcm(piece))
        await asyncio.sleep(0.01)


async def speak_until_understood(client: Client, seed: int = 0) -> None:
    """Append noise until something of it is understood."""
    known = len(told(client))
    for number in range(25):
        await speak(client, 1.0, 100 * seed + number)
        if len(told(client)) > known:
            return
    raise AssertionError("nothing was understood")


def told(client: Client) -> list[dict[str, Any]]:
    return [event for event in client.events if event["type"] == PARTIAL]


@pytest.mark.long
@pytest.mark.parametrize("heard", [True, False])
async def test_they_are_told_for_the_item_that_is_committed(talk: Any, heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not heard:
        monkeypatch.setattr(EngineHost, "listens", property(lambda self: False))
    async with talk(session()) as client:
        for turn in range(2):
            since, known = len(client.events), len(told(client))
            await speak_until_understood(client, turn)
            await client.send("input_audio_buffer.commit")
            committed = await client.until("input_audio_buffer.committed", since)
            assert {event["item_id"] for event in told(client)[known:]} == {committed["item_id"]}
            count = len(told(client))
            await client.ask()
            assert len(told(client)) == count
        texts = [event["transcript"] for event in told(client)]
        assert all(texts) and all(event["content_index"] == 0 for event in told(client))


@pytest.mark.long
async def test_they_are_told_for_the_item_that_was_announced(talk: Any) -> None:
    async with talk(session(detection={"type": "server_vad", "interrupt_response": False})) as client:
        await append(client, at24(say("what is two plus three")))
        started = await client.until("input_audio_buffer.speech_started")
        await client.until("response.done")
        assert told(client) and {event["item_id"] for event in told(client)} == {started["item_id"]}
        assert client.types.index(PARTIAL) < client.types.index("input_audio_buffer.committed")


@pytest.mark.parametrize("wanted", [True, False])
async def test_nobody_gets_them_who_has_not_asked_nor_of_a_busy_engine(
    talk: Any, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineHost, "spare", lambda self: not wanted)
    async with talk(session(wanted)) as client:
        await speak(client)
        await client.send("input_audio_buffer.commit")
        await client.ask()
        assert not told(client) and (wanted or client.session.transcripts._session is None)


async def test_an_answer_does_not_wait_for_one_that_is_under_way(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    began, left = asyncio.Event(), list[float]()

    async def slow(self: Transcripts, *given: Any) -> str:
        began.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            left.append(time.monotonic())
            raise
        return "late"

    monkeypatch.setattr(Transcripts, "_partial", slow)
    async with talk(session()) as client:
        await speak(client)
        await asyncio.wait_for(began.wait(), 10)
        start = time.monotonic()
        await client.send("input_audio_buffer.commit")
        await client.ask()
        assert left and left[0] - start < 0.5 and time.monotonic() - start < 10
        assert not told(client)


async def test_what_is_cleared_is_understood_no_more(talk: Any) -> None:
    async with talk(session()) as client:
        await speak_until_understood(client)
        first = told(client)[0]["item_id"]
        await client.send("input_audio_buffer.clear")
        count = len(told(client))
        await speak_until_understood(client, 1)
        assert {event["item_id"] for event in told(client)[count:]}.isdisjoint({first})


async def test_a_model_that_writes_without_end_is_stopped_and_tells_nothing(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "CHARACTERS", 0)
    asked: list[str] = []
    text = Transcripts._partial

    async def watched(self: Transcripts, *given: Any) -> str:
        asked.append(await text(self, *given))
        return asked[-1]

    monkeypatch.setattr(Transcripts, "_partial", watched)
    async with talk(session()) as client:
        for number in range(25):
            await speak(client, 1.0, number)
            if len(asked) > 1:
                break
        assert asked[:2] == ["", ""] and not told(client)
