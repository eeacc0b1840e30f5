"""SessionBounds of one client's session, whatever carries it: how much comes, and how long it lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from infer.serve.keys import Denied, Keys, Quota
from infer.serve.realtime.protocol import ProtocolError
from infer.serve.realtime.session import RealtimeSession
from infer.serve.settings import ServerLimits

EXPIRED, POLICY = 1000, 1008
"""Close codes of WebSockets: a regular end, and a limit."""

LOOK = 5.0
"""Seconds between two looks at a session's limits."""


class Closed(Exception):
    """The server ends the session.

    Attributes:
        code, reason: of a WebSocket's close frame.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason[:120]


class SessionBounds:
    """Ends a session that does not keep to its limits; the client is told by an `error` event.

    Args:
        owner: of the key.
        sent_at: tells when an event was sent last, by `time.monotonic`.

    Attributes:
        came: when anything came last.
    """

    def __init__(
        self, session: RealtimeSession, keys: Keys, owner: str, limits: ServerLimits, sent_at: Callable[[], float]
    ) -> None:
        self._session, self._keys, self._owner, self._limits, self._sent_at = session, keys, owner, limits, sent_at
        self._began = self.came = time.monotonic()
        self._usage = Quota(limits)

    def count(self) -> None:
        """Count a message that was handled by the sound that it brought, or else as an event; Closed where it is too much."""
        self.came = time.monotonic()
        seconds, self._session.hearing.uncounted = self._session.hearing.uncounted, 0.0
        came = {"seconds": seconds} if seconds else {"events": 1}
        self._keys.usage[self._owner].count(False, **came)
        try:
            self._usage.count(**came)
        except Denied as error:
            self._session.send(ProtocolError(str(error), error.code, kind=error.kind).event())
            raise Closed(POLICY, str(error)) from None

    async def watch(self) -> None:
        """Raises Closed when the session lasts too long, or nothing happens in it."""
        while True:
            await asyncio.sleep(min(LOOK, self._limits.idle_seconds / 4, self._limits.session_seconds / 4))
            if self._session.hearing.uncounted:  # of a call, whose sound comes by a way of its own
                self.count()
            now = time.monotonic()
            if now - self._began > self._limits.session_seconds:
                minutes = self._limits.session_seconds / 60
                self._session.tell_error(
                    f"Your session hit the maximum duration of {minutes:g} minutes.", "session_expired", "invalid_request_error"
                )
                raise Closed(EXPIRED, "session_expired")
            if now - max(self.came, self._sent_at()) > self._limits.idle_seconds:
                self._session.tell_error("nothing came or went for too long", "session_idle_timeout", "invalid_request_error")
                raise Closed(EXPIRED, "idle")
