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
from typing import Any

import numpy as np
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.rtcconfiguration import RTCBundlePolicy
from aiortc.sdp import SessionDescription

from infer.serve.keys import Denied, Quota
from infer.serve.realtime.bounds import Closed, SessionBounds
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event, ProtocolError, new_id
from infer.serve.realtime.rtc_sound import CallOutlet, SoundTrack, TrackListener
from infer.serve.realtime.session import RealtimeSession
from infer.serve.settings import ServerLimits

CONNECT = 30.0
"""Seconds that a client has from its offer to its data channel."""

CLOSING = 2.0
"""Seconds that a client has to take its last events, and a connection to close."""

LARGEST_OFFER = 100_000
"""Characters of an offer; a browser's has some thousands."""

MOST_CANDIDATES = 20
"""Addresses of a client that are tried; others are left out."""


class CallTransport:
    """Sends events over the data channel, once it is open, and sound by a track.

    Args:
        most: bytes that may wait for a client that does not read.

    Attributes:
        ending: set where the call is to end, with the reason.
        sent_at: when an event was put last.
    """

    sound_in_events = False

    def __init__(self, most: int) -> None:
        self.track = SoundTrack()
        self.channel: RTCDataChannel | None = None
        self.ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.sent_at = time.monotonic()
        self._most = most

    @property
    def open(self) -> bool:
        return self.channel is not None and self.channel.readyState == "open"

    @property
    def unread(self) -> int:
        return 0 if self.channel is None else self.channel.bufferedAmount

    def put(self, event: Event) -> None:
        if self.channel is None or not self.open or self.ending.done():
            return
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        if self.channel.bufferedAmount + len(data) > self._most:
            self.end("the client reads too slowly")
            return
        self.sent_at = time.monotonic()
        try:
            self.channel.send(data.decode())
        except ValueError:  # larger than the client takes
            problem = f"an event of type {event['type']} with {len(data):,} bytes is larger than your data channel takes"
            self.put({"event_id": new_id("event"), **ProtocolError(problem, "event_too_large", kind="server_error").event()})

    def end(self, reason: str) -> None:
        if not self.ending.done():
            self.ending.set_result(reason)

    def outlet(self, rate: int, emit: Callable[[np.ndarray], None]) -> Outlet:
        return CallOutlet(self.track, emit)

    async def close(self) -> None:
        """Close the data channel once what was sent has gone."""
        if self.channel is None or not self.open or self.channel.bufferedAmount > self._most // 2:
            return
        gone = asyncio.Event()
        self.channel.on("close", gone.set)
        self.channel.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(gone.wait(), CLOSING)


class Call:
    """One call, from its offer to its end.

    Args:
        owner: of the key that began it.
        bounds: of its session.

    Attributes:
        opened: set once its data channel is there.
    """

    def __init__(
        self, transport: CallTransport, session: RealtimeSession, owner: str, bounds: SessionBounds, limits: ServerLimits
    ) -> None:
        self.id, self.owner, self.session = new_id("rtc"), owner, session
        self._transport, self._bounds, self._most = transport, bounds, limits.unread_bytes
        self._usage = Quota(limits)
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=[], bundlePolicy=RTCBundlePolicy.MAX_BUNDLE))
        self._pc.on("connectionstatechange", self._changed)
        self._pc.on("datachannel", self._take_channel)
        self.opened = asyncio.Event()
        self._messages: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._waiting = 0  # bytes of them

    async def answer(self, offer: str, near: bool) -> str:
        """The answer to a client's offer (SDP).

        Args:
            near: the client is on this machine.

        Raises:
            ProtocolError: the offer is none that can be taken.
        """
        transceiver = self._pc.addTransceiver(self._transport.track, "sendrecv")
        opus = [codec for codec in RTCRtpSender.getCapabilities("audio").codecs if codec.mimeType == "audio/opus"]
        transceiver.setCodecPreferences(opus)
        try:
            await self._pc.setRemoteDescription(RTCSessionDescription(checked_offer(offer), "offer"))
            gatherer = transceiver.receiver.transport.transport.iceGatherer
            if near:  # aioice leaves it out of what it gathers
                gatherer._connection._local_candidates += await gatherer._connection.get_component_candidates(1, ["127.0.0.1"])
            await self._pc.setLocalDescription()
        except ProtocolError:
            raise
        except Exception as error:  # whatever aiortc raises for what it cannot take
            raise _bad_offer(f"cannot be taken ({str(error)[:200] or type(error).__name__})") from None
        return str(self._pc.localDescription.sdp)

    async def run(self) -> str:
        """Serve the call after its answer; returns why it ended."""
        session, ending = self.session, self._transport.ending
        track = self._pc.getTransceivers()[0].receiver.track
        if track is not None:
            listener = TrackListener(track)
            session.spawn(listener.read())
            session.spawn(listener.listen(self._hear))
        ending.add_done_callback(lambda _: self.opened.set())
        try:
            await asyncio.wait_for(self.opened.wait(), CONNECT)
        except asyncio.TimeoutError:
            return "not connected in time"
        session.begin()
        doing: list[asyncio.Future[Any]] = [asyncio.create_task(self._read()), asyncio.create_task(self._bounds.watch())]
        try:
            done, _ = await asyncio.wait([*doing, ending], return_when=asyncio.FIRST_COMPLETED)
            return _reason(done)
        finally:
            for task in doing:
                task.cancel()
            await asyncio.gather(*doing, return_exceptions=True)

    async def close(self) -> None:
        """End the session, and close the connection once the last events have gone."""
        await self.session.close()
        await self._transport.close()
        self._transport.track.stop()
        self._transport.end("closed")
        try:
            await asyncio.wait_for(self._pc.close(), CLOSING)
        except asyncio.TimeoutError:
            self.session.log.warning("a connection did not close")
        for one in (self._pc, self._transport.channel):  # what aiortc still holds does not hold the call
            if one is not None:
                one.remove_all_listeners()

    def hang_up(self, reason: str) -> None:
        self._transport.end(reason)

    def _changed(self) -> None:
        if self._pc.connectionState in ("failed", "closed"):
            self._transport.end(f"the connection {self._pc.connectionState}")

    def _take_channel(self, channel: RTCDataChannel) -> None:
        if self._transport.channel is not None:
            channel.close()
            return
        self._transport.channel = channel
        channel.on("message", self._take)
        channel.on("close", lambda: self._transport.end("the client closed its data channel"))
        self.opened.set()

    def _take(self, data: str | bytes) -> None:
        self._waiting += len(data)
        try:
            self._usage.count(frames=1, bytes=len(data))
        except Denied as error:
            self._transport.end(str(error))
        if self._waiting > self._most:
            self._transport.end("more messages came than could be handled")
        elif not self._transport.ending.done():
            self._messages.put_nowait(data)

    async def _read(self) -> None:
        """Handle the client's messages, one after another."""
        while True:
            data = await self._messages.get()
            self._waiting -= len(data)
            await self.session.handle(data)
            self._bounds.count()

    async def _hear(self, samples: np.ndarray) -> None:
        self._bounds.came = time.monotonic()
        if self.opened.is_set():
            await self.session.hear(samples)


def _reason(done: set[asyncio.Future[Any]]) -> str:
    """Why a call ends, by what has ended of it; other errors than Closed are raised."""
    for one in done:
        error = one.exception()
        if isinstance(error, Closed):
            return error.reason
        if error is not None:
            raise error
    return str(done.pop().result())


def checked_offer(offer: str) -> str:
    """An offer with the addresses that are tried.

    A browser may give its addresses under names that only multicast finds; it is answered where its packets come from.

    Raises:
        ProtocolError: it is no SDP, or not of one stream of sound that goes both ways and a data channel.
    """
    if len(offer) > LARGEST_OFFER:
        raise _bad_offer(f"has {len(offer):,} characters; at most {LARGEST_OFFER:,} can be taken")
    try:
        media = SessionDescription.parse(offer).media
    except Exception:  # the parser raises whatever comes
        raise _bad_offer("is no SDP") from None
    kinds = [one.kind for one in media]
    if sorted(kinds) != ["application", "audio"]:
        held = ", ".join(kinds)[:100] or "nothing"
        raise _bad_offer(f"must have one section of audio and one of application (a data channel); it has {held}")
    sound = media[kinds.index("audio")]
    if sound.direction not in ("sendrecv", "recvonly"):
        raise _bad_offer(f"must take sound (a=sendrecv or a=recvonly); it says {sound.direction}")
    if not any(codec.name.lower() == "opus" for codec in sound.rtp.codecs):
        raise _bad_offer("must have Opus among its codecs")
    if not all(one.dtls is not None and one.dtls.fingerprints for one in media):
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
