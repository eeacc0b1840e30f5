"""Errors of requests in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from fastapi.responses import JSONResponse

from infer.serve.logs import LOG
from infer.serve.realtime.protocol import LOST, Event, ProtocolError
from omni.engine.wire import EngineLost
from omni.errors import BusyError, RoomError, UserError

AGAIN = 2
"""Seconds after which a request that found no room may come again."""


class Failure(Exception):
    """A request that is not answered, or an answer that broke.

    Attributes:
        status: of HTTP.
        kind: `invalid_request_error`, `rate_limit_exceeded`, or `server_error`.
        code: for programs.
        param: the field that is wrong.
        again: seconds after which the same request may succeed; None where it will not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        again: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.kind, self.param, self.again = status, code, kind, param, again

    @property
    def body(self) -> Event:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = None if self.again is None else {"retry-after": str(self.again)}
        return JSONResponse(self.body, self.status, headers=headers)


def failure_of(error: Exception) -> Failure:
    """What a client is told of an error; one that is a fault of the server is logged."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, ProtocolError):
        return Failure(413 if error.code == "too_large" else 400, str(error), error.code, error.kind, error.param)
    if isinstance(error, BusyError):
        return Failure(429, str(error), "rate_limit_exceeded", "rate_limit_exceeded", again=AGAIN)
    if isinstance(error, EngineLost):
        return Failure(503, LOST, "engine_lost", "server_error", again=AGAIN)
    if isinstance(error, RoomError):
        return Failure(400, f"{str(error).partition(':')[0]}: send less", "context_length_exceeded")
    if isinstance(error, UserError):
        return Failure(400, str(error), "invalid_value")
    LOG.error("a request failed", exc_info=error)
    return Failure(500, f"the server failed ({type(error).__name__})", "server_error", "server_error")
