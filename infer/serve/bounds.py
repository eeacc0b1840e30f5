"""How much a client may send, and how long its session may last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, NamedTuple

from infer.serve.realtime.protocol import Denied
from infer.serve.realtime.session import RealtimeSession
from infer.serve.settings import ServerLimits

EXPIRED, POLICY = 1000, 1008  # close codes of WebSockets: a regular end, and a limit
LOOK = 5.0  # seconds between two looks at a session's limits


class Quota:
    """Counts frames, bytes, events and seconds of sound of one connection with its session, or of all of a `key`; what is
    left of each is refilled evenly."""

    def __init__(self, limits: ServerLimits, key: bool = False) -> None:
        events, seconds = limits.key_events, limits.key_audio_seconds
        if not key:
            events, seconds = min(events, limits.session_events), min(seconds, limits.session_audio_seconds)
        self._most: dict[str, tuple[float, float, str, str]] = {
            "frames": (limits.session_frames, 10, "frames within 10 s", "rate_limit_exceeded"),
            "bytes": (limits.session_bytes, 60, "bytes within a minute", "rate_limit_exceeded"),
            "events": (events, 60, "events and requests within a minute", "rate_limit_exceeded"),
            "seconds": (seconds, 3600, "seconds of sound within an hour", "insufficient_quota"),
        }
        self._left = {name: (most, monotonic()) for name, (most, *_) in self._most.items()}

    def count(self, denies: bool = True, **amounts: float) -> None:
        """Count amounts by name, of each at most what is left; with `denies`, Denied where that is not enough."""
        now = monotonic()
        for name, amount in amounts.items():
            most, period, unit, code = self._most[name]
            left, at = self._left[name]
            left = min(left + (now - at) * most / period, most)
            if denies and amount > left:
                raise Denied(f"more than {most:,.0f} {unit}; wait", code, status=429)
            self._left[name] = max(left - amount, 0.0), now


class Closed(NamedTuple):
    """Why the server ends a session: the code and reason of a WebSocket's close frame."""

    code: int
    reason: str


class SessionBounds:
    """Ends a session that does not keep to its limits; the client is told by an `error` event. `came`: when anything came."""

    def __init__(self, session: RealtimeSession, key_usage: Quota) -> None:
        self._session, self._key_usage, self._limits = session, key_usage, session.settings.limits
        self._began = self.came = monotonic()
        self._usage = Quota(self._limits)

    async def serve(self, receive: Callable[[], Awaitable[str | bytes | None]], *ends: asyncio.Future[Any]) -> Closed:
        """Handle a client's messages, one after another, until one of them is None, a limit is passed, or a future is done,
        whose result may be a Closed; returns why."""
        self._session.begin()
        tasks = [asyncio.create_task(self._read(receive)), asyncio.create_task(self._watch())]
        try:
            done, _ = await asyncio.wait([*tasks, *ends], return_when=asyncio.FIRST_COMPLETED)
            return next((end for future in done if isinstance(end := future.result(), Closed)), Closed(EXPIRED, ""))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, receive: Callable[[], Awaitable[str | bytes | None]]) -> Closed | None:
        while (message := await receive()) is not None:
            await self._session.handle(message)
            if (closed := self.count()) is not None:
                return closed
        return None

    def count(self) -> Closed | None:
        """Count a message that was handled by the sound that it brought, or else as an event; Closed where it is too much."""
        self.came = monotonic()
        seconds, self._session.hearing.uncounted = self._session.hearing.uncounted, 0.0
        came = {"seconds": seconds} if seconds else {"events": 1}
        self._key_usage.count(False, **came)
        try:
            self._usage.count(**came)
        except Denied as error:
            self._session.send(error.event())
            return Closed(POLICY, str(error)[:120])
        return None

    async def _watch(self) -> Closed:
        """Why the session ends, once it lasts too long, or nothing happens in it."""
        session, limits = self._session, self._limits
        while True:
            await asyncio.sleep(min(LOOK, limits.idle_seconds / 4, limits.session_seconds / 4))
            # of a call, whose sound comes by a way of its own
            if session.hearing.uncounted and (closed := self.count()) is not None:
                return closed
            now = monotonic()
            if now - self._began > limits.session_seconds:
                message = f"Your session hit the maximum duration of {limits.session_seconds / 60:g} minutes."
                session.tell_error(message, "session_expired", 400)
                return Closed(EXPIRED, "session_expired")
            if now - max(self.came, session.transport.sent_at) > limits.idle_seconds:
                session.tell_error("nothing came or went for too long", "session_idle_timeout", 400)
                return Closed(EXPIRED, "idle")
