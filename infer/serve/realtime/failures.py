"""What a client is told of an error: whose mistake it is, and what to do."""

from __future__ import annotations

from typing import Any

from infer.serve.realtime.protocol import LOST, ProtocolError
from infer.serve.rest.errors import failure_of
from omni.engine.wire import EngineLost
from omni.errors import BusyError, RoomError, UserError

OURS = ("this engine ", "this session ")
"""How errors of the engine begin that are about itself, and not about what it was given."""


def told_of(error: Exception) -> ProtocolError:
    """An error as its client is told; whoever caught it logs what is a fault of the server."""
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, EngineLost):
        return ProtocolError(LOST, "engine_lost", kind="server_error")
    if not isinstance(error, UserError):
        return ProtocolError(f"the server failed ({type(error).__name__})", "server_error", kind="server_error")
    if str(error).startswith(OURS):
        return ProtocolError(str(error), "server_error", kind="server_error")
    if isinstance(error, RoomError):
        message = f"instructions, {str(error).partition(':')[0]}: shorten instructions, history or question"
        return ProtocolError(message, failure_of(error).code)
    failure = failure_of(error)
    return ProtocolError(str(failure), failure.code, failure.param, failure.kind)


def broken(text: str | None, engine: Any) -> Exception:
    """The error of an answer that broke, by its text, on this engine."""
    if not getattr(engine, "alive", True):
        return EngineLost(text)
    return ProtocolError(text or "the answer broke", "server_error", kind="server_error")


def is_of_the_question(error: Exception | None) -> bool:
    """Whether an error that came while a question was read says that no answer can ever be had to it."""
    if not isinstance(error, UserError) or isinstance(error, (BusyError, EngineLost)):
        return False
    return told_of(error).code == "invalid_value"
