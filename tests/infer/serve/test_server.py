"""The server as its clients reach it: sockets, keys, limits, health, a crash of the engine, and the end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from infer.options import ServeOptions
from infer.serve.app import create_app
from infer.serve.host import EngineHost
from infer.serve.serve import configured, settings_of
from infer.serve.server import Server
from infer.serve.settings import ServerLimits, ServeSettings
from infer.serve.telemetry import LOG
from omni.pretrained import find_model
from tests.infer.serve.caller import LocalEngine
from tests.infer.serve.conftest import MANUAL, noise, pcm
from tests.realtime.client import written
from tests.soon import soon

KEY = "k" * 20


@pytest.fixture
def serve(host: EngineHost, settings: ServeSettings) -> Iterator[Callable[..., tuple[str, Server]]]:
    """Start a server on a free port; its address without a scheme, and what its routes share."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(
        keys: tuple[str, ...] = (), engine: EngineHost = host, origins: tuple[str, ...] = (), **limits: Any
    ) -> tuple[str, Server]:
        app = create_app(engine, replace(settings, limits=ServerLimits(**limits), origins=origins), keys)
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(configured(app))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return f"127.0.0.1:{listening.getsockname()[1]}", app.state.server

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


@contextlib.asynccontextmanager
async def opened(place: str, key: str | None = None, **more: Any) -> Any:
    """A socket, and its events."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with connect(f"ws://{place}/v1/realtime", additional_headers=headers, compression=None, **more) as ws:
        yield ws


async def event(ws: Any, kind: str, seconds: float = 20) -> dict[str, Any]:
    """The next event of a type."""

    async def read() -> dict[str, Any]:
        while (found := json.loads(await ws.recv()))["type"] != kind:
            pass
        return found

    return await asyncio.wait_for(read(), seconds)


async def send(ws: Any, type: str, **values: Any) -> None:
    await ws.send(json.dumps({"type": type, **values}))


async def ask(ws: Any, seed: int = 0, seconds: float = 0.4, **session: Any) -> None:
    """Send a spoken question of a session without turn detection, and ask for its answer."""
    await send(ws, "session.update", session={**MANUAL, **session})
    await send(ws, "input_audio_buffer.append", audio=pcm(noise(seconds, seed)))
    await send(ws, "input_audio_buffer.commit")
    await send(ws, "response.create")


async def answer(ws: Any, seed: int = 0, seconds: float = 0.4, **session: Any) -> dict[str, Any]:
    """The response to a spoken question, once it has ended."""
    await ask(ws, seed, seconds, **session)
    done: dict[str, Any] = (await event(ws, "response.done", 60))["response"]
    return done


async def closed(ws: Any, seconds: float = 10) -> tuple[list[dict[str, Any]], int]:
    """The events until the server closes, and its code."""
    events = []
    try:
        while True:
            events.append(json.loads(await asyncio.wait_for(ws.recv(), seconds)))
    except ConnectionClosed as error:
        assert error.rcvd is not None
        return events, error.rcvd.code


def emptied(server: Server, seconds: float = 5) -> bool:
    """Whether nothing is left of any session."""
    return soon(lambda: not (server.sessions or server.keys.sessions or server.host.stats().sessions), seconds)


async def test_the_stock_client_talks(serve: Any) -> None:
    place, server = serve(keys=(KEY,))
    client = AsyncOpenAI(base_url=f"http://{place}/v1", api_key=KEY)
    async with client.realtime.connect(model="omni") as connection:
        await connection.session.update(session=MANUAL)  # type: ignore[arg-type]
        await connection.input_audio_buffer.append(audio=pcm(noise(0.5)))
        await connection.input_audio_buffer.commit()
        await connection.response.create()
        sound = 0
        async for one in connection:
            assert one.type != "error", one
            if one.type == "response.output_audio.delta":
                sound += len(base64.b64decode(one.delta))
            if one.type == "response.done":
                break
        assert sound > 24_000
    assert emptied(server)


async def test_keys_in_header_and_subprotocol(serve: Any) -> None:
    place, server = serve(keys=(KEY,))
    async with opened(place, KEY) as ws:
        assert json.loads(await ws.recv())["type"] == "session.created"
    names = ["realtime", f"openai-insecure-api-key.{KEY}", "openai-agents-sdk.0.20.0"]
    async with opened(place, subprotocols=names) as ws:
        assert ws.subprotocol == "realtime"
        assert json.loads(await ws.recv())["type"] == "session.created"
    for key, code in ((None, "missing_api_key"), ("x" * 20, "invalid_api_key")):
        async with opened(place, key) as ws:
            events, number = await closed(ws)
            assert events[0]["error"]["code"] == code and number == 1008
    secret, _ = server.keys.make_secret("key-1", {"instructions": "short"}, 60)
    async with opened(place, secret) as ws:
        assert json.loads(await ws.recv())["session"]["instructions"] == "short"
    expired, _ = server.keys.make_secret("key-1", {}, -1)
    async with opened(place, expired) as ws:
        assert (await closed(ws))[0][0]["error"]["code"] == "invalid_api_key"
    assert emptied(server)


async def test_pages_of_other_origins_and_other_names_are_refused(serve: Any) -> None:
    place, _ = serve()
    assert httpx.get(f"http://{place}/v1/models", headers={"Host": "evil.example"}).status_code == 403
    for origin in ("http://evil.example", "null"):
        async with connect(f"ws://{place}/v1/realtime", additional_headers={"Origin": origin}) as ws:
            events, code = await closed(ws)
            assert events[0]["error"]["code"] == "invalid_origin" and code == 1008
    async with connect(f"ws://{place}/v1/realtime", origin=f"http://{place}") as ws:  # type: ignore[arg-type]
        assert json.loads(await ws.recv())["type"] == "session.created"


def test_pages_of_named_origins_may_call(serve: Any) -> None:
    place, _ = serve(origins=("https://talk.example",))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-openai-agents-sdk"}
    url = f"http://{place}/v1/realtime/calls"
    found = httpx.options(url, headers={"Origin": "https://talk.example", **asked})
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "https://talk.example"
    assert httpx.options(url, headers={"Origin": "https://evil.example", **asked}).status_code == 400
    answer = httpx.post(url, headers={"Origin": "https://talk.example"}, content="v=0")
    assert answer.status_code == 400 and answer.headers["access-control-expose-headers"] == "Location"


async def test_a_full_server_sends_the_overflow_on(serve: Any) -> None:
    place, server = serve(sessions=2)
    async with opened(place), opened(place):
        assert httpx.get(f"http://{place}/ready").status_code == 503
        async with opened(place) as ws:
            events, code = await closed(ws)
            assert [one["error"]["code"] for one in events] == ["session_limit_reached"] and code == 1013
    assert emptied(server)
    found = httpx.get(f"http://{place}/ready")
    assert found.status_code == 200 and found.json() == {"ready": True, "reasons": []}


LIMITS = {
    "session": ({"session_seconds": 0.4}, "session_expired", 1000),
    "idle": ({"idle_seconds": 0.4}, "session_idle_timeout", 1000),
    "bytes": ({"session_bytes": 100_000}, "rate_limit_exceeded", 1008),
    "frames": ({"session_frames": 5}, "rate_limit_exceeded", 1008),
    "sound": ({"key_audio_seconds": 2}, "insufficient_quota", 1008),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LIMITS)
async def test_limits_end_a_session_with_the_protocols_codes(serve: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.serve.bounds.LOOK", 0.2)
    limits, error_code, close_code = LIMITS[name]
    place, server = serve(**limits)
    async with opened(place) as ws:
        if name != "idle":
            sound = {"type": "input_audio_buffer.append", "audio": pcm(noise(0.5))}
            for _ in range(10):
                await ws.send(json.dumps(sound))
        events, code = await closed(ws)
        assert events[-1]["error"]["code"] == error_code and code == close_code
    assert emptied(server)


@pytest.mark.long
async def test_a_client_that_does_not_read_is_closed_and_others_are_not(serve: Any) -> None:
    place, server = serve(unread_bytes=200_000)
    async with opened(place) as other, opened(place) as ws:
        await ws.recv()
        ws.transport.pause_reading()
        with contextlib.suppress(ConnectionClosed):
            for _ in range(200):
                await send(ws, "conversation.item.create", item=written("x" * 90_000))
        until = time.monotonic() + 5
        while len(server.sessions) > 1 and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert len(server.sessions) == 1
        await send(other, "input_audio_buffer.clear")
        await event(other, "input_audio_buffer.cleared")
        ws.transport.abort()
    assert emptied(server)


def test_health_metrics_and_headers(serve: Any) -> None:
    place, _ = serve(keys=(KEY,))
    found = httpx.get(f"http://{place}/health")
    assert found.status_code == 200 and "default-src 'self'" in found.headers["content-security-policy"]
    page = httpx.get(f"http://{place}/metrics").text
    for name in ("omni_sessions", "omni_engine_waiting", "omni_engine_lateness_p99_seconds", "omni_first_audio_seconds_bucket"):
        assert name in page
    settings = httpx.get(f"http://{place}/page/config.json").json()
    assert settings["needs_key"] is True and settings["voices"] == ["default"] and not settings["is_shipped"]
    assert settings_of(find_model("nano"), ServeOptions()).is_shipped  # whose page tells what it hears


async def test_a_crash_of_the_engine_is_told_and_another_is_started(
    serve: Any, lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, started, failures = list[LocalEngine](), threading.Event(), list[str]()
    monkeypatch.setattr(LOG, "exception", failures.append)

    def start() -> LocalEngine:
        assert not made or started.wait(20)
        made.append(LocalEngine(lm))
        return made[-1]

    engine = EngineHost(start)
    place, _ = serve(engine=engine)
    async with opened(place) as ws:
        made[0].alive = False
        told = await event(ws, "error")
        assert told["error"]["code"] == "server_error" and "started again" in told["error"]["message"]
        async with opened(place) as new:  # while it starts, clients are told to come again
            events, code = await closed(new)
            assert events[0]["error"]["code"] == "engine_lost" and code == 1013
        found = await asyncio.to_thread(httpx.get, f"http://{place}/page/config.json")
        assert found.status_code == 503 and found.json()["error"]["code"] == "engine_lost"
        started.set()
        while not engine.alive:
            await asyncio.sleep(0.02)
        assert (await answer(ws))["status"] in ("completed", "incomplete")
    assert engine.restarts == 1 and len(made) == 2 and not failures
