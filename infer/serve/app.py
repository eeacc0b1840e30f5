"""The server's application: its routes, and what begins and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse

from infer.serve.host import EngineHost
from infer.serve.keys import Denied, Keys, check_origin, key_of
from infer.serve.logs import LOG
from infer.serve.metrics import Metrics
from infer.serve.realtime.configuration import Configuration, Voices, updated
from infer.serve.realtime.protocol import ProtocolError
from infer.serve.realtime.session import RealtimeSession
from infer.serve.realtime.vad import VoiceActivity
from infer.serve.realtime.websocket import INTERNAL, POLICY, TRY_AGAIN, SocketSession, SocketTransport, refuse
from infer.serve.settings import ServeSettings
from infer.serve.web import Headers, add_web

THREADS = 64
"""Threads for what waits for the engine's process."""


@dataclass(eq=False)
class Server:
    """What the routes share.

    Attributes:
        sessions: the open Realtime sessions, by their ids.
        draining: no new session is taken.
    """

    host: EngineHost
    settings: ServeSettings
    keys: Keys
    voices: Voices
    metrics: Metrics = field(default_factory=Metrics)
    vad: VoiceActivity = field(default_factory=VoiceActivity)
    sessions: dict[str, RealtimeSession] = field(default_factory=dict)
    draining: bool = False

    def admit(self, headers: Any, protocols: list[str]) -> tuple[str, Any]:
        """The owner of a request's key, and its secret's configuration; Denied where it is not let in."""
        check_origin(headers, self.settings.origins, not self.keys.needed)
        owner, session = self.keys.owner(key_of(headers, protocols))
        self.keys.use_event(owner)
        return owner, session

    @property
    def full(self) -> bool:
        return self.draining or len(self.sessions) >= self.settings.limits.sessions

    def begin(self, transport: Any, given: Any, wants_omni: bool) -> RealtimeSession:
        """A new session; ProtocolError where the configuration that it begins with cannot be."""
        configuration = updated(Configuration(), dict(given), started=False) if given else None
        session = RealtimeSession(
            self.host, self.settings, self.voices, self.vad, self.metrics, transport, configuration, wants_omni
        )
        self.sessions[session.id] = session
        return session

    def lost(self, reason: str) -> None:
        """Tell every session that the engine was lost."""
        for session in list(self.sessions.values()):
            session.tell_error(f"the engine was lost and is started again; ask again in some seconds ({reason})")


def create_app(host: EngineHost, settings: ServeSettings, keys: tuple[str, ...] = ()) -> FastAPI:
    """The application over an engine that was opened.

    Args:
        keys: of those who may connect; none: whoever reaches it may.
    """
    engine = host.engine
    server = Server(
        host, settings, Keys(keys, settings.limits), Voices(settings.adapters, settings.model, engine.codec is not None)
    )

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS, "omni-serve"))
        host.on_lost.append(server.lost)
        watching = asyncio.create_task(host.watch())
        yield
        watching.cancel()

    app = FastAPI(title="Omni", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    app.state.server = server
    app.add_middleware(Headers, most=settings.limits.body_bytes)
    add_web(app, server)

    @app.exception_handler(Denied)
    async def denied(request: Request, error: Denied) -> JSONResponse:
        server.metrics.refused.labels(error.code).inc()
        kind = "invalid_request_error" if error.status < 429 else "rate_limit_exceeded"
        told = {"message": str(error), "type": kind, "code": error.code, "param": None}
        return JSONResponse({"error": told}, error.status)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await _serve_socket(server, socket)

    return app


async def _serve_socket(server: Server, socket: WebSocket) -> None:
    """One WebSocket of `/v1/realtime`."""
    limits, protocols = server.settings.limits, socket.scope.get("subprotocols", [])
    try:
        owner, given = server.admit(socket.headers, protocols)
        if server.full:
            raise Denied(429, "session_limit_reached", "this server has as many sessions as it takes; try again")
        server.keys.enter(owner)
    except Denied as error:
        server.metrics.refused.labels(error.code).inc()
        await refuse(socket, error, TRY_AGAIN if error.status == 429 else POLICY)
        return
    transport = SocketTransport(socket, limits.unread_bytes)
    session: RealtimeSession | None = None
    try:
        await socket.accept("realtime" if "realtime" in protocols else None)
        kind = {"type": "transcription"} if socket.query_params.get("intent") == "transcription" else {}
        session = server.begin(transport, {**kind, **given}, socket.query_params.get("omni") == "1")
        session.log.info("session began", fields={"transport": "websocket", "owner": owner})
        server.metrics.sessions.labels("websocket").inc()
        await SocketSession(socket, transport, session, server.keys, owner, limits).run()
    except ProtocolError as error:
        await socket.close(POLICY, str(error)[:120])
    except Exception:
        LOG.exception("a socket failed")
        with contextlib.suppress(Exception):
            await socket.close(INTERNAL)
    finally:
        server.keys.leave(owner)
        if session is not None:
            del server.sessions[session.id]
            server.metrics.sessions.labels("websocket").dec()
            session.log.info("session ended")
