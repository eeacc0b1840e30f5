"""The page, its settings, and what operators look at: health, readiness, metrics; and the headers of every answer."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from infer.serve.keys import LOOPBACK
from omni.errors import UserError
from omni.generate.question import longest

if TYPE_CHECKING:
    from infer.serve.server import Server

VERSION = importlib.metadata.version("omni-speech")

PAGE = Path(__file__).parent / "page"

POLICY = (
    "default-src 'self'; connect-src 'self' ws: wss:; media-src 'self' blob:; img-src 'self' data:; worker-src 'self' blob:; "
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

STATS_WAIT = 2.0
"""Seconds that the engine has to tell its figures before it counts as stuck."""


class Headers:
    """Adds headers to every answer of an ASGI application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


def add_web(app: FastAPI, server: Server) -> None:
    """Add the routes of this file to an application."""

    @app.get("/page/config.json")
    async def page_config() -> dict[str, Any]:
        """What the page shows before it connects."""
        return {
            "model": server.voices.model,
            "needs_key": server.keys.needed,
            "voices": list(server.voices.names),
            "speaks": server.voices.speaks,
            "tasks": ["answer", "transcribe"],
            "max_seconds": longest(server.host.engine.config),
            "version": VERSION,
        }

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/page", StaticFiles(directory=PAGE), name="page")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The server's process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether a new session would be served: 503 with the reasons where it would not."""
        reasons = await unready(server)
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus, for this machine alone."""
        near = request.client is not None and request.client.host in LOOPBACK
        if not near or "x-forwarded-for" in request.headers or "forwarded" in request.headers:
            return JSONResponse({"error": {"message": "metrics are for this machine", "type": "invalid_request_error"}}, 403)
        try:
            stats = await asyncio.wait_for(asyncio.to_thread(server.host.stats), STATS_WAIT)
        except (UserError, asyncio.TimeoutError):
            stats = None
        return Response(server.metrics.page(stats, server.host.restarts), media_type=CONTENT_TYPE_LATEST)


async def unready(server: Server) -> list[str]:
    """Why no new session would be served."""
    reasons = ["draining"] if server.draining else []
    if len(server.sessions) >= server.settings.limits.sessions:
        reasons.append("full")
    if not server.host.alive:
        return [*reasons, "the engine is being started"]
    try:
        stats = await asyncio.wait_for(asyncio.to_thread(server.host.stats), STATS_WAIT)
    except (UserError, asyncio.TimeoutError):
        return [*reasons, "the engine does not answer"]
    if server.host.stuck(stats):
        reasons.append("the stepping thread is stuck")
    return reasons
