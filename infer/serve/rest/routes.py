"""The plain HTTP routes of the API, as OpenAI names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from infer.serve.rest.chat import Completions
from infer.serve.rest.client_secrets import make_secret
from infer.serve.rest.jobs import Jobs
from infer.serve.rest.models import add_models
from infer.serve.rest.speech import speak
from infer.serve.rest.transcriptions import transcribe

if TYPE_CHECKING:
    from infer.serve.server import Server


def add_rest(app: FastAPI, server: Server) -> None:
    """Add the routes to an application, which tells `Denied` and HTTP's own errors in OpenAI's form."""
    jobs = Jobs(server)
    add_models(app, server)
    jobs.add(app, "/v1/chat/completions", Completions().handle)
    jobs.add(app, "/v1/audio/transcriptions", transcribe)
    jobs.add(app, "/v1/audio/speech", speak)
    jobs.add(app, "/v1/realtime/client_secrets", make_secret)
