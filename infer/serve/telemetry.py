"""Logs, one JSON object a line with the session's id, and figures for Prometheus; nothing of what anybody says."""

from __future__ import annotations

import json
import logging
import sys
import time
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LOG = logging.getLogger("infer.serve")

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)

ENGINE = {
    "sessions": ("Conversations that the engine holds", "sessions"),
    "active": ("Answers under way", "active"),
    "live": ("Answers under way that somebody hears", "live"),
    "waiting": ("Questions that wait for room", "waiting"),
    "slots": ("Rows of the cache", "slots"),
    "free_slots": ("Rows that nobody holds", "free"),
    "underruns": ("Chunks of sound that were ready after they were due", "underruns"),
    "hearing_seconds": ("Seconds spent on questions while their sound came", "hearing"),
    "lateness_p99_seconds": ("99th percentile of the newest chunks' lateness, below zero early", "lateness.p99"),
    "step_p50_seconds": ("Median of the newest steps", "step.p50"),
    "first_audio_p95_seconds": ("95th percentile of the newest answers' first sound", "first_audio.p95"),
}
"""Gauges of the engine: help text, and attribute of `EngineStats`."""


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


def quieted(record: logging.LogRecord) -> bool:
    """Filters uvicorn's records, some of which any client can cause at will; returns whether one is logged.

    A text that is not UTF-8 becomes a warning without a traceback; a WebSocket refused by an HTTP status, which uvicorn
    takes for an unfinished handshake, is dropped.
    """
    text = record.getMessage()
    if text.startswith("Invalid UTF-8"):
        record.msg, record.args, record.exc_info = "a client sent a text that is no UTF-8", (), None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return not text.startswith("ASGI callable returned without completing handshake")


def write_logs() -> None:
    """Have the server's logs, and warnings of its libraries, written to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    LOG.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").addFilter(quieted)
    logging.getLogger("omni").setLevel(logging.WARNING)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": registry}
        self.sessions = Gauge("omni_sessions", "Open Realtime sessions", ["transport"], **named)
        self.refused = Counter("omni_refused", "Connections and requests that were refused", ["reason"], **named)
        self.errors = Counter("omni_errors", "Error events, by code", ["code"], **named)
        self.answers = Counter("omni_answers", "Answers, by how they ended", ["status"], **named)
        self.first = Histogram(
            "omni_first_audio_seconds", "From a question that is whole to its first sound", buckets=SECONDS, **named
        )
        self.endpointing = Histogram(
            "omni_endpointing_seconds", "From the end of speech to the commit of its turn", buckets=SECONDS, **named
        )
        self.sent_underruns = Counter("omni_sent_underruns", "Gaps in sound as it was sent", **named)
        self.restarts = Gauge("omni_engine_restarts", "How often the engine was started again", **named)
        self.requests = Counter("omni_requests", "Requests besides Realtime", ["path", "status"], **named)
        self._engine = {name: Gauge(f"omni_engine_{name}", text, **named) for name, (text, _) in ENGINE.items()}

    def page(self, stats: Any, restarts: int) -> bytes:
        """All figures in Prometheus's text format; `stats` of the engine, None while there is none."""
        self.restarts.set(restarts)
        if stats is not None:
            for name, (_, attribute) in ENGINE.items():
                value = attrgetter(attribute)(stats)
                self._engine[name].set(float("nan") if value is None else value)
        return generate_latest(self.registry)
