"""`/v1/realtime/client_secrets`: short-lived keys for browsers, each with the configuration that its session begins with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from infer.serve.keys import LONGEST_SECRET, SECRET, Denied
from infer.serve.realtime.configuration import Configuration, shown, updated
from infer.serve.realtime.protocol import new_id
from infer.serve.rest.jobs import Job

LARGEST = 256 * 1024
"""Bytes of a request: the server keeps its configuration for as long as the secret is valid."""


class ExpiresAfter(BaseModel):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=LONGEST_SECRET)] = 600


class SecretRequest(BaseModel):
    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


async def make_secret(job: Job) -> Response:
    """Answers a request; Denied where a client secret asks for another one, which would prolong it."""
    if job.key.startswith(SECRET):
        raise Denied(403, "insufficient_permissions", "a client secret makes no secrets; use the key")
    body = await job.read(SecretRequest, most=LARGEST)
    given, server = body.session or {}, job.server
    configuration = updated(Configuration(), given, started=False)
    seconds = (body.expires_after or ExpiresAfter()).seconds
    value, expires = server.keys.make_secret(job.owner, given, seconds)
    session = shown(configuration, server.voices, new_id("sess"), expires)
    return JSONResponse({"value": value, "expires_at": expires, "session": session})
