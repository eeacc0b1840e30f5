"""What clients may use: the one place that counts it, for connections, sessions and keys."""

from __future__ import annotations

from time import monotonic

from infer.serve.settings import ServerLimits


class Denied(Exception):
    """Whoever asks may not.

    Attributes:
        status: of HTTP: 401, 403, 429 or 503.
        code: for programs; kind: of the error, as OpenAI has it.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        kinds = {429: "rate_limit_exceeded", 503: "server_error"}
        self.kind = kinds.get(status, "invalid_request_error")


class Allowance:
    """So much may be used at once, and it comes again evenly within a number of seconds (a token bucket).

    Args:
        told: what a client is told that has used it up.
    """

    def __init__(self, most: float, seconds: float, told: str, code: str = "rate_limit_exceeded") -> None:
        self._most, self._rate, self._told, self._code = most, most / seconds, told, code
        self._left, self._at = most, monotonic()

    def use(self, amount: float) -> None:
        """Use some of it, or all that is left."""
        self._left = max(self._now() - amount, 0.0)

    def need(self, amount: float = 1.0) -> None:
        """Use some of it; Denied where there is not enough."""
        if amount > self._now():
            raise Denied(429, self._code, self._told)
        self._left -= amount

    def _now(self) -> float:
        now = monotonic()
        self._left, self._at = min(self._left + (now - self._at) * self._rate, self._most), now
        return self._left


class Traffic:
    """What one connection may bring.

    Attributes:
        frames: of a WebSocket, whatever is in them, or messages of a call; size: bytes of them.
    """

    def __init__(self, limits: ServerLimits) -> None:
        frames, size = limits.session_frames, limits.session_bytes
        self.frames = Allowance(frames, 10, f"more than {frames:,} frames came within 10 s")
        self.size = Allowance(size, 60, f"more than {size:,} bytes came within a minute")

    def need(self, frames: int, size: int) -> None:
        """Count what came; Denied where it is too much."""
        self.frames.need(frames)
        self.size.need(size)


class Usage:
    """What a session or a key may use.

    Attributes:
        events: without sound, and requests; seconds: of sound.
    """

    def __init__(self, events: int, seconds: float) -> None:
        self.events = Allowance(events, 60, f"more than {events:,} events and requests came within a minute; wait")
        told = f"more than {seconds:g} s of sound came within an hour; wait"
        self.seconds = Allowance(seconds, 3600, told, "insufficient_quota")
