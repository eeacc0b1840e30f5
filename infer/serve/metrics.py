"""Figures of the server for Prometheus: counts and times, and nothing of what people say."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


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
        self._engine = {
            name: Gauge(f"omni_engine_{name}", text, **named)
            for name, text in {
                "sessions": "Conversations that the engine holds",
                "active": "Answers under way",
                "live": "Answers under way that somebody hears",
                "waiting": "Questions that wait for room",
                "slots": "Rows of the cache",
                "free_slots": "Rows that nobody holds",
                "underruns": "Chunks of sound that were ready after they were due",
                "hearing_seconds": "Seconds spent on questions while their sound came",
                "lateness_p99_seconds": "99th percentile of lateness of the newest chunks, below zero early",
                "step_p50_seconds": "Median of the newest steps",
                "first_audio_p95_seconds": "95th percentile of the newest answers' first sound",
            }.items()
        }

    def endpointed(self, seconds: float | None) -> None:
        if seconds is not None:
            self.endpointing.observe(seconds)

    def answered(self, status: str, underruns: int) -> None:
        """Count an answer that ended with a status, and its gaps as it was sent."""
        self.answers.labels(status).inc()
        self.sent_underruns.inc(underruns)

    def page(self, stats: Any, restarts: int) -> bytes:
        """All figures in Prometheus's text format; `stats` of the engine, None while there is none."""
        self.restarts.set(restarts)
        if stats is not None:
            values = {
                "sessions": stats.sessions,
                "active": stats.active,
                "live": stats.live,
                "waiting": stats.waiting,
                "slots": stats.slots,
                "free_slots": stats.free,
                "underruns": stats.underruns,
                "hearing_seconds": stats.hearing,
                "lateness_p99_seconds": stats.lateness.p99,
                "step_p50_seconds": stats.step.p50,
                "first_audio_p95_seconds": stats.first_audio.p95,
            }
            for name, value in values.items():
                self._engine[name].set(float("nan") if value is None else value)
        return generate_latest(self.registry)
