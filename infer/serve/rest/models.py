"""`/v1/models`: the one model of the server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from infer.serve.realtime.protocol import Event
from infer.serve.rest.errors import Failure

if TYPE_CHECKING:
    from infer.serve.server import Server

OWNER = "omni"


def add_models(app: FastAPI, server: Server) -> None:
    """Add the routes that tell of the model. Requests for answers may name any model; this one answers."""
    shown: Event = {"id": server.voices.model, "object": "model", "created": int(time.time()), "owned_by": OWNER}

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
        return Failure(404, message, "model_not_found", param="model").response()
