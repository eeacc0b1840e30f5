"""What connections may cost: floods end themselves and nobody else, and what never becomes a request is closed."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from infer.serve import connections
from infer.serve.bounds import Quota, SessionBounds
from infer.serve.keys import Keys
from infer.serve.realtime.webrtc import CONNECTING
from infer.serve.settings import ServerLimits, ServeSettings
from tests.infer.serve.test_server import closed, event, opened, send, serve

__all__ = ["serve"]

PING, CONTINUED, TEXT = 9, 0, 1
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(opcode: int, data: bytes = b"", final: bool = True) -> bytes:
    """A client's frame of at most 125 bytes, masked by zeros."""
    return bytes([final << 7 | opcode, 0x80 | len(data)]) + bytes(4) + data


def dial(place: str) -> socket.socket:
    host, port = place.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def upgraded(place: str) -> socket.socket:
    sock = dial(place)
    sock.sendall(UPGRADE)
    while b"\r\n\r\n" not in sock.recv(4096):
        pass
    return sock


def rest_of(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            came += piece
    return came


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("people", "ms"), [(48, 20), (64, 20), (64, 10)])
def test_as_many_as_may_be_speak_for_ten_minutes_within_the_default_limits(
    people: int, ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("infer.serve.bounds.monotonic", clock)
    limits = ServerLimits()
    keys = Keys((), limits)
    session: Any = SimpleNamespace(
        hearing=SimpleNamespace(uncounted=0.0), settings=ServeSettings(), send=lambda event: pytest.fail(str(event))
    )
    bounds, traffic = SessionBounds(session, keys.usage["anyone"]), Quota(limits)
    for _ in range(600_000 // ms):
        clock.now += ms / 1000
        traffic.count(frames=1, bytes=64 * ms + 60)
        session.hearing.uncounted += ms / 1000
        bounds.count()
        keys.usage["anyone"].count(False, seconds=(people - 1) * ms / 1000)
    keys.enter("anyone")
    keys.usage["anyone"].count(events=1)


async def test_who_floods_is_closed_and_only_new_sessions_of_the_key_are_refused(serve: Any) -> None:
    place, _ = serve(session_events=40, key_events=60)
    async with opened(place) as other, opened(place) as flooding:
        for _ in range(60):
            await send(flooding, "input_audio_buffer.clear")
        events, code = await closed(flooding)
        assert events[-1]["error"]["code"] == "rate_limit_exceeded" and code == 1008
        async with opened(place) as more:
            for _ in range(35):
                await send(more, "input_audio_buffer.clear")
                await event(more, "input_audio_buffer.cleared")
        async with opened(place) as new:
            events, code = await closed(new)
            assert events[0]["error"]["code"] == "rate_limit_exceeded" and code == 1013
        await send(other, "input_audio_buffer.clear")
        await event(other, "input_audio_buffer.cleared")


def test_messages_are_read_as_fast_as_they_are_handled_and_none_is_lost(serve: Any) -> None:
    place, _ = serve()
    with upgraded(place) as sock:
        sock.sendall(frame(TEXT, b'{"type": "input_audio_buffer.clear"}') * 1500)
        came = b""
        while came.count(b"input_audio_buffer.cleared") < 1500:
            came += sock.recv(65536)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_ends_its_connection(serve: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    place, server = serve()
    with dial(place) as sock:
        sock.sendall(sent)
        assert rest_of(sock) == b""
    with dial(place) as sock:  # nor one after an answer
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET")
        assert rest_of(sock).startswith(b"HTTP/1.1 200")
    while server.idle:
        time.sleep(0.01)


async def test_calls_without_media_leave_places_for_others(calls: Any) -> None:
    async with calls() as (server, caller):
        offer = await caller.offer()
        for number in range(CONNECTING + 2):
            answer = await caller.http.post(
                "/realtime/calls",
                content=offer,
                headers={"content-type": "application/sdp", "authorization": f"Bearer {caller.openai.api_key}"},
            )
            assert answer.status_code == (201 if number < CONNECTING else 429), answer.text
        assert len(server.sessions) == CONNECTING
        for session in list(server.sessions.values()):
            session.transport.end("enough")


COSTLY = [b"{}" * 60_000, b"[" * 60_000, b'{"messages": [' + b"1," * 60_000 + b"1]}", b'{"a": "' + b"{" * 60_000 + b'"}']


@pytest.mark.sampled(1)
@pytest.mark.parametrize("given", COSTLY, ids=["objects", "nested", "list", "text"])
async def test_costly_json_is_refused_before_it_is_read(serve: Any, given: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    place, _ = serve()
    async with opened(place) as ws:
        await ws.recv()
        monkeypatch.setattr(json, "loads", pytest.fail)
        await ws.send(given.decode())
        answer = await ws.recv()
        monkeypatch.undo()
        assert json.loads(answer)["error"]["code"] == "too_large"
        await send(ws, "input_audio_buffer.append", audio="AAAA" * 500_000)
        await send(ws, "input_audio_buffer.clear")
        await event(ws, "input_audio_buffer.cleared")
    found = httpx.post(f"http://{place}/v1/chat/completions", content=given)
    assert found.status_code == 413 and found.json()["error"]["code"] == "too_large"
