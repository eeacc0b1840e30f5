"""Errors of the plain HTTP routes in OpenAI's form, the model's description, and client secrets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
import torch
from fastapi import FastAPI

from infer.serve.app import create_app
from infer.serve.host import EngineHost
from infer.serve.realtime.protocol import ProtocolError
from infer.serve.rest.jobs import Job
from infer.serve.settings import ServeSettings
from omni.generate.results import AudioChunk, Ended, TextDelta, Timings
from tests.infer.serve.caller import LocalEngine
from tests.infer.serve.test_rest_jobs import (
    CHAT,
    KEYS,
    QUESTION,
    app,
    connect,
    connected,
    error_of,
    guarded,
    nothing_left,
    post,
    use,
)

__all__ = ["app", "guarded", "nothing_left"]


async def test_the_model_is_listed_and_others_are_not_found(app: FastAPI) -> None:
    async with connected(app) as client:
        assert [model.id async for model in await client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "omni"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("of/another")
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_unknown_paths_and_methods_in_the_same_form(app: FastAPI) -> None:
    assert error_of(post(app, "/v1/embeddings", {}), 404)["type"] == "invalid_request_error"
    assert error_of(post(app, "/v1/models", {}), 405)["type"] == "invalid_request_error"


async def test_heads_are_answered(app: FastAPI) -> None:
    async with connected(app) as client:
        for path in ("/", "/health", "/ready"):
            assert (await client._client.head(f"http://localhost{path}")).status_code == 200


METRICS: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    ({"host": "[::1]:8000"}, 200),
    ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
    ({"host": "rebound.example:8000"}, 403),
    ({"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
    ({"origin": "https://elsewhere.example"}, 403),
    ({"x-forwarded-for": "10.0.0.1"}, 403),
]


@pytest.mark.parametrize(("headers", "status"), METRICS, ids=str)
def test_metrics_are_for_this_machine(app: FastAPI, headers: dict[str, str], status: int) -> None:
    found = use(app, lambda client: client._client.get("http://localhost/metrics", headers=headers))
    assert found.status_code == status


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/realtime/", "/page/index.html"])
@pytest.mark.parametrize("able", [True, False])
def test_a_websocket_elsewhere_is_told_where_to_connect(app: FastAPI, path: str, able: bool) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [], "extensions": {"websocket.http.response": {}} if able else {}}
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    if able:
        assert sent[0]["status"] == 404 and b"connect to /v1/realtime" in sent[1]["body"]
    else:
        assert sent == [{"type": "websocket.close", "code": 1008, "reason": "connect to /v1/realtime"}]


def test_a_lost_engine(settings: ServeSettings, host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    own = EngineHost(lambda: LocalEngine(host.engine))
    lost = create_app(own, settings)
    own.engine.alive = False
    for path, given in [(CHAT, QUESTION), ("/v1/audio/speech", {"input": "hello"})]:
        response = post(lost, path, given)
        assert error_of(response, 503)["code"] == "engine_lost" and "retry-after" in response.headers


def test_a_fault_of_the_server_is_told_without_a_traceback(
    app: FastAPI, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.engine, "session", lambda **options: {}["nothing"])
    error = error_of(post(app, CHAT, QUESTION), 500)
    assert error["type"] == "server_error" and "KeyError" in error["message"] and "nothing" not in error["message"]


def breaking(monkeypatch: pytest.MonkeyPatch, first: Any) -> None:
    """Every answer breaks after its first event."""

    async def ask(self: Job, *args: Any, **options: Any) -> Any:
        async def events() -> Any:
            yield first
            yield Ended("error", Timings(), "the logits are not finite")

        return events()

    monkeypatch.setattr(Job, "ask", ask)


def test_an_answer_that_breaks(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(monkeypatch, TextDelta("so "))
    assert error_of(post(app, CHAT, QUESTION), 500)["message"] == "the logits are not finite"

    async def body(client: openai.AsyncOpenAI) -> list[str]:
        messages: Any = QUESTION["messages"]
        taken: list[str] = []
        with pytest.raises(openai.APIError, match="logits"):
            async for chunk in await client.chat.completions.create(model="any", messages=messages, stream=True):
                taken.append(chunk.choices[0].delta.content or "")
        return taken

    assert use(app, body) == ["", "so "]
    response = post(app, "/v1/audio/speech", {"input": "hello", "response_format": "mp3"})
    assert error_of(response, 500)["type"] == "server_error"


def test_sound_that_breaks_ends_without_an_end(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(monkeypatch, AudioChunk(torch.zeros(800)))
    sent, error = connect(app, "/v1/audio/speech", {"input": "hello", "response_format": "pcm"}, chunks=99)
    assert isinstance(error, ProtocolError) and [one.get("more_body") for one in sent] == [None, True]


BROKEN = {
    b"\xff\xfe": None,
    b"[]": None,
    b'"text"': None,
    b"": "Expecting value: line 1 column 1",
    b'{"messages": }': "Expecting value: line 1 column 14",
    b'{"a": "\xff"}': "'utf-8' codec can't decode byte 0xff in position 7",
    b"[" * 40_000: "maximum recursion depth exceeded",
    b"1" * 5_000: "Exceeds the limit",
}


@pytest.mark.parametrize("given", BROKEN, ids=lambda given: repr(given[:9]))
def test_a_body_that_is_no_request_is_told_with_its_place(app: FastAPI, given: bytes) -> None:
    for path in (CHAT, "/v1/audio/speech", "/v1/realtime/client_secrets"):
        error = error_of(post(app, path, given), 400)
        assert error["type"] == "invalid_request_error"
        if (told := BROKEN[given]) is not None:
            assert error["message"].startswith(f"the body is no JSON: {told}") and error["code"] == "invalid_json"


def test_a_number_without_end_is_no_list_of_messages(app: FastAPI) -> None:
    assert error_of(post(app, CHAT, b'{"messages": 1e4000}'), 400)["type"] == "invalid_request_error"


def test_a_client_secret_begins_sessions_and_makes_no_other(guarded: FastAPI) -> None:
    given: Any = {"type": "realtime", "instructions": "be brief", "audio": {"output": {"voice": "marin"}}}

    async def body(client: openai.AsyncOpenAI) -> Any:
        expires: Any = {"anchor": "created_at", "seconds": 60}
        return await client.realtime.client_secrets.create(session=given, expires_after=expires)

    made = use(guarded, body, KEYS[1])
    assert made.value.startswith("ek_") and 55 <= made.expires_at - time.time() <= 60
    assert made.session.type == "realtime" and made.session.instructions == "be brief"
    assert made.session.audio.output.voice == "default"  # the one in effect
    headers = {"host": "localhost", "authorization": f"Bearer {made.value}"}
    assert guarded.state.server.admit(headers, []) == ("key-2", given)
    assert error_of(post(guarded, "/v1/realtime/client_secrets", {}, key=made.value), 403)["code"] == "insufficient_permissions"
    assert post(guarded, CHAT, QUESTION, key=made.value).status_code == 200
    bare = post(guarded, "/v1/realtime/client_secrets", {}, key=KEYS[0]).json()
    assert 595 <= bare["expires_at"] - time.time() <= 600 and bare["session"]["model"] == "tiny"


def test_a_client_secret_keeps_no_large_configuration(guarded: FastAPI) -> None:
    given = {"session": {"tools": [{"name": "x" * 300_000}]}}
    assert error_of(post(guarded, "/v1/realtime/client_secrets", given, key=KEYS[0]), 413)["code"] == "too_large"
