"""Servers over a small model in this process, and clients that hold a session without a socket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import Configuration, Voices, updated
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.session import RealtimeSession
from infer.serve.settings import Answering, ServerLimits, ServeSettings
from infer.serve.telemetry import Metrics
from infer.turns.vad import VoiceActivity
from omni.generate.speech_lm import SpeechLM
from tests.infer.serve.caller import LocalEngine, calls
from tests.realtime.client import written

__all__ = ["calls"]

MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
"""A session's change that leaves the ends of turns to the client."""


def pcm(samples: np.ndarray) -> str:
    """Samples [S] within -1 to 1 as an append has them."""
    return base64.b64encode((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()).decode()


def noise(seconds: float = 0.5, seed: int = 0, rate: int = 24_000) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, round(seconds * rate)).astype(np.float32)


class FakeTransport:
    """Keeps what a session sends."""

    sound_in_events, unread, outlet = True, 0, Outlet

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.came = asyncio.Event()

    def put(self, event: dict[str, Any]) -> None:
        json.dumps(event)
        self.events.append(event)
        self.came.set()

    def end(self, reason: str) -> None:
        self.ended.append(reason)


class Client:
    """Talks to one session, within one loop."""

    def __init__(
        self, host: EngineHost, settings: ServeSettings, given: dict[str, Any] | None = None, omni: bool = False
    ) -> None:
        self.transport = FakeTransport()
        configuration = updated(Configuration(), given or {}, started=False)
        voices = Voices(settings.adapters, settings.model)
        self.session = RealtimeSession(
            host, settings, voices, VoiceActivity(), Metrics(), self.transport, configuration, wants_omni=omni
        )
        self.session.begin()

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.transport.events

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    async def send(self, type: str, **values: Any) -> list[dict[str, Any]]:
        """Send an event; returns what came while it was handled."""
        before = len(self.events)
        await self.session.handle(json.dumps({"type": type, **values}))
        return self.events[before:]

    async def until(self, type: str, since: int = 0, seconds: float = 20.0) -> dict[str, Any]:
        """The first event of a type after a number of events."""

        async def look() -> dict[str, Any]:
            while True:
                for event in self.events[since:]:
                    if event["type"] == type:
                        return event
                self.transport.came.clear()
                await self.transport.came.wait()

        return await asyncio.wait_for(look(), seconds)

    async def ask(self, text: str | None = None, **response: Any) -> dict[str, Any]:
        """Have a written question (or what is there) answered; returns `response.done`'s response."""
        if text is not None:
            await self.send("conversation.item.create", item=written(text))
        since = len(self.events)
        await self.send("response.create", response=response)
        return (await self.until("response.done", since))["response"]


def sound_of(events: list[dict[str, Any]]) -> np.ndarray:
    """Samples [S], int16, of the deltas among events."""
    data = [base64.b64decode(event["delta"]) for event in events if event["type"] == "response.output_audio.delta"]
    return np.frombuffer(b"".join(data), "<i2")


def deltas(events: list[dict[str, Any]], kind: str = "output_audio_transcript") -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


@pytest.fixture(autouse=True)
def nothing_goes_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse sockets to other machines: neither the server nor a library of it may tell anybody anything."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not ipaddress.ip_address(address[0]).is_loopback:
            raise AssertionError(f"a socket to {address} was opened")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def host(lm: SpeechLM) -> EngineHost:
    return EngineHost(lambda: LocalEngine(lm))


@pytest.fixture(scope="session")
def settings() -> ServeSettings:
    return ServeSettings(model="tiny", limits=ServerLimits(), answering=Answering(max_seconds=1.0, max_tokens=12))


@contextlib.asynccontextmanager
async def opened_client(*given: Any) -> AsyncIterator[Client]:
    """The client that the arguments make; its session is closed afterwards."""
    client = Client(*given)
    try:
        yield client
    finally:
        await client.session.close()


def with_client(body: Callable[[Client], Coroutine[Any, Any, Any]], *given: Any) -> Any:
    """Run a coroutine function with the client that the arguments make."""

    async def whole() -> Any:
        async with opened_client(*given) as client:
            return await asyncio.wait_for(body(client), 60)

    return asyncio.run(whole())


@pytest.fixture
def talk(host: EngineHost, settings: ServeSettings) -> Iterator[Callable[..., Any]]:
    """Open a client."""

    def run(given: dict[str, Any] | None = MANUAL, seconds: float = 1.0, omni: bool = False) -> Any:
        answering = replace(settings.answering, max_seconds=seconds)
        return opened_client(host, replace(settings, answering=answering), given, omni)

    yield run
    assert host.stats().sessions == 0, "a session of the engine was left open"
