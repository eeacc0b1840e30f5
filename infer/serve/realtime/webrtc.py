"""Realtime sessions over WebRTC, as OpenAI's `/v1/realtime/calls`: an offer in, an answer out, then events over a data channel
and sound by Opus.

No server outside is asked for addresses: a client reaches this machine by those of its interfaces, or by 127.0.0.1 where it
asked from there. Where a client does not tell its own, its packets are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.rtcconfiguration import RTCBundlePolicy
from aiortc.sdp import SessionDescription
from fastapi import Request, Response
from starlette.datastructures import UploadFile

from infer.serve.bounds import EXPIRED, Closed, Quota, SessionBounds
from infer.serve.keys import LOOPBACK
from infer.serve.realtime.configuration import merged
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Denied, Event, ProtocolError, new_id, read_json
from infer.serve.realtime.rtc_sound import CallOutlet, SoundTrack, TrackListener
from infer.serve.realtime.session import RealtimeSession
from infer.serve.rest.jobs import Job
from infer.serve.server import Server, response_of
from infer.serve.settings import ServerLimits
from infer.serve.telemetry import LOG
from omni.utils.private import gather_from

CONNECT = 30.0  # seconds that a client has from its offer to its data channel
CLOSING = 2.0  # seconds that a client has to take its last events, and a connection to close
LARGEST_OFFER = 100_000  # characters of an offer; a browser's has some thousands
MOST_CANDIDATES = 20  # addresses of a client that are tried; others are left out

PATH = "/v1/realtime/calls"

CONNECTING = 8  # calls of a key that may be on their way at once, until their data channels are open


class Call:
    """One call of a key's owner, from its offer to its end: events go over the data channel, once it is open, and sound by a
    track.

    Attributes:
        opened: set once the data channel is there.
        ending: done where the call is to end, with the reason.
    """

    sound_in_events = False

    def __init__(self, limits: ServerLimits, owner: str) -> None:
        self.id, self.owner = new_id("rtc"), owner
        self.opened = asyncio.Event()
        self.ending: asyncio.Future[Closed] = asyncio.get_running_loop().create_future()
        self.sent_at = time.monotonic()
        self._usage, self._most = Quota(limits), limits.unread_bytes
        self._track = SoundTrack()
        self.channel: RTCDataChannel | None = None
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=[], bundlePolicy=RTCBundlePolicy.MAX_BUNDLE))
        self._pc.on("connectionstatechange", self._changed)
        self._pc.on("datachannel", self._take_channel)
        self._messages: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._waiting = 0  # bytes of them

    # --- what a session sends -----------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        return 0 if self.channel is None else self.channel.bufferedAmount

    def put(self, event: Event) -> None:
        if self.channel is None or self.channel.readyState != "open" or self.ending.done():
            return
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        if self.unread + len(data) > self._most:
            self.end("the client reads too slowly")
            return
        self.sent_at = time.monotonic()
        try:
            self.channel.send(data.decode())
        except ValueError:  # larger than the client takes
            problem = f"an event of type {event['type']} with {len(data):,} bytes is larger than your data channel takes"
            error = ProtocolError(problem, "event_too_large", status=500)
            self.put({"event_id": new_id("event"), **error.event()})

    def end(self, reason: str) -> None:
        if not self.ending.done():
            self.ending.set_result(Closed(EXPIRED, reason))

    def outlet(self, rate: int, emit: Callable[[np.ndarray], None]) -> Outlet:
        return CallOutlet(self._track, emit)

    # --- its course ---------------------------------------------------------------------------------------------------

    async def answer(self, offer: str, near: bool) -> str:
        """The answer to an offer (SDP) of a client, who may be on this machine (`near`); ProtocolError for one that cannot be
        taken."""
        transceiver = self._pc.addTransceiver(self._track, "sendrecv")
        opus = [codec for codec in RTCRtpSender.getCapabilities("audio").codecs if codec.mimeType == "audio/opus"]
        transceiver.setCodecPreferences(opus)
        try:
            await self._pc.setRemoteDescription(RTCSessionDescription(checked_offer(offer), "offer"))
            if near:
                await gather_from(transceiver.receiver.transport.transport.iceGatherer, ["127.0.0.1"])
            await self._pc.setLocalDescription()
        except ProtocolError:
            raise
        except Exception as error:  # whatever aiortc raises for what it cannot take
            raise _bad_offer(f"cannot be taken ({str(error)[:200] or type(error).__name__})") from None
        return str(self._pc.localDescription.sdp)

    async def run(self, session: RealtimeSession, key_usage: Quota) -> str:
        """Serve the call after its answer; returns why it ended."""
        bounds = SessionBounds(session, key_usage)

        async def hear(samples: np.ndarray) -> None:
            bounds.came = time.monotonic()
            if self.opened.is_set():
                try:
                    await session.hearing.take(samples)
                except ProtocolError as error:
                    session.send(error.event())

        track = self._pc.getTransceivers()[0].receiver.track
        if track is not None:
            listener = TrackListener(track)
            session.spawn(listener.read())
            session.spawn(listener.listen(hear))
        self.ending.add_done_callback(lambda _: self.opened.set())
        try:
            await asyncio.wait_for(self.opened.wait(), CONNECT)
        except asyncio.TimeoutError:
            return "not connected in time"
        return (await bounds.serve(self._next, self.ending)).reason

    async def _next(self) -> str | bytes:
        """The next message of the client."""
        data = await self._messages.get()
        self._waiting -= len(data)
        return data

    async def close(self) -> None:
        """Close the connection once the last events have gone."""
        channel = self.channel
        if channel is not None and channel.readyState == "open" and self.unread <= self._most // 2:
            gone = asyncio.Event()
            channel.on("close", gone.set)
            channel.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(gone.wait(), CLOSING)
        self._track.stop()
        self.end("closed")
        try:
            await asyncio.wait_for(self._pc.close(), CLOSING)
        except asyncio.TimeoutError:
            LOG.warning("the connection of %s did not close", self.id)
        for emitter in (self._pc, channel):  # what aiortc still holds does not hold the call
            if emitter is not None:
                emitter.remove_all_listeners()

    def _changed(self) -> None:
        if self._pc.connectionState in ("failed", "closed"):
            self.end(f"the connection {self._pc.connectionState}")

    def _take_channel(self, channel: RTCDataChannel) -> None:
        if self.channel is not None:
            channel.close()
            return
        self.channel = channel
        channel.on("message", self._take)
        channel.on("close", lambda: self.end("the client closed its data channel"))
        self.opened.set()

    def _take(self, data: str | bytes) -> None:
        self._waiting += len(data)
        try:
            self._usage.count(frames=1, bytes=len(data))
        except Denied as error:
            self.end(str(error))
        if self._waiting > self._most:
            self.end("more messages came than could be handled")
        elif not self.ending.done():
            self._messages.put_nowait(data)


def checked_offer(offer: str) -> str:
    """An offer with the addresses that are tried; ProtocolError where it is not of one stream of sound that goes both ways and
    a data channel. A browser may give its addresses under names that only multicast finds; it is answered where its packets
    come from.
    """
    if len(offer) > LARGEST_OFFER:
        raise _bad_offer(f"has {len(offer):,} characters; at most {LARGEST_OFFER:,} can be taken")
    try:
        media = SessionDescription.parse(offer).media
    except Exception:  # the parser raises whatever comes
        raise _bad_offer("is no SDP") from None
    kinds = [section.kind for section in media]
    if sorted(kinds) != ["application", "audio"]:
        held = ", ".join(kinds)[:100] or "nothing"
        raise _bad_offer(f"must have one section of audio and one of application (a data channel); it has {held}")
    sound = media[kinds.index("audio")]
    if sound.direction not in ("sendrecv", "recvonly"):
        raise _bad_offer(f"must take sound (a=sendrecv or a=recvonly); it says {sound.direction}")
    if not all(section.dtls is not None and section.dtls.fingerprints for section in media):
        raise _bad_offer("must have a=fingerprint in each section")
    kept, addresses = list[str](), 0
    for line in offer.splitlines():
        if line.startswith("a=candidate:"):
            addresses += 1
            if ".local " in line or addresses > MOST_CANDIDATES:
                continue
        if line.strip() != "a=end-of-candidates":
            kept.append(line)
    return "\r\n".join(kept) + "\r\n"


def _bad_offer(problem: str) -> ProtocolError:
    return ProtocolError(f"the offer {problem}", "invalid_offer", "sdp")


@dataclass(eq=False)
class Calls:
    """The calls of one server."""

    _server: Server
    _calls: dict[str, Call] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def create(self, job: Job) -> Response:
        """Begins the call of an offer, and answers it; Denied where too many calls of its key are not connected."""
        server, owner, request = self._server, job.owner, job.request
        offer, changes = await _read(job)
        if sum(call.owner == owner and not call.opened.is_set() for call in self._calls.values()) >= CONNECTING:
            raise Denied(f"{CONNECTING} calls of this key are not connected yet; wait", "rate_limit_exceeded", status=429)
        call = Call(server.settings.limits, owner)
        omni = request.query_params.get("omni") == "1"
        session = server.begin("webrtc", owner, call, merged(job.secret, changes), omni)
        self._calls[call.id] = call
        try:
            near = request.client is not None and request.client.host in LOOPBACK
            answer = await call.answer(offer, near)
        except BaseException:
            await self._end(call, session, "no answer to the offer")
            raise
        task = asyncio.create_task(self._serve(call, session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Response(answer, 201, {"location": f"{PATH}/{call.id}"}, "application/sdp")

    async def hang_up(self, request: Request, call_id: str) -> Response:
        """Ends a call."""
        owner, _ = self._server.admit(request.headers, [])
        call = self._calls.get(call_id)
        if call is None or call.owner != owner:
            problem = f"there is no call {call_id[:80]!r}, or it has ended"
            return response_of(ProtocolError(problem, "call_not_found", status=404))
        call.end("the client hung up")
        return Response()

    async def close(self) -> None:
        """End all of them."""
        for call in self._calls.values():
            call.end("the server ends")
        await asyncio.gather(*self._tasks)

    async def _serve(self, call: Call, session: RealtimeSession) -> None:
        reason = "the server failed"
        try:
            reason = await call.run(session, self._server.keys.usage[call.owner])
        except Exception:
            session.log.exception("a call failed")
        finally:
            await self._end(call, session, reason)

    async def _end(self, call: Call, session: RealtimeSession, reason: str) -> None:
        """Close a call, and count it no longer."""
        try:
            await session.close()
            await call.close()
        finally:
            del self._calls[call.id]
            self._server.end("webrtc", call.owner, session, reason)


async def _read(job: Job) -> tuple[str, Event]:
    """A request's offer and configuration, of a body of `application/sdp` or a form; ProtocolError where it has none."""
    content_type = job.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/sdp":
        return (await job.body()).decode("utf-8", "replace"), {}
    if content_type != "multipart/form-data":
        raise ProtocolError("send the offer as application/sdp, or as multipart/form-data with sdp and session", "invalid_form")
    async with job.form(files=2) as form:  # some clients send fields as files
        fields = [form.get(name) for name in ("sdp", "session")]
        texts = [await field.read() if isinstance(field, UploadFile) else (field or "").encode() for field in fields]
    offer, session = [text.decode("utf-8", "replace") for text in texts]
    if not offer:
        raise ProtocolError("the form has no sdp, the offer", "missing_required_parameter", "sdp")
    configuration = read_json(session or "{}", "session", "session")
    if not isinstance(configuration, dict):
        raise ProtocolError("session is no object; send one", "invalid_json", "session")
    return offer, configuration
