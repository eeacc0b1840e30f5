"""Structured logs: one JSON object a line, with the session's id; never what anybody says."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any

LOG = logging.getLogger("infer.serve")


class JsonFormatter(logging.Formatter):
    """Time, level, message, and what a record brings besides (`extra={"fields": {...}}`)."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class SessionLog(logging.LoggerAdapter[logging.Logger]):
    """The log of one session."""

    def __init__(self, session: str) -> None:
        super().__init__(LOG, {})
        self._session = session

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        fields = {"session": self._session, **kwargs.pop("fields", {})}
        return msg, {**kwargs, "extra": {"fields": fields}}


def quieted(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn's is worth a line, which it makes short: any client can cause some of its errors at will.

    A text that is no UTF-8 is a warning without a traceback; a WebSocket that was refused with a status of HTTP, which uvicorn
    takes for one that was forgotten, is nothing.
    """
    text = record.getMessage()
    if text.startswith("Invalid UTF-8"):
        record.msg, record.args, record.exc_info = "a client sent a text that is no UTF-8", (), None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return not text.startswith("ASGI callable returned without completing handshake")


def write_logs(level: str = "info") -> None:
    """Have the server's logs, and warnings of its libraries, written to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    LOG.setLevel(level.upper())
    logging.getLogger("uvicorn.error").addFilter(quieted)
    logging.getLogger("omni").setLevel(logging.WARNING)
