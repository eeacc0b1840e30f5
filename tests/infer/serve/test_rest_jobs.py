"""Requests to the plain HTTP routes: who is let in, how many at once, and what ends them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI

from infer.serve.app import create_app
from infer.serve.host import EngineHost
from infer.serve.rest.jobs import Job
from infer.serve.serve import drain
from infer.serve.settings import ServerLimits, ServeSettings
from tests.soon import soon

KEYS = ("the-first-key-of-two", "the-other-key-of-two")
CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


def connected(app: FastAPI, key: str = "none") -> openai.AsyncOpenAI:
    """OpenAI's own client, which reaches the application without a socket."""
    over = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False))
    return openai.AsyncOpenAI(api_key=key, base_url="http://localhost/v1", http_client=over, max_retries=0)


def use(app: FastAPI, body: Callable[[Any], Awaitable[Any]], key: str = "none") -> Any:
    """Run a coroutine function with that client."""

    async def run() -> Any:
        async with connected(app, key) as client:
            return await asyncio.wait_for(body(client), 30)

    return asyncio.run(run())


def post(app: FastAPI, path: str, given: Any, key: str = "none", **more: Any) -> httpx2.Response:
    """The response to a POST request; `given` as JSON, unless it is bytes."""

    async def body(client: openai.AsyncOpenAI) -> httpx2.Response:
        content = given if isinstance(given, bytes) else json.dumps(given).encode()
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        return await client._client.post(f"http://localhost{path}", content=content, headers=headers, **more)

    return use(app, body)


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error of a response; it has OpenAI's form, and nothing of a traceback."""
    assert response.status_code == status, response.text
    told = response.json()
    assert told.keys() == {"error"} and told["error"].keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and ".py" not in response.text
    return told["error"]


@pytest.fixture(scope="module")
def app(host: EngineHost, settings: ServeSettings) -> FastAPI:
    return create_app(host, settings)


@pytest.fixture(scope="module")
def guarded(host: EngineHost, settings: ServeSettings) -> FastAPI:
    return create_app(host, settings, KEYS)


@pytest.fixture(autouse=True)
def nothing_left(host: EngineHost) -> Iterator[None]:
    yield
    assert soon(lambda: host.stats().sessions == 0), "a session of the engine was left open"


def limited(host: EngineHost, settings: ServeSettings, keys: tuple[str, ...] = (), **limits: Any) -> FastAPI:
    return create_app(host, replace(settings, limits=ServerLimits(**limits)), keys)


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/realtime/client_secrets"])
def test_no_route_without_a_key(guarded: FastAPI, path: str) -> None:
    assert error_of(post(guarded, path, b"no json", key="of nobody at all"), 401)["code"] == "invalid_api_key"
    assert error_of(post(guarded, path, b"no json", key=KEYS[0]), 400)["code"] != "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        use(guarded, lambda client: client.models.retrieve("tiny"))


def test_sound_counts_for_its_key(host: EngineHost, settings: ServeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.infer.serve.test_rest_audio import wav

    monkeypatch.setattr("infer.serve.rest.audio.TRANSCRIPT_TOKENS", 2)
    small = limited(host, settings, KEYS, key_audio_seconds=4)

    async def body(client: openai.AsyncOpenAI) -> None:
        await client.audio.transcriptions.create(model="any", file=("a.wav", wav(3.0)))
        with pytest.raises(openai.RateLimitError) as caught:
            await client.audio.transcriptions.create(model="any", file=("a.wav", wav(3.0)))
        assert caught.value.code == "insufficient_quota"

    use(small, body, KEYS[0])
    use(small, lambda client: client.audio.transcriptions.create(model="any", file=("a.wav", wav(3.0))), KEYS[1])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Before which every request waits for its answer."""
    gate, held = asyncio.Event(), Job.ask

    async def ask(self: Job, *args: Any, **options: Any) -> Any:
        await gate.wait()
        return await held(self, *args, **options)

    monkeypatch.setattr(Job, "ask", ask)
    return gate


async def test_no_more_requests_than_the_limit(host: EngineHost, settings: ServeSettings, gate: asyncio.Event) -> None:
    small = limited(host, settings, KEYS, sessions=2, key_sessions=1)
    async with connected(small) as client:

        async def one(key: str) -> httpx2.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client._client.post(f"http://localhost{CHAT}", json=QUESTION, headers=headers)

        first = asyncio.create_task(one(KEYS[0]))
        await asyncio.sleep(0.05)
        refused = await one(KEYS[0])
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded" and int(refused.headers["retry-after"]) > 0
        second = asyncio.create_task(one(KEYS[1]))
        await asyncio.sleep(0.05)
        ready = await client._client.get("http://localhost/ready")
        assert ready.status_code == 503 and ready.json()["reasons"] == ["full of requests"]
        refused = await one(KEYS[1])
        assert error_of(refused, 503)["code"] == "server_overloaded" and int(refused.headers["retry-after"]) > 0
        gate.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        assert (await one(KEYS[0])).status_code == 200
        assert (await client._client.get("http://localhost/ready")).status_code == 200


async def test_a_server_that_ends_waits_for_the_answers_under_way_and_takes_nothing_new(
    host: EngineHost, settings: ServeSettings, gate: asyncio.Event
) -> None:
    app = create_app(host, settings)
    server = app.state.server
    async with connected(app) as client:
        asked = asyncio.create_task(client._client.post(f"http://localhost{CHAT}", json=QUESTION))
        while not server.answering:
            await asyncio.sleep(0.01)
        ended = asyncio.create_task(drain(server, asyncio.Event(), 20))
        await asyncio.sleep(0.3)
        assert server.draining and not ended.done()
        refused = await client._client.post(f"http://localhost{CHAT}", json=QUESTION)
        assert error_of(refused, 503)["code"] == "server_shutting_down" and "retry-after" in refused.headers
        gate.set()
        assert (await asked).status_code == 200
        await asyncio.wait_for(ended, 2)


def test_a_body_that_is_too_large_is_refused_while_it_comes(host: EngineHost, settings: ServeSettings) -> None:
    small = limited(host, settings, body_bytes=1000)

    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async def body(client: openai.AsyncOpenAI) -> httpx2.Response:
        return await client._client.post(f"http://localhost{CHAT}", content=pieces())

    error = error_of(use(small, body), 413)
    assert error["code"] == "too_large" and "0.000953674 MiB" in error["message"]
    assert error_of(post(small, CHAT, b" " * 1001), 413) == error  # announced


async def test_bodies_that_do_not_come_take_no_place(
    host: EngineHost, settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.serve.rest.jobs.BODY_PAUSE", 0.5)
    small = limited(host, settings, KEYS, sessions=2, key_sessions=2)

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    async with connected(small) as client:

        async def one(key: str, **content: Any) -> httpx2.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client._client.post(f"http://localhost{CHAT}", headers=headers, **content)

        held = [asyncio.create_task(one(KEYS[0], content=slow())) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert error_of(await one(KEYS[0], json=QUESTION), 429)["code"] == "rate_limit_exceeded"
        assert (await one(KEYS[1], json=QUESTION)).status_code == 200 and not small.state.server.requests
        for task in held:
            assert "nothing of the body came for 0.5 s" in error_of(await task, 408)["message"]
        assert (await one(KEYS[0], json=QUESTION)).status_code == 200


def connect(app: FastAPI, path: str, given: Any, chunks: int) -> tuple[list[dict[str, Any]], BaseException | None]:
    """Send a request, and go away after so many chunks of its response, the next of which is not taken; returns what was sent,
    and what the application raised."""
    sent: list[dict[str, Any]] = []

    async def run() -> BaseException | None:
        gone, asked = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": json.dumps(given).encode(), "more_body": False}
            if chunks >= 0:
                await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if sum(one["type"] == "http.response.body" for one in sent) == chunks:
                gone.set()
                await asyncio.Event().wait()
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        try:
            await asyncio.wait_for(app(scope, receive, send), 20)
        except Exception as error:
            return error
        return None

    return sent, asyncio.run(run())


STREAMS = [
    (CHAT, {**QUESTION, "stream": True}),
    (CHAT, {**QUESTION, "stream": True, "modalities": ["text", "audio"]}),
    ("/v1/audio/speech", {"input": "hello", "response_format": "pcm"}),
]


@pytest.fixture
def talkative(host: EngineHost, settings: ServeSettings) -> FastAPI:
    """Answers that are longer than what a client takes before it goes away, one at a time."""
    answering = replace(settings.answering, max_seconds=4.0, max_tokens=100)
    return create_app(host, replace(settings, answering=answering, limits=ServerLimits(sessions=1, idle_seconds=0.2)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("path", "given"), STREAMS)
def test_a_client_that_goes_away_in_a_stream_ends_its_answer(
    host: EngineHost, talkative: FastAPI, path: str, given: Any
) -> None:
    sent, error = connect(talkative, path, given, chunks=2)
    assert error is None and [one.get("more_body") for one in sent] == [None, True, True]
    assert soon(lambda: host.stats().sessions == 0 and host.stats().active == 0)
    assert post(talkative, CHAT, {**QUESTION, "max_tokens": 1}).status_code == 200  # its place is free


@pytest.mark.parametrize(("path", "given"), [(CHAT, QUESTION), ("/v1/audio/speech", {"input": "hello"}), *STREAMS])
def test_a_client_that_goes_away_before_its_answer(host: EngineHost, talkative: FastAPI, path: str, given: Any) -> None:
    connect(talkative, path, given, chunks=-1)
    registry = talkative.state.server.metrics.registry
    assert registry.get_sample_value("omni_requests_total", {"path": path, "status": "499"}) == 1
    assert soon(lambda: host.stats().sessions == 0 and host.stats().active == 0)
    assert post(talkative, CHAT, {**QUESTION, "max_tokens": 1}).status_code == 200


def test_a_client_that_reads_nothing_is_left(host: EngineHost, talkative: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starlette.responses.StreamingResponse.listen_for_disconnect", lambda self, receive: asyncio.sleep(60))
    began = time.monotonic()
    _, error = connect(talkative, *STREAMS[0], chunks=2)
    assert isinstance(error, asyncio.TimeoutError) and time.monotonic() - began < 5
    assert soon(lambda: host.stats().sessions == 0)
