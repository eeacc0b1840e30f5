"""Calls over WebRTC: turns, interruptions, and what a history keeps of them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiortc import RTCSessionDescription

from infer.turns.vad import FRAME, VoiceActivity
from tests.infer.serve.caller import KEYS, RATE, no_session, session_of, tone, without
from tests.infer.serve.conftest import MANUAL, deltas
from tests.infer.serve.test_events import check_known


async def test_a_spoken_turn(calls: Any) -> None:
    async with calls() as (server, caller):
        created = await caller.call({**MANUAL, "instructions": "be brief"})
        assert created["session"]["instructions"] == "be brief" and caller.events[0] is created
        assert caller.location.startswith("/v1/realtime/calls/rtc_")
        caller.send("input_audio_buffer.clear")
        await caller.until("input_audio_buffer.cleared")
        await caller.say(tone(0.4))
        caller.send("input_audio_buffer.commit")
        since = caller.send("response.create")
        await caller.until("output_audio_buffer.stopped", since)
        said = next(iter(session_of(server).items)).content[0].sound
        loud = np.flatnonzero(np.abs(said) > 1000)
        assert abs((loud[-1] - loud[0]) / 24_000 - 0.4) < 0.05, "what was said arrived whole"
        strongest = np.abs(np.fft.rfft(said[loud[0] : loud[0] + 8000])).argmax() * 3
        assert abs(strongest - 440) <= 3
        check_known(caller.events)
        types = [event["type"] for event in caller.events]
        assert "response.output_audio.delta" not in types
        order = ["response.created", "output_audio_buffer.started", "response.done", "output_audio_buffer.stopped"]
        assert [kind for kind in types if kind in order] == order
        done = next(event for event in caller.events if event["type"] == "response.done")["response"]
        assert deltas(caller.events) == done["output"][0]["content"][0]["transcript"]
        await asyncio.sleep(0.2)
        wanted = done["usage"]["output_token_details"]["audio_tokens"] * 0.04
        assert abs(len(caller.heard) / RATE - wanted) < 0.06


async def test_a_browser_s_way_and_hanging_up(calls: Any) -> None:
    async with calls() as (server, caller):
        bearer = {"authorization": f"Bearer {KEYS[0]}"}
        sdp = without(await caller.offer(), "candidate")  # a browser's page does not wait for addresses
        form = {"content-type": "application/sdp"}
        answer = await caller.http.post("/realtime/calls?model=gpt-realtime", content=sdp, headers={**bearer, **form})
        assert answer.status_code == 201
        await caller.pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        created = await caller.until("session.created")
        assert created["session"]["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        place = answer.headers["location"].removeprefix("/v1") + "/hangup"
        other = await caller.http.post(place, headers={"authorization": f"Bearer {KEYS[1]}"})
        assert other.status_code == 404 and other.json()["error"]["code"] == "call_not_found" and server.sessions
        assert (await caller.http.post(place)).status_code == 401
        assert (await caller.http.post(place, headers=bearer)).status_code == 200
        await caller.over()
        await no_session(server)
        assert (await caller.http.post(place, headers=bearer)).status_code == 404


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["output_audio_buffer.clear", "response.cancel", "conversation.item.truncate", "speech"])
async def test_what_was_not_played_is_not_kept(calls: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def loud(self: Any, stream: Any, samples: np.ndarray) -> list[float]:
        return [float(np.abs(samples).max() > 0.1)] * (len(samples) // (FRAME // 2))

    monkeypatch.setattr(VoiceActivity, "push", loud)
    async with calls(seconds=3.0) as (server, caller):
        await caller.call({"type": "realtime"} if way == "speech" else MANUAL)
        since = await caller.ask()
        await caller.until("output_audio_buffer.started", since)
        await asyncio.sleep(0.3)
        response = session_of(server).responses.last
        values = {"item_id": response.item.id, "content_index": 0, "audio_end_ms": 9000} if way.endswith("truncate") else {}
        if way == "speech":
            caller.microphone.says = tone(0.1)
        else:
            caller.send(way, **values)
        cleared = await caller.until("output_audio_buffer.cleared", since)
        done = (await caller.until("response.done", since))["response"]
        reason = "turn_detected" if way == "speech" else "client_cancelled"
        assert done["status"] == "cancelled" and done["status_details"]["reason"] == reason
        assert cleared["response_id"] == done["id"]
        await asyncio.sleep(0.15)
        item = response.item
        assert 0.2 < item.heard < 0.9 and item.answer.codes.shape[1] == int(item.heard * 25 + 1e-6)
        assert done["output"][0]["content"][0]["transcript"] == item.answer.text
        assert abs(len(caller.heard) / RATE - item.heard) < 0.04
        if values:
            truncated = await caller.until("conversation.item.truncated", since)
            assert abs(truncated["audio_end_ms"] / 1000 - item.heard) < 0.001
        assert "output_audio_buffer.stopped" not in [event["type"] for event in caller.events]


async def test_the_tail_of_an_answer_that_has_ended_is_cleared(calls: Any) -> None:
    async with calls() as (server, caller):
        await caller.call(MANUAL)
        since = await caller.ask()
        done = (await caller.until("response.done", since))["response"]
        assert done["status"] != "cancelled"
        caller.send("output_audio_buffer.clear")
        await caller.until("output_audio_buffer.cleared", since)
        item = session_of(server).responses.last.item
        whole = done["usage"]["output_token_details"]["audio_tokens"] * 0.04
        assert whole - 0.32 < item.heard < whole and item.status == "incomplete"
        caller.send("output_audio_buffer.clear")  # nothing plays any more
        caller.send("conversation.item.retrieve", item_id=item.id)
        told = await caller.until("conversation.item.retrieved")
        assert told["item"]["content"][0]["transcript"] == item.answer.text


async def test_an_answer_is_heard_after_the_one_before(calls: Any) -> None:
    async with calls() as (_, caller):
        await caller.call(MANUAL)
        since = await caller.ask()
        first = (await caller.until("response.done", since))["response"]["id"]
        middle = await caller.ask()
        second = (await caller.until("response.done", middle))["response"]["id"]
        while [event["type"] for event in caller.events].count("output_audio_buffer.stopped") < 2:
            await asyncio.sleep(0.02)
        told = [(e["type"][20:], e["response_id"]) for e in caller.events if e["type"].startswith("output_audio_buffer")]
        assert told == [("started", first), ("stopped", first), ("started", second), ("stopped", second)]


async def test_sound_that_is_never_committed_makes_room(calls: Any) -> None:
    async with calls() as (server, caller):
        await caller.call(MANUAL)
        buffer = session_of(server).hearing.buffer
        buffer.most = 0.1
        await caller.say(tone(0.2))
        assert 0.08 <= buffer.seconds <= 0.1 and buffer.end > 0.2
        assert [event["type"] for event in caller.events] == ["session.created"]
