"""The state that the routes share, the routes of the page and of operators, and the headers and bounds of every request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import WebSocketRoute

from infer.serve.host import EngineHost
from infer.serve.keys import LOOPBACK, Keys, check_origin, is_local, key_of
from infer.serve.realtime.configuration import Configuration, Voices, updated
from infer.serve.realtime.protocol import LOST, Denied, ProtocolError, as_protocol_error
from infer.serve.realtime.session import RealtimeSession
from infer.serve.realtime.state import Transport
from infer.serve.rest.answers import KeptAnswers
from infer.serve.settings import ServeSettings
from infer.serve.telemetry import LOG, Metrics
from infer.turns.vad import VoiceActivity
from omni.engine.stats import EngineStats
from omni.errors import UserError
from omni.generate.question import longest

VERSION = importlib.metadata.version("omni-speech")

PAGE = Path(__file__).parent / "page"

POLICY = (
    "default-src 'self'; connect-src 'self'; media-src 'self' blob:; img-src 'self' data:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: nothing from another host, no inline script."""

HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"permissions-policy", b"microphone=(self), camera=(), geolocation=()"),
    (b"cache-control", b"no-cache"),
)

HSTS = ((b"strict-transport-security", b"max-age=31536000"),)

REALTIME = "/v1/realtime"  # path of the server's only WebSockets
STATS_WAIT = 2.0  # seconds that the engine has to tell its figures before it counts as stuck
RETRY_SECONDS = 2  # seconds after which a request that found no room may come again


@dataclass(eq=False)
class Server:
    """State that the routes share: engine, keys, open sessions, figures."""

    host: EngineHost
    settings: ServeSettings
    keys: Keys
    voices: Voices
    metrics: Metrics = field(default_factory=Metrics)
    vad: VoiceActivity = field(default_factory=VoiceActivity)
    sessions: dict[str, RealtimeSession] = field(default_factory=dict)  # the open Realtime sessions, by their ids
    requests: Counter[str] = field(default_factory=Counter)  # HTTP requests under way, by the owners of their keys
    coming: Counter[str] = field(default_factory=Counter)  # those whose bodies are still coming
    kept: KeptAnswers = field(default_factory=KeptAnswers)  # spoken answers that later requests may refer to
    draining: bool = False  # no new session is taken
    idle: dict[Any, None] = field(default_factory=dict)  # connections without a request, the oldest first

    def admit(self, headers: Any, protocols: list[str]) -> tuple[str, Any]:
        """The owner of a request's key, and its secret's configuration; Denied where it is not let in."""
        check_origin(headers, self.settings.origins, not self.keys.needed)
        owner, session = self.keys.owner(key_of(headers, protocols))
        self.keys.usage[owner].count(events=1)
        return owner, session

    @property
    def answering(self) -> int:
        """Answers that somebody hears or waits for."""
        return self.requests.total() + sum(session.responses.playing for session in self.sessions.values())

    def begin(self, carrier: str, owner: str, transport: Transport, changes: Mapping[str, Any], omni: bool) -> RealtimeSession:
        """A new session of a key's owner; Denied where none is taken, ProtocolError where it cannot have this configuration."""
        if self.draining:
            raise Denied("this server ends; connect again", "server_shutting_down", status=503)
        if not self.host.alive:
            raise Denied(LOST, "engine_lost", status=503)
        if len(self.sessions) >= self.settings.limits.sessions:
            raise Denied("this server has as many sessions as it takes; try again", "session_limit_reached", status=429)
        configuration = updated(Configuration(), dict(changes), started=False)
        session = RealtimeSession(
            self.host, self.settings, self.voices, self.vad, self.metrics, transport, configuration, wants_omni=omni
        )
        self.keys.enter(owner)
        self.sessions[session.id] = session
        self.metrics.sessions.labels(carrier).inc()
        LOG.info("session began", extra={"fields": {"session": session.id, "transport": carrier, "owner": owner}})
        return session

    def end(self, carrier: str, owner: str, session: RealtimeSession, reason: str) -> None:
        """Count a session no longer."""
        self.keys.sessions -= Counter((owner,))
        del self.sessions[session.id]
        self.metrics.sessions.labels(carrier).dec()
        LOG.info("session ended", extra={"fields": {"session": session.id, "reason": reason}})

    def lost(self) -> None:
        """Tell every session that the engine was lost."""
        for session in list(self.sessions.values()):
            session.tell_error(LOST)


def logged(error: Exception) -> ProtocolError:
    """The error for a client; a fault of the server is logged."""
    if not isinstance(error, (ProtocolError, UserError)):
        LOG.error("a request failed", exc_info=error)
    return as_protocol_error(error)


def response_of(error: ProtocolError) -> JSONResponse:
    """The response to a request that is not answered."""
    headers = {"retry-after": str(RETRY_SECONDS)} if error.retry else None
    return JSONResponse(error.body, error.status, headers=headers)


@dataclass(eq=False)
class Headers:
    """Adds headers to every answer of an ASGI application."""

    app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1")
        by_tls = scope.get("scheme") == "https" and not is_local(host)  # other servers of this machine are `localhost` too

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS, *HSTS * by_tls]
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


async def refuse_elsewhere(socket: WebSocket) -> None:
    """Answers WebSockets at other places than the API's."""
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        message = f"there is no WebSocket at {socket.scope['path'][:80]!r}; connect to {REALTIME}"
        await socket.send_denial_response(response_of(ProtocolError(message, "", status=404)))
    else:
        await socket.close(1008, f"connect to {REALTIME}")


def add_web(app: FastAPI, server: Server) -> None:
    """Add the routes of this file to an application."""

    @app.get("/page/config.json")
    async def page_config() -> dict[str, Any]:
        """The configuration of the page, which it reads before it connects."""
        return {
            "model": server.voices.model,
            "is_shipped": server.settings.is_shipped,
            "needs_key": server.keys.needed,
            "voices": ["default", *server.voices.adapters],
            "speaks": server.voices.speaks,
            "tasks": ["answer", "transcribe"],
            "max_seconds": longest(server.host.engine.config),
            "version": VERSION,
        }

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.router.routes.append(WebSocketRoute("/{path:path}", refuse_elsewhere))
    app.mount("/page", StaticFiles(directory=PAGE), name="page")

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        """The server's process answers."""
        return {"status": "ok"}

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        """Whether a new session would be served: 503 with the reasons where it would not."""
        reasons = await unready(server)
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus, for this machine alone."""
        headers = request.headers
        near = request.client is not None and request.client.host in LOOPBACK and is_local(headers.get("host", ""))
        forwarded = "x-forwarded-for" in headers or "forwarded" in headers
        foreign = "origin" in headers and headers["origin"].partition("://")[2] != headers.get("host")
        if not near or forwarded or foreign:
            return response_of(ProtocolError("metrics are for this machine, by the name of localhost", "", status=403))
        page = server.metrics.page(await engine_stats(server), server.host.restarts)
        return Response(page, media_type=CONTENT_TYPE_LATEST)


async def engine_stats(server: Server) -> EngineStats | None:
    """The engine's figures; None where it does not answer."""
    with contextlib.suppress(UserError, asyncio.TimeoutError):
        return await asyncio.wait_for(asyncio.to_thread(server.host.stats), STATS_WAIT)
    return None


async def unready(server: Server) -> list[str]:
    """Why no new session would be served."""
    reasons = ["draining"] if server.draining else []
    if len(server.sessions) >= server.settings.limits.sessions:
        reasons.append("full")
    if server.requests.total() >= server.settings.limits.sessions:
        reasons.append("full of requests")
    if not server.host.alive:
        return [*reasons, "the engine is being started"]
    if (stats := await engine_stats(server)) is None:
        return [*reasons, "the engine does not answer"]
    if server.host.stuck(stats):
        reasons.append("the stepping thread is stuck")
    return reasons
