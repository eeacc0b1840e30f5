"""Turns errors into those that a client gets: whose mistake it is, and what to do."""

from __future__ import annotations

from typing import Any

from infer.serve.realtime.protocol import LOST, ProtocolError
from omni.errors import EngineLost, RoomError, UserError

ENGINE_PROBLEMS = ("this engine ", "this session ")
"""Beginnings of the engine's errors that are about itself, and not about its input."""


class Denied(ProtocolError):
    """A request without permission, or over a quota."""

    def __init__(self, status: int, code: str, message: str) -> None:
        error_type = {429: "rate_limit_exceeded", 503: "server_error"}.get(status, "invalid_request_error")
        super().__init__(message, code, error_type=error_type, status=status)


def server_error(message: str, code: str = "server_error", status: int = 500, retry: bool = False) -> ProtocolError:
    """An error that is no mistake of the client."""
    return ProtocolError(message, code, error_type="server_error", status=status, retry=retry)


def as_protocol_error(error: Exception) -> ProtocolError:
    """The error for a client; the caller logs one of status 500 without a client's mistake."""
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, EngineLost):
        return server_error(LOST, "engine_lost", 503, retry=True)
    if not isinstance(error, UserError):
        return server_error(f"the server failed ({type(error).__name__})")
    if str(error).startswith(ENGINE_PROBLEMS):
        return server_error(str(error))
    if isinstance(error, RoomError):
        message = f"instructions, {str(error).partition(':')[0]}: shorten instructions, history or question"
        return ProtocolError(message, "context_length_exceeded")
    return ProtocolError(str(error))


def broken(text: str | None, engine: Any) -> Exception:
    """The error of an answer that broke, by its text, on this engine."""
    return server_error(text or "the answer broke") if engine.alive else EngineLost(text)


def is_question_error(error: Exception | None) -> bool:
    """Whether an error of reading a question means that the model can never answer it."""
    return isinstance(error, UserError) and as_protocol_error(error).code == "invalid_value"
