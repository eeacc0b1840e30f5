"""A Realtime session over a WebSocket: events out, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from infer.serve.bounds import POLICY, Closed, SessionBounds
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event, ProtocolError
from infer.serve.server import Server

RESTART, TRY_AGAIN, INTERNAL = 1012, 1013, 1011
"""Close codes of WebSockets: the server ends, connect again; another server, or later; a fault."""

GONE = (WebSocketDisconnect, RuntimeError, OSError, asyncio.TimeoutError)
"""Errors of a socket whose client has gone, or does not read."""

CLOSING = 5.0  # seconds that a client has to take its last events


class SocketTransport:
    """Sends events in their order; one that a client does not read waits (`unread`), up to a number of bytes.

    Attributes:
        ending: done where the session is to end, with the reason.
        closing: what waits is sent, and nothing after it.
    """

    sound_in_events, outlet = True, Outlet

    def __init__(self, socket: WebSocket, most: int) -> None:
        self._socket, self._most = socket, most
        self._waiting: asyncio.Queue[str | None] = asyncio.Queue()  # None at the end
        self.ending: asyncio.Future[Closed] = asyncio.get_running_loop().create_future()
        self.unread, self.closing = 0, False
        self.sent_at = time.monotonic()

    @property
    def overfull(self) -> bool:
        """The client reads too slowly, and gets nothing more."""
        return self.ending.done() and self.ending.result().code == POLICY

    def put(self, event: Event) -> None:
        if self.closing or self.overfull:
            return
        text = json.dumps(event, separators=(",", ":"))
        if self.unread + len(text) > self._most:
            self.end("the client reads too slowly", POLICY)
            return
        self.sent_at = time.monotonic()
        self.unread += len(text)
        self._waiting.put_nowait(text)

    def end(self, reason: str, code: int = RESTART) -> None:
        if not self.ending.done():
            self.ending.set_result(Closed(code, reason))

    async def run(self) -> None:
        """Sends until it is closing and all was sent, or the client has gone."""
        with contextlib.suppress(*GONE):
            while (text := await self._waiting.get()) is not None and not self.overfull:
                await self._socket.send_text(text)
                self.unread -= len(text)

    async def receive(self) -> str | bytes | None:
        """The next message of the client; None where it has gone."""
        with contextlib.suppress(*GONE):
            message = await self._socket.receive()
            if message["type"] != "websocket.disconnect":
                return message.get("text") or message.get("bytes") or ""
        return None

    async def close(self, sending: asyncio.Task[None], closed: Closed) -> None:
        """Let the last events go, and close the socket."""
        self.closing = True
        self._waiting.put_nowait(None)
        with contextlib.suppress(*GONE):
            await asyncio.wait_for(asyncio.shield(sending), 0.01 if self.overfull else CLOSING)
            if self._socket.client_state is WebSocketState.CONNECTED:
                await asyncio.wait_for(self._socket.close(closed.code, closed.reason), CLOSING)


async def serve_socket(server: Server, socket: WebSocket) -> None:
    """Serve one WebSocket from its first to its last message."""
    protocols, query = socket.scope.get("subprotocols", []), socket.query_params
    transport = SocketTransport(socket, server.settings.limits.unread_bytes)
    try:
        owner, secret = server.admit(socket.headers, protocols)
        intent = {"type": "transcription"} if query.get("intent") == "transcription" else {}
        session = server.begin("websocket", owner, transport, {**intent, **secret}, query.get("omni") == "1")
    except ProtocolError as error:
        server.metrics.refused.labels(error.code).inc()
        await refuse(socket, error)
        return
    reason, sending = "the server failed", asyncio.create_task(transport.run())
    try:
        await socket.accept("realtime" if "realtime" in protocols else None)
        bounds = SessionBounds(session, server.keys.usage[owner])
        closed = await bounds.serve(transport.receive, transport.ending, sending)
        await transport.close(sending, closed)
        reason = closed.reason
    except Exception:
        session.log.exception("a socket failed")
        with contextlib.suppress(Exception):
            await socket.close(INTERNAL, reason)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await session.close()
        server.end("websocket", owner, session, reason)


async def refuse(socket: WebSocket, error: ProtocolError) -> None:
    """Accept a socket only to tell why it is closed: clients show events, but hide the status of a handshake."""
    event = {"event_id": "event_refused", **error.event()}
    with contextlib.suppress(*GONE):
        await socket.accept("realtime" if "realtime" in socket.scope.get("subprotocols", []) else None)
        await asyncio.wait_for(socket.send_text(json.dumps(event)), CLOSING)
        code = POLICY if error.status < 429 else TRY_AGAIN
        await asyncio.wait_for(socket.close(code, str(error)[:120]), CLOSING)
