"""Turns of a session, of speech that silero hears."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.infer.serve.conftest import Client, noise, pcm
from tests.infer.turns.test_turns import at24, say


async def append(client: Client, sound: np.ndarray) -> None:
    """Send a sound at 24 kHz in pieces of 40 ms, as fast as it is taken."""
    for start in range(0, len(sound), 960):
        await client.send("input_audio_buffer.append", audio=pcm(sound[start : start + 960]))
        await asyncio.sleep(0.001)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["server_vad", "semantic_vad"])
async def test_a_spoken_turn_is_found_committed_and_answered(talk: Any, kind: str) -> None:
    sound = at24(say("what is two plus three"))
    async with talk(given={"type": "realtime", "audio": {"input": {"turn_detection": {"type": kind}}}}) as client:
        await append(client, sound)
        await client.until("response.done")
        kinds = [k for k in client.types if k.startswith("input_audio") or k == "response.created"]
        speech = ["speech_started", "speech_stopped", "committed"]
        assert kinds == [*(f"input_audio_buffer.{name}" for name in speech), "response.created"]
        events = [event for event in client.events if event["type"].startswith("input_audio")]
        assert len({event["item_id"] for event in events}) == 1
        assert (
            500 <= events[0]["audio_start_ms"] <= 900
            and len(sound) / 24 - 1250 <= events[1]["audio_end_ms"] <= len(sound) / 24 - 850
        )
        item = next(iter(client.session.items))
        assert item.id == events[0]["item_id"]
        heard = (events[1]["audio_end_ms"] - events[0]["audio_start_ms"]) / 1000
        assert item.seconds == pytest.approx(heard - 0.3 + 2 * 0.1, abs=0.05)


async def test_two_questions_in_one_piece_are_two_items(talk: Any) -> None:
    sounds = [at24(say(text)) for text in ("what is two plus three", "what is one plus four")]
    async with talk(
        given={"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad", "create_response": False}}}}
    ) as client:
        await client.send("input_audio_buffer.append", audio=pcm(np.concatenate(sounds)))
        first, second = client.session.items
        assert min(first.seconds, second.seconds) > 0.8 and first.seconds == pytest.approx(second.seconds, abs=0.5)


@pytest.mark.long
async def test_speech_interrupts_and_a_backchannel_does_not(talk: Any) -> None:
    async with talk(seconds=4.0, omni=True) as client:
        await client.send("input_audio_buffer.append", audio=pcm(noise(0.5)))
        await client.send("input_audio_buffer.commit")
        await client.send("session.update", session={"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}})
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        await append(client, at24(say("yeah", rate=260))[12_000:])
        assert [event["active"] for event in client.events if event["type"] == "omni.ducked"] == [True, False]
        assert "input_audio_buffer.speech_started" not in client.types and client.session.responses.active is not None
        await append(client, at24(say("what is two plus three"))[12_000:])
        started = client.types.index("input_audio_buffer.speech_started")
        done = client.types.index("response.done")
        assert started < done and "response.output_audio.delta" not in client.types[started:done]
        assert client.events[done]["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        await client.until("response.done", done + 1)
