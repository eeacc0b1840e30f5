"""A Realtime session over a WebSocket: messages in, events out, limits, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from infer.serve.errors import Denied, as_protocol_error
from infer.serve.keys import Keys
from infer.serve.realtime.playback import Outlet, SentOutlet
from infer.serve.realtime.protocol import Event
from infer.serve.realtime.session import EXPIRED, POLICY, Closed, RealtimeSession, SessionBounds

RESTART, TRY_AGAIN, INTERNAL = 1012, 1013, 1011
"""Close codes of WebSockets: the server ends, connect again; another server, or later; a fault."""

GONE = (WebSocketDisconnect, RuntimeError, OSError, asyncio.TimeoutError)
"""Errors of a socket whose client has gone, or does not read."""

CLOSING = 5.0  # seconds that a client has to take its last events


class SocketTransport:
    """Sends events in their order; one that a client does not read waits (`unread`), up to a number of bytes (`overfull`)."""

    sound_in_events = True

    def __init__(self, socket: WebSocket, most: int) -> None:
        self._socket, self._most = socket, most
        self._waiting: deque[str] = deque()
        self._changed = asyncio.Event()
        self.code, self.reason = EXPIRED, ""
        self.unread, self.overfull, self.closing = 0, asyncio.Event(), False
        self.sent_at = time.monotonic()

    def put(self, event: Event) -> None:
        if self.closing or self.overfull.is_set():
            return
        text = json.dumps(event, separators=(",", ":"))
        if self.unread + len(text) > self._most:
            self.overfull.set()
            self._changed.set()
            return
        self.sent_at = time.monotonic()
        self.unread += len(text)
        self._waiting.append(text)
        self._changed.set()

    def end(self, reason: str) -> None:
        self.code, self.reason = RESTART, reason
        self.finish()

    def outlet(self, rate: int, emit: Callable[[np.ndarray], None]) -> Outlet:
        return SentOutlet(rate, emit)

    async def run(self) -> None:
        """Sends until it is told to end and all was sent, or the client reads too slowly."""
        while not self.overfull.is_set():
            while self._waiting and not self.overfull.is_set():
                text = self._waiting.popleft()
                await self._socket.send_text(text)
                self.unread -= len(text)
            if self.closing:
                return
            self._changed.clear()
            await self._changed.wait()

    def finish(self) -> None:
        """Send what waits, and nothing after it."""
        self.closing = True
        self._changed.set()


class SocketSession:
    """Serves one WebSocket from its first to its last message."""

    def __init__(self, socket: WebSocket, transport: SocketTransport, session: RealtimeSession, keys: Keys, owner: str) -> None:
        self._socket, self._transport, self._session = socket, transport, session
        self._bounds = SessionBounds(session, keys, owner)

    async def run(self) -> None:
        """Returns when the socket is closed."""
        session = self._session
        session.begin()
        sending = asyncio.create_task(self._transport.run())
        reading = asyncio.create_task(self._read())
        watching = asyncio.create_task(self._bounds.watch())
        full = asyncio.create_task(self._transport.overfull.wait())
        tasks: set[asyncio.Task[Any]] = {sending, reading, watching, full}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            code, reason = self._transport.code, self._transport.reason
            for task in (watching, reading, sending):
                if task in done and not task.cancelled() and (task is not sending or task.exception() is not None):
                    code, reason = _end_of(task)
                    if code == INTERNAL:
                        session.log.error("the session's socket failed", exc_info=task.exception())
                    break
            if self._transport.overfull.is_set():
                code, reason = POLICY, "the client reads too slowly"
                session.log.warning("client reads too slowly")
            await self._close(sending, code, reason)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await session.close()

    async def _close(self, sending: asyncio.Task[None], code: int, reason: str) -> None:
        """Let the last events go, and close the socket."""
        self._transport.finish()
        with contextlib.suppress(*GONE):
            await asyncio.wait_for(asyncio.shield(sending), CLOSING if not self._transport.overfull.is_set() else 0.01)
            if self._socket.client_state is WebSocketState.CONNECTED:
                await asyncio.wait_for(self._socket.close(code, reason), CLOSING)

    async def _read(self) -> None:
        """Take the client's messages, one after another."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("text") or message.get("bytes") or ""
            await self._session.handle(data)
            self._bounds.count()


def _end_of(task: asyncio.Task[Any]) -> tuple[int, str]:
    """Close code and reason that the end of a task means."""
    error = task.exception()
    if error is None:
        return EXPIRED, ""
    if isinstance(error, Closed):
        return error.code, error.reason
    if isinstance(error, GONE):
        return EXPIRED, ""
    return INTERNAL, "the server failed"


async def refuse(socket: WebSocket, error: Denied) -> None:
    """Accept a socket only to tell why it is closed: clients show events, but hide the status of a handshake."""
    event = {"event_id": "event_refused", **as_protocol_error(error).event()}
    with contextlib.suppress(*GONE):
        await socket.accept("realtime" if "realtime" in socket.scope.get("subprotocols", []) else None)
        await asyncio.wait_for(socket.send_text(json.dumps(event)), CLOSING)
        code = POLICY if error.status < 429 else TRY_AGAIN
        await asyncio.wait_for(socket.close(code, str(error)[:120]), CLOSING)
