"""Calls over WebRTC that cannot be, and that end otherwise than their client wished."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from infer.serve.realtime import webrtc
from tests.infer.serve.caller import KEYS, no_session, session_of, without
from tests.infer.serve.conftest import MANUAL


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda offer: "hello", "it has nothing"),
        (lambda offer: offer.replace("a=rtpmap:96", "a=rtpmap:ab"), "is no SDP"),
        (lambda offer: offer + "m=video 9 UDP/TLS/RTP/SAVPF 97\r\na=rtpmap:97 VP8/90000\r\n", "application, video"),
        (lambda offer: offer.replace("a=sendrecv", "a=sendonly"), "it says sendonly"),
        (lambda offer: without(offer, "ice-pwd"), "cannot be taken"),
        (lambda offer: without(offer, "fingerprint"), "must have a=fingerprint"),
    ],
)
async def test_bad_offers(calls: Any, change: Any, told: str) -> None:
    async with calls() as (server, caller):
        sdp = change(await caller.offer())
        bearer = {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/sdp"}
        answer = await caller.http.post("/realtime/calls", content=sdp, headers=bearer)
        error = answer.json()["error"]
        assert answer.status_code == 400 and told in error["message"], error
        assert error["code"] == "invalid_offer" and error["param"] == "sdp" and error["type"] == "invalid_request_error"
        assert not server.sessions and not server.keys.sessions


async def test_bad_requests(calls: Any) -> None:
    async with calls() as (server, caller):
        bearer = {"authorization": f"Bearer {KEYS[0]}"}
        offer = await caller.offer()

        async def refused(**given: Any) -> tuple[int, str, str | None]:
            answer = await caller.http.post("/realtime/calls", headers={**bearer, **given.pop("headers", {})}, **given)
            error = answer.json()["error"]
            return answer.status_code, error["code"], error["param"]

        def form(**fields: str) -> Any:
            return {name: (None, text) for name, text in fields.items()}

        assert (await refused(json={}))[:2] == (400, "invalid_form")
        assert await refused(files=form(session="{}")) == (400, "missing_required_parameter", "sdp")
        assert await refused(files=form(sdp=offer, session="{")) == (400, "invalid_json", "session")
        assert await refused(files=form(sdp=offer, session="[]")) == (400, "invalid_json", "session")
        bad = json.dumps({"output_modalities": ["audio", "text"]})
        assert await refused(files=form(sdp=offer, session=bad)) == (400, "invalid_value", "session.output_modalities")
        broken = {"content-type": "multipart/form-data; boundary=x"}
        assert (await refused(content=b"no part", headers=broken))[0] == 400
        assert (await refused(content=offer, headers={"authorization": "Bearer no-key-of-this-server"}))[0] == 401
        assert not server.sessions and not server.keys.sessions
        server.draining = True
        assert (await refused(files=form(sdp=offer)))[:2] == (503, "server_shutting_down")


async def test_secrets_bring_a_configuration_that_a_call_adds_to(calls: Any) -> None:
    async with calls() as (server, caller):
        secret, _ = server.keys.make_secret("key-1", {**MANUAL, "instructions": "from the secret"}, 60)
        caller.openai.api_key = secret
        created = await caller.call({"type": "realtime", "audio": {"input": {"transcription": {"model": "own"}}}})
        heard = created["session"]["audio"]["input"]
        assert created["session"]["instructions"] == "from the secret"
        assert heard["turn_detection"] is None and heard["transcription"] is not None
        assert server.keys.sessions == {"key-1": 1}


async def test_a_call_that_never_connects_is_dropped(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webrtc, "CONNECT", 0.2)
    async with calls() as (server, caller):
        await caller.openai.realtime.calls.create(sdp=await caller.offer())
        assert len(server.sessions) == 1 and server.keys.sessions == {"key-1": 1}
        await no_session(server)


async def test_a_client_that_does_not_read(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with calls(unread_bytes=100_000) as (server, caller):
        await caller.call(MANUAL)

        async def nothing(data: bytes) -> None:
            """No acknowledgement goes out."""

        monkeypatch.setattr(caller.pc.sctp.transport, "_send_data", nothing)
        session = session_of(server)
        for _ in range(60):
            session.tell_error("x" * 10_000)
            await asyncio.sleep(0)
        assert session.transport.channel.bufferedAmount <= 100_000
        assert session.transport.ending.result().reason == "the client reads too slowly"


async def test_large_events(calls: Any) -> None:
    async with calls() as (server, caller):
        await caller.call(MANUAL)
        text = "wörter " * 14_000  # more than 64 KiB
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        caller.send("conversation.item.create", item=item)
        assert (await caller.until("conversation.item.done"))["item"]["content"] == content
        session_of(server).transport.channel.transport._remote_max_message_size = 10_000
        since = caller.send("conversation.item.create", item=item)
        assert (await caller.until("error", since))["error"]["code"] == "event_too_large"
