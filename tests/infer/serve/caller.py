"""A client of calls over WebRTC, of aiortc, in the loop of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from fractions import Fraction
from operator import attrgetter
from typing import Any

import httpx2
import numpy as np
import pytest
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame
from openai import AsyncOpenAI

from infer.serve.app import create_app
from infer.serve.host import EngineHost
from infer.serve.server import Server
from infer.serve.settings import Answering, ServerLimits, ServeSettings
from tests.realtime.client import written

KEYS = ("the-first-key-of-all", "the-second-key-of-all")

RATE = 48_000


class LocalEngine:
    """A model's engine in this process, with what a server calls of an `EngineProcess`; `alive` may be set."""

    def __init__(self, lm: Any) -> None:
        self._lm, self.alive, self.lost = lm, True, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def call(self, name: str, *args: Any, **values: Any) -> Any:
        found = attrgetter(name)(self._lm)
        return found(*args, **values) if callable(found) else found

    def close(self) -> None:
        if self.alive:  # a lost one shares its model with the next
            self._lm.engine.close()


def tone(seconds: float, hertz: float = 440) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


class Microphone(MediaStreamTrack):
    """Frames of 20 ms in real time: what is to be said, and silence."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.says = np.zeros(0, np.float32)
        self._began, self._count = 0.0, 0

    async def recv(self) -> AudioFrame:
        now = time.monotonic()
        self._began = self._began or now
        await asyncio.sleep(max(self._began + self._count * 0.02 - now, 0))
        piece, self.says = self.says[:960], self.says[960:]
        samples = (np.pad(piece, (0, 960 - len(piece))) * 32767).astype(np.int16)
        frame = AudioFrame.from_ndarray(samples[None], "s16", "mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), self._count * 960
        self._count += 1
        return frame


class Caller:
    """A client of one call.

    Attributes:
        events: that came; `sound`, frames [960] of what was heard.
    """

    def __init__(self, app: Any, key: str = KEYS[0]) -> None:
        transport = httpx2.ASGITransport(app, client=("127.0.0.1", 50_000))
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://localhost/v1")
        self.openai = AsyncOpenAI(api_key=key, base_url="http://localhost/v1", http_client=self.http)
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.microphone = Microphone()
        self.pc.addTrack(self.microphone)
        self.pc.on("track", lambda track: asyncio.ensure_future(self._listen(track)))
        self.channel = self.pc.createDataChannel("oai-events")
        self.channel.on("message", self._take)
        self.events: list[dict[str, Any]] = []
        self.sound: list[np.ndarray] = []
        self.location = ""
        self._came = asyncio.Event()

    def _take(self, data: str) -> None:
        self.events.append(json.loads(data))
        self._came.set()

    async def _listen(self, track: MediaStreamTrack) -> None:
        with contextlib.suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                assert isinstance(frame, AudioFrame)
                self.sound.append(frame.to_ndarray().reshape(-1, 2)[:, 0] / np.float32(32768))

    @property
    def heard(self) -> np.ndarray:
        """What was heard [S], from the first sound to the last."""
        whole = np.concatenate(self.sound)
        loud = np.flatnonzero(np.abs(whole) > 2e-3)
        return whole[loud[0] : loud[-1] + 1] if len(loud) else whole[:0]

    async def offer(self) -> str:
        await self.pc.setLocalDescription(await self.pc.createOffer())
        return str(self.pc.localDescription.sdp)

    async def call(self, session: Any) -> dict[str, Any]:
        """Call as the `openai` package does; returns the first event."""
        answer = await self.openai.realtime.calls.create(sdp=await self.offer(), session=session)
        assert answer.response.status_code == 201 and answer.response.headers["content-type"] == "application/sdp"
        self.location = answer.response.headers["location"]
        await self.pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        return await self.until("session.created")

    def send(self, type: str, **values: Any) -> int:
        """Send an event; returns how many came before."""
        self.channel.send(json.dumps({"type": type, **values}))
        return len(self.events)

    async def until(self, type: str, since: int = 0) -> dict[str, Any]:
        async def look() -> dict[str, Any]:
            while True:
                for event in self.events[since:]:
                    if event["type"] == type:
                        return event
                self._came.clear()
                await self._came.wait()

        return await asyncio.wait_for(look(), 20)

    async def say(self, samples: np.ndarray) -> None:
        """Say something, and wait until it has arrived."""
        self.microphone.says = samples
        await asyncio.sleep(len(samples) / RATE + 0.15)  # aiortc holds back four frames

    async def ask(self) -> int:
        """Have a written question answered; returns how many events came before."""
        self.send("conversation.item.create", item=written("and then"))
        return self.send("response.create")

    async def over(self) -> None:
        """Wait until the server has ended the call."""
        while self.pc.connectionState != "closed" and self.channel.readyState != "closed":
            await asyncio.sleep(0.01)


def without(offer: str, word: str) -> str:
    """The lines that do not have a word."""
    return "".join(line for line in offer.splitlines(True) if word not in line)


async def no_session(server: Server) -> None:
    """Wait until every session has ended."""
    while server.sessions:
        await asyncio.sleep(0.01)


@pytest.fixture
def calls(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Open a server and a client, over 127.0.0.1 alone; nothing of them may be left."""
    monkeypatch.setattr("aioice.ice.get_host_addresses", lambda **kinds: ["127.0.0.1"])

    @contextlib.asynccontextmanager
    async def run(seconds: float = 0.4, **limits: Any) -> AsyncIterator[tuple[Server, Caller]]:
        answering = Answering(max_seconds=seconds)
        app = create_app(host, ServeSettings(model="tiny", limits=ServerLimits(**limits), answering=answering), KEYS)
        server: Server = app.state.server
        async with app.router.lifespan_context(app):
            caller = Caller(app)
            try:
                yield server, caller
            finally:
                await caller.pc.close()
                await caller.openai.close()
            await asyncio.wait_for(no_session(server), 5)
        assert not server.keys.sessions
        assert server.metrics.registry.get_sample_value("omni_sessions", {"transport": "webrtc"}) in (0, None)
        assert host.stats().sessions == 0, "a session of the engine was left open"

    return run


def session_of(server: Server) -> Any:
    (session,) = server.sessions.values()
    return session
