"""Turns errors into those that a client gets: whose mistake it is, what to do, and OpenAI's forms of it."""

from __future__ import annotations

from typing import Any

from infer.serve.realtime.protocol import LOST, Event, ProtocolError
from infer.serve.telemetry import LOG
from omni.engine.wire import EngineLost
from omni.errors import RoomError, UserError

ENGINE_PROBLEMS = ("this engine ", "this session ")
"""Beginnings of the engine's errors that are about itself, and not about its input."""


class Failure(Exception):
    """A request that is not answered, or an answer that broke.

    Attributes:
        status: of HTTP.
        code, error_type, param: as of `ProtocolError`; the type may be `rate_limit_exceeded`, too.
        retry: whether the same request may succeed later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        error_type: str = "invalid_request_error",
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.error_type, self.param, self.retry = status, code, error_type, param, retry

    @property
    def body(self) -> Event:
        return {"error": {"message": str(self), "type": self.error_type, "param": self.param, "code": self.code or None}}


class Denied(Failure):
    """A request without permission, or over a quota."""

    def __init__(self, status: int, code: str, message: str) -> None:
        error_type = {429: "rate_limit_exceeded", 503: "server_error"}.get(status, "invalid_request_error")
        super().__init__(status, message, code, error_type)


def failure_of(error: Exception) -> Failure:
    """The HTTP failure of an error; a fault of the server is logged."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, ProtocolError):
        return Failure(413 if error.code == "too_large" else 400, str(error), error.code, error.error_type, error.param)
    if isinstance(error, EngineLost):
        return Failure(503, LOST, "engine_lost", "server_error", retry=True)
    if isinstance(error, RoomError):
        return Failure(400, f"{str(error).partition(':')[0]}: send less", "context_length_exceeded")
    if isinstance(error, UserError):
        return Failure(400, str(error), "invalid_value")
    LOG.error("a request failed", exc_info=error)
    return Failure(500, f"the server failed ({type(error).__name__})", "server_error", "server_error")


def as_protocol_error(error: Exception) -> ProtocolError:
    """The Realtime error of an exception; the caller logs a fault of the server."""
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, Failure):
        return ProtocolError(str(error), error.code, error.param, error.error_type)
    if not isinstance(error, UserError):
        return ProtocolError(f"the server failed ({type(error).__name__})", "server_error", error_type="server_error")
    if str(error).startswith(ENGINE_PROBLEMS):
        return ProtocolError(str(error), "server_error", error_type="server_error")
    if isinstance(error, RoomError):
        message = f"instructions, {str(error).partition(':')[0]}: shorten instructions, history or question"
        return ProtocolError(message, "context_length_exceeded")
    return as_protocol_error(failure_of(error))


def broken(text: str | None, engine: Any) -> Exception:
    """The error of an answer that broke, by its text, on this engine."""
    if not engine.alive:
        return EngineLost(text)
    return ProtocolError(text or "the answer broke", "server_error", error_type="server_error")


def is_question_error(error: Exception | None) -> bool:
    """Whether an error of reading a question means that the model can never answer it."""
    if not isinstance(error, UserError) or isinstance(error, EngineLost):
        return False
    return as_protocol_error(error).code == "invalid_value"
