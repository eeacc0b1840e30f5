"""Connections below what the application sees: heads that do not come, frames without messages, clients that do not read.

Subclasses of uvicorn's protocols, whose private interface was read from uvicorn 0.54.0 (and websockets 17.0): its settings
bound neither the time that a head may take, nor frames, nor connections without a request.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections import deque
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from infer.serve.costs import Denied, Traffic
from infer.serve.logs import LOG
from infer.serve.realtime.bounds import POLICY
from infer.serve.realtime.protocol import ProtocolError

if TYPE_CHECKING:
    from infer.serve.server import Server

HEAD_SECONDS = 10.0
"""Seconds in which the head of a request has to come, from the connection or the last answer on."""

LINGER = 10.0
"""Seconds that a client has to take what a WebSocket was sent last, after its session's end."""

CLOSING = 1.0
"""Seconds that a client has to read why its WebSocket was closed for what it sent."""

PIECE = 1024
"""Bytes that are read at once: 170 empty frames."""

TURN, REST = 0.002, 4.0
"""Seconds for which one connection's bytes are read before others have their turn, and how many times as long it then waits."""


class Paced(asyncio.Protocol):
    """Reads what came a piece at a time, so that no connection takes more than a fifth of the loop's time by bytes that make
    no messages. Mixed into a protocol of uvicorn's, which reads a piece by its `data_received`."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pieces: deque[bytes] = deque()
        super().connection_made(transport)

    @property
    def reads(self) -> bool:
        """Whether more is wanted of the client."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        waiting = bool(self._pieces)
        self._pieces.extend(data[start : start + PIECE] for start in range(0, len(data), PIECE))
        if waiting:
            self.transport.pause_reading()
        else:
            self._advance()

    def _advance(self) -> None:
        began = perf_counter()
        while self._pieces and not self.transport.is_closing():
            super().data_received(self._pieces[0])
            if self._pieces:  # else it was closed
                self._pieces.popleft()
            spent = perf_counter() - began
            if self._pieces and spent > TURN:
                self.transport.pause_reading()
                self.loop.call_later(spent * REST, self._advance)
                return
        self._pieces.clear()
        if self.reads and not self.transport.is_closing():
            self.transport.resume_reading()


class HttpConnection(Paced, H11Protocol):
    """A connection with requests: it is closed where no head of one comes, and for another one where there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server: Server = self.config.app.state.server  # type: ignore[union-attr]
        self._idle, self._deadline = server.idle, None
        self._look()
        if len(self.connections) > server.settings.limits.connections:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def _look(self) -> None:
        """Whether it waits for a head."""
        busy = self not in self.connections or (self.cycle is not None and not self.cycle.response_complete)
        if busy and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._idle.pop(self, None)
        elif not busy and self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)
            self._idle[self] = None

    @property
    def reads(self) -> bool:
        return not self.flow.read_paused

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._pieces.clear()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._look()


class SocketConnection(Paced, WebSocketsSansIOProtocol):
    """A WebSocket's connection: too many frames or bytes end it, and who does not read gets no answers to his pings."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server: Server = self.config.app.state.server  # type: ignore[union-attr]
        self._traffic = Traffic(server.settings.limits)
        super().connection_made(transport)

    @property
    def reads(self) -> bool:
        return not self.read_paused and not self.disconnected

    def handle_events(self) -> None:
        try:
            self._traffic.need(len(self.conn.events), len(self._pieces[0]) if self._pieces else 0)
        except Denied as error:
            self._end(error)
        else:
            super().handle_events()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # the answers are dropped, instead of kept

    async def receive(self) -> Any:
        message = await super().receive()
        if self._pieces and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    def _end(self, error: Denied) -> None:
        """Close it as uvicorn does, but leave the client time to hear of it: nothing more is read meanwhile."""
        LOG.warning("a WebSocket was closed", extra={"fields": {"code": error.code, "reason": str(error)}})
        self._pieces.clear()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": POLICY, "reason": str(error)})
        with suppress(InvalidState):  # before it was accepted
            self.conn.send_text(json.dumps(ProtocolError(str(error), error.code, kind=error.kind).event()).encode())
        self.conn.fail(POLICY, str(error)[:120])
        self.close_sent, self.disconnected, self.read_paused = True, True, False
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.pause_reading()
        self.close_timer = self.loop.call_later(CLOSING, self.transport.abort)

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
