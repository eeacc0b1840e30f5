"""Calls over WebRTC, by a client of aiortc in the same loop, over sockets of 127.0.0.1 alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from fractions import Fraction
from typing import Any

import httpx2
import numpy as np
import pytest
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame
from openai import AsyncOpenAI

from infer.serve.app import Server, create_app
from infer.serve.host import EngineHost
from infer.serve.realtime import bounds, webrtc
from infer.serve.realtime.vad import FRAME, VoiceActivity
from infer.serve.settings import Answering, ServerLimits, ServeSettings
from tests.infer.serve.conftest import MANUAL, deltas
from tests.infer.serve.test_events import check_known

KEYS = ("the-first-key-of-all", "the-second-key-of-all")

RATE = 48_000


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

    async def call(self, session: Any = MANUAL) -> dict[str, Any]:
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
        content = [{"type": "input_text", "text": "and then"}]
        self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        return self.send("response.create")

    async def over(self) -> None:
        """Wait until the server has ended the call."""
        while self.pc.connectionState != "closed" and self.channel.readyState != "closed":
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address but 127.0.0.1 is used."""
    monkeypatch.setattr("aioice.ice.get_host_addresses", lambda **kinds: ["127.0.0.1"])


@pytest.fixture
def calls(host: EngineHost) -> Iterator[Callable[..., None]]:
    """Run a coroutine function with a server and a client; nothing of them may be left."""

    def run(body: Callable[[Server, Caller], Coroutine[Any, Any, Any]], seconds: float = 0.4, **limits: Any) -> None:
        answering = Answering(max_seconds=seconds)
        app = create_app(host, ServeSettings(model="tiny", limits=ServerLimits(**limits), answering=answering), KEYS)
        server: Server = app.state.server

        async def whole() -> None:
            async with app.router.lifespan_context(app):
                caller = Caller(app)
                try:
                    await asyncio.wait_for(body(server, caller), 30)
                finally:
                    await caller.pc.close()
                    await caller.openai.close()
                async with asyncio.timeout(5):
                    while server.sessions:
                        await asyncio.sleep(0.01)
            assert not server.keys.sessions
            assert server.metrics.registry.get_sample_value("omni_sessions", {"transport": "webrtc"}) in (0, None)

        asyncio.run(whole())
        assert host.stats().sessions == 0, "a session of the engine was left open"

    return run


def session_of(server: Server) -> Any:
    (session,) = server.sessions.values()
    return session


# --- the course of a call ---------------------------------------------------------------------------------------------


def test_a_spoken_turn(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
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

    calls(body)


def test_a_browser_s_way_and_hanging_up(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
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
        while server.sessions:
            await asyncio.sleep(0.01)
        assert (await caller.http.post(place, headers=bearer)).status_code == 404

    calls(body)


@pytest.mark.parametrize("way", ["output_audio_buffer.clear", "response.cancel", "conversation.item.truncate", "speech"])
def test_what_was_not_played_is_not_kept(calls: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def loud(self: Any, stream: Any, samples: np.ndarray) -> list[float]:
        return [float(np.abs(samples).max() > 0.1)] * (len(samples) // (FRAME // 2))

    monkeypatch.setattr(VoiceActivity, "push", loud)

    async def body(server: Server, caller: Caller) -> None:
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

    calls(body, seconds=3.0)


def test_the_tail_of_an_answer_that_has_ended_is_cleared(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
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

    calls(body)


def test_an_answer_is_heard_after_the_one_before(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
        since = await caller.ask()
        first = (await caller.until("response.done", since))["response"]["id"]
        middle = await caller.ask()
        second = (await caller.until("response.done", middle))["response"]["id"]
        while [event["type"] for event in caller.events].count("output_audio_buffer.stopped") < 2:
            await asyncio.sleep(0.02)
        told = [(e["type"][20:], e["response_id"]) for e in caller.events if e["type"].startswith("output_audio_buffer")]
        assert told == [("started", first), ("stopped", first), ("started", second), ("stopped", second)]

    calls(body)


def test_sound_that_is_never_committed_makes_room(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
        buffer = session_of(server).hearing.buffer
        buffer.most = 0.1
        await caller.say(tone(0.2))
        assert 0.08 <= buffer.seconds <= 0.1 and buffer.end > 0.2
        assert [event["type"] for event in caller.events] == ["session.created"]

    calls(body)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def without(offer: str, word: str) -> str:
    """The lines that do not have a word."""
    return "".join(line for line in offer.splitlines(True) if word not in line)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda offer: "hello", "it has nothing"),
        (lambda offer: "v=0\r\nm=", "is no SDP"),
        (lambda offer: offer.replace("a=rtpmap:96", "a=rtpmap:ab"), "is no SDP"),
        (lambda offer: offer.split("m=application")[0], "it has audio"),
        (lambda offer: offer + "m=video 9 UDP/TLS/RTP/SAVPF 97\r\na=rtpmap:97 VP8/90000\r\n", "application, video"),
        (lambda offer: offer.replace("a=sendrecv", "a=sendonly"), "it says sendonly"),
        (lambda offer: offer.replace("opus/48000", "speex/16000"), "must have Opus"),
        (lambda offer: without(offer, "ice-pwd"), "cannot be taken"),
        (lambda offer: without(offer, "fingerprint"), "must have a=fingerprint"),
        (lambda offer: offer + "a=x\r\n" * 30_000, "characters"),
    ],
)
def test_bad_offers(calls: Any, change: Any, told: str) -> None:
    async def body(server: Server, caller: Caller) -> None:
        sdp = change(await caller.offer())
        bearer = {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/sdp"}
        answer = await caller.http.post("/realtime/calls", content=sdp, headers=bearer)
        error = answer.json()["error"]
        assert answer.status_code == 400 and told in error["message"], error
        assert error["code"] == "invalid_offer" and error["param"] == "sdp" and error["type"] == "invalid_request_error"
        assert not server.sessions and not server.keys.sessions

    calls(body)


def test_bad_requests(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
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
        assert (await refused(files=form(sdp=offer)))[:2] == (429, "session_limit_reached")

    calls(body)


def test_secrets_bring_a_configuration_that_a_call_adds_to(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        secret, _ = server.keys.make_secret("key-1", {**MANUAL, "instructions": "from the secret"}, 60)
        caller.openai.api_key = secret
        created = await caller.call({"type": "realtime", "audio": {"input": {"transcription": {"model": "own"}}}})
        heard = created["session"]["audio"]["input"]
        assert created["session"]["instructions"] == "from the secret"
        assert heard["turn_detection"] is None and heard["transcription"] is not None
        assert server.keys.sessions == {"key-1": 1}

    calls(body)


def test_limits_of_sessions(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
        bearer = {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/sdp"}
        answer = await caller.http.post("/realtime/calls", content="v=0", headers=bearer)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "session_limit_reached"

    calls(body, key_sessions=1)


def test_a_call_that_never_connects_is_dropped(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webrtc, "CONNECT", 0.2)

    async def body(server: Server, caller: Caller) -> None:
        await caller.openai.realtime.calls.create(sdp=await caller.offer())
        assert len(server.sessions) == 1 and server.keys.sessions == {"key-1": 1}
        while server.sessions:
            await asyncio.sleep(0.01)

    calls(body)


def test_a_client_that_goes_away(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
        await caller.until("output_audio_buffer.started", await caller.ask())
        await caller.pc.close()
        while server.sessions:
            await asyncio.sleep(0.01)

    calls(body, seconds=3.0)


def test_a_client_that_does_not_read(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()

        async def nothing(data: bytes) -> None:
            """No acknowledgement goes out."""

        monkeypatch.setattr(caller.pc.sctp.transport, "_send_data", nothing)
        session = session_of(server)
        for _ in range(60):
            session.tell_error("x" * 10_000)
            await asyncio.sleep(0)
        assert session.transport.channel.bufferedAmount <= 100_000
        assert session.transport.ending.result() == "the client reads too slowly"

    calls(body, unread_bytes=100_000)


def test_large_events(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
        text = "wörter " * 14_000  # more than 64 KiB
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        caller.send("conversation.item.create", item=item)
        assert (await caller.until("conversation.item.done"))["item"]["content"] == content
        session_of(server).transport.channel.transport._remote_max_message_size = 10_000
        since = caller.send("conversation.item.create", item=item)
        assert (await caller.until("error", since))["error"]["code"] == "event_too_large"

    calls(body)


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"key_events": 8}, "rate_limit_exceeded"), ({"session_seconds": 0.3}, "session_expired")],
)
def test_limits_end_a_call_after_they_were_told(calls: Any, limits: Any, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "LOOK", 0.1)

    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
        if "key_events" in limits:
            for _ in range(200):
                caller.send("input_audio_buffer.clear")
        assert (await caller.until("error"))["error"]["code"] == code
        await caller.over()

    calls(body, **limits)


def test_the_server_s_end_is_told(calls: Any) -> None:
    async def body(server: Server, caller: Caller) -> None:
        await caller.call()
        session = session_of(server)
        session.tell_error("this server ends; connect again", "server_shutting_down")
        session.end("the server ends")
        assert (await caller.until("error"))["error"]["code"] == "server_shutting_down"
        await caller.over()

    calls(body)
