"""The server's application: its routes, as OpenAI names them, and what begins and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.routing import WebSocketRoute

from infer.serve.host import EngineHost
from infer.serve.keys import LONGEST_SECRET, SECRET, Keys
from infer.serve.realtime.configuration import Configuration, Voices, shown, updated
from infer.serve.realtime.protocol import Denied, Event, ProtocolError, as_protocol_error, new_id
from infer.serve.realtime.webrtc import PATH, Calls
from infer.serve.realtime.websocket import serve_socket
from infer.serve.rest.audio import speak, transcribe
from infer.serve.rest.chat import complete
from infer.serve.rest.jobs import Job, add_job
from infer.serve.server import REALTIME, Headers, Server, add_web, response_of
from infer.serve.settings import ServeSettings
from omni.errors import EngineLost

THREADS = 64  # threads for what waits for the engine's process
LARGEST = 256 * 1024  # bytes of a request for a client secret, which is compressed: each session of it unpacks all


def create_app(host: EngineHost, settings: ServeSettings, keys: tuple[str, ...] = ()) -> FastAPI:
    """The application over an engine that was opened; `keys` are of those who may connect, none: whoever reaches it may."""
    engine = host.engine
    server = Server(
        host, settings, Keys(keys, settings.limits), Voices(settings.adapters, settings.model, engine.codec is not None)
    )

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS, "omni-serve"))
        watching = asyncio.create_task(host.watch(server.lost))
        yield
        await calls.close()
        watching.cancel()

    app = FastAPI(
        title="Omni",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=life,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False},
    )
    app.state.server = server
    app.add_middleware(Headers)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Location"],
        )

    app.router.routes.append(WebSocketRoute(REALTIME, partial(serve_socket, server)))
    add_web(app, server)
    add_models(app, server)
    calls = Calls(server)
    add_job(app, server, PATH, calls.create)
    app.add_api_route(PATH + "/{call_id}/hangup", calls.hang_up, methods=["POST"], response_model=None)
    add_job(app, server, "/v1/chat/completions", complete)
    add_job(app, server, "/v1/audio/transcriptions", transcribe)
    add_job(app, server, "/v1/audio/speech", speak)
    add_job(app, server, "/v1/realtime/client_secrets", make_secret)

    @app.exception_handler(HTTPException)
    @app.exception_handler(EngineLost)
    @app.exception_handler(Denied)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        """Tells an error in OpenAI's form."""
        if isinstance(error, HTTPException):
            response = response_of(ProtocolError(str(error.detail), "", status=error.status_code))
            response.headers.update(error.headers or {})
            return response
        if isinstance(error, Denied):
            server.metrics.refused.labels(error.code).inc()
        return response_of(as_protocol_error(error))

    return app


class ExpiresAfter(BaseModel):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=LONGEST_SECRET)] = 600


class SecretRequest(BaseModel):
    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


async def make_secret(job: Job) -> Response:
    """Answers a request; Denied where a client secret asks for another one, which would prolong it."""
    if job.key.startswith(SECRET):
        raise Denied("a client secret makes no secrets; use the key", "insufficient_permissions", status=403)
    body = await job.read(SecretRequest, most=LARGEST)
    requested, server = body.session or {}, job.server
    configuration = updated(Configuration(), requested, started=False)
    seconds = (body.expires_after or ExpiresAfter()).seconds
    value, expires = server.keys.make_secret(job.owner, requested, seconds)
    session = shown(configuration, server.voices, new_id("sess"), expires)
    return JSONResponse({"value": value, "expires_at": expires, "session": session})


def add_models(app: FastAPI, server: Server) -> None:
    """Add the routes that tell of the model. Requests for answers may name any model; this one answers."""
    shown: Event = {"id": server.voices.model, "object": "model", "created": int(time.time()), "owned_by": "omni"}

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Event:
        server.admit(request.headers, [])
        return {"object": "list", "data": [shown]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        server.admit(request.headers, [])
        if name == server.voices.model:
            return JSONResponse(shown)
        message = f"the model {name[:80]!r} does not exist; this server has {server.voices.model!r}"
        return response_of(ProtocolError(message, "model_not_found", "model", status=404))
