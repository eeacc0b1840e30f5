"""Connections below what the application sees: heads that do not come, frames without messages, clients that do not read.

uvicorn's settings bound none of these; the private interface of its protocols was read from 0.54.0 (websockets 17.0).
"""

from __future__ import annotations

import asyncio
import json
import resource
from contextlib import suppress
from time import thread_time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from infer.serve.bounds import POLICY, Quota
from infer.serve.realtime.protocol import Denied
from infer.serve.telemetry import LOG

HEAD_SECONDS, LINGER = 10.0, 5.0
"""Seconds in which the head of a request has to come, and those that a client has to take what its WebSocket was sent last."""

PIECE, LARGEST, TURN, REST = 2**10, 2**14, 0.002, 4.0
"""Bytes that are read at once, fewer where they take long, and most; seconds for which one connection's bytes are read before
others have their turn, and how many times as long it then waits."""


class PacedReading(asyncio.Protocol):
    """Reads what came a piece at a time, so that no connection takes more than a fifth of the loop's time by bytes that make
    no messages. Mixed into a protocol of uvicorn's, which reads a piece by its `data_received`."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _data, _size = b"", PIECE
    _next: asyncio.Handle | None = None
    held, reads = False, True  # what came waits for the application; more is wanted of the client

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._next is None:
            self._advance()
        else:
            self.transport.pause_reading()

    def _advance(self) -> None:
        self._next, began = None, thread_time()
        while self._data and not self.held and not self.transport.is_closing():
            at = thread_time()
            piece, self._data = self._data[: self._size], self._data[self._size :]
            super().data_received(piece)
            now = thread_time()
            self._size = min(2 * self._size, LARGEST) if now - at < TURN / 8 else PIECE
            if self._data and now - began > TURN:
                self._next = self.loop.call_later((now - began) * REST, self._advance)
                break
        self.go_on()

    def go_on(self) -> None:
        """Read from the client where nothing is left of what came, and go on with that otherwise."""
        if self.transport.is_closing() or self.held:
            return
        if self._data:
            self.transport.pause_reading()
            self._next = self._next or self.loop.call_soon(self._advance)
        elif self.reads:
            self.transport.resume_reading()


class HttpConnection(PacedReading, H11Protocol):
    """A connection with requests: it is closed where no head of one comes, and for another one where there are too many."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        server: Any = self.config.app.state.server  # type: ignore[union-attr]
        self._idle = server.idle
        self._look()
        if len(self.connections) > server.settings.limits.connections:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def _look(self) -> None:
        """Starts the deadline of a request's head where the connection is idle, or ends it."""
        busy = self not in self.connections or (self.cycle is not None and not self.cycle.response_complete)
        if busy and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._idle.pop(self, None)
        elif not busy and self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)
            self._idle[self] = None

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return not self.flow.read_paused

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._data = b""
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._look()


class SocketConnection(PacedReading, WebSocketsSansIOProtocol):
    """A WebSocket's connection: too many frames or bytes end it, and who does not read gets no answers to his pings."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._usage = Quota(self.config.app.state.server.settings.limits)  # type: ignore[union-attr]
        super().connection_made(transport)

    @property
    def held(self) -> bool:  # type: ignore[override]
        return self.read_paused or self.disconnected

    def data_received(self, data: bytes) -> None:
        if self._within(bytes=len(data)):
            super().data_received(data)

    def handle_events(self) -> None:
        if self._within(frames=len(self.conn.events)):
            super().handle_events()

    def _within(self, frames: int = 0, bytes: int = 0) -> bool:
        """Counts frames and bytes; returns whether they are within the quota, and ends the connection otherwise."""
        try:
            self._usage.count(frames=frames, bytes=bytes)
        except Denied as error:
            self._end(error)
        return not self.disconnected

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # the answers are dropped, instead of kept

    async def receive(self) -> Any:
        message = await super().receive()
        self.go_on()
        return message

    def _end(self, error: Denied) -> None:
        """Close it as uvicorn does, but leave the client time to hear of it: nothing more is read meanwhile."""
        LOG.warning("a WebSocket was closed: %s", error)
        self._data = b""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": POLICY, "reason": str(error)})
        with suppress(InvalidState):  # before it was accepted
            self.conn.send_text(json.dumps(error.event()).encode())
        self.conn.fail(POLICY, str(error)[:120])
        self.close_sent, self.disconnected, self.read_paused = True, True, False
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.pause_reading()
        self.close_timer = self.loop.call_later(LINGER, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self.loop.call_later(LINGER, self.transport.abort)  # of a client that does not read, the end would be waited for


def most_connections(sessions: int) -> int:
    """Connections at once that leave half of the files that this process may open to those that wait to be accepted, and to
    whoever answers. Raises the number of files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    files = soft if 0 < soft < 2**20 else 2**20
    return min(files // 2, 2 * sessions + 1024)
