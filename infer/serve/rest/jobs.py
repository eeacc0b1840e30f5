"""Requests under way: whom they are from, how many there are, and what ends with them.

admit --> begin --> read the body --> enter --> ask --> a whole response, or a stream --> end: the engine's session is closed

Only a request whose body has come takes one of the server's places; those whose bodies are coming are counted apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from infer.serve.keys import key_of
from infer.serve.realtime.protocol import COSTLY, Denied, Event, ProtocolError, check_costly, first_mistake, read_json
from infer.serve.rest.answers import begun, unbroken
from infer.serve.server import Server, logged, response_of
from infer.serve.telemetry import LOG
from omni.engine.answer import Pace
from omni.errors import UserError
from omni.generate.answer_stream import AnswerStream, joined
from omni.generate.results import Ended
from omni.generate.results import Event as Output

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

BODY_SECONDS, BODY_PAUSE = 120.0, 30.0  # seconds in which a request's body has to come, and those in which more of it has to
GONE = 499  # status of a request whose client went away, for the figures alone
FIELDS = 64  # most fields of a form, besides its file

Handler = Callable[["Job"], Awaitable[Response]]


def add_job(app: FastAPI, server: Server, path: str, handle: Handler) -> None:
    """Answer POST requests of a path."""

    async def endpoint(request: Request) -> Response:
        owner, secret = server.admit(request.headers, [])
        since = time.monotonic()
        response = await Job(server, request, owner, secret).respond(handle)
        status = response.status_code
        server.metrics.requests.labels(path, str(status)).inc()
        seconds = round(time.monotonic() - since, 3)
        LOG.info("request", extra={"fields": {"path": path, "status": status, "seconds": seconds, "owner": owner}})
        return response

    app.add_api_route(path, endpoint, methods=["POST"], response_model=None)


class Job:
    """One request under way, whose body is still to come; `session` is the engine's, once something was asked.

    Attributes:
        key: that it brought, "" for none; `secret`, the configuration of a client secret.
    """

    def __init__(self, server: Server, request: Request, owner: str, secret: Mapping[str, Any]) -> None:
        self.server, self.owner, self.secret = server, owner, secret
        self.key = key_of(request.headers) or ""
        self.session: Any = None
        self._over, self._counted = False, server.coming
        self.request = Request(request.scope, self._receive)
        self._came, self._bytes = request.receive, 0
        self._counted[owner] += 1

    async def respond(self, handle: Handler) -> Response:
        """The response; what `handle` raises is told in OpenAI's form, but `Denied`, which the application tells."""
        response: Response | None = None
        try:
            self._check_room()
            most = self.server.settings.limits.key_sessions
            if self.server.coming[self.owner] > most:
                message = f"the bodies of {most} requests of this key are coming, as many as it may have; send one to its end"
                raise ProtocolError(message, "rate_limit_exceeded", status=429, retry=True)
            announced = self.request.headers.get("content-length", "")
            self._check_size(int(announced) if announced.isdigit() else 0)
            response = await handle(self)
        except Denied:
            raise
        except ClientDisconnect:
            response = Response(status_code=GONE)
        except Exception as error:
            response = response_of(logged(error))
        finally:
            if not isinstance(response, StreamedResponse):
                self.end()
        return response

    def _check_room(self) -> None:
        """ProtocolError where as many requests are answered as may be."""
        limits, server = self.server.settings.limits, self.server
        if server.draining:
            raise ProtocolError("this server ends; ask again later", "server_shutting_down", status=503, retry=True)
        if server.requests.total() >= limits.sessions:
            message = f"{limits.sessions} requests are under way, as many as this server takes at once; ask again"
            raise ProtocolError(message, "server_overloaded", status=503, retry=True)
        if server.requests[self.owner] >= limits.key_sessions:
            message = f"{limits.key_sessions} requests of this key are under way, as many as it may have; wait for one"
            raise ProtocolError(message, "rate_limit_exceeded", status=429, retry=True)

    # --- its body -----------------------------------------------------------------------------------------------------

    async def read(self, model: type[M], most: int | None = None) -> M:
        """The body as JSON, of `most` bytes where that is less than any may have; ProtocolError for no JSON, or a field of the
        wrong type."""
        body = await self.body()
        if most is not None and len(body) > most:
            problem = f"the body has {len(body):,} bytes; at most {most:,} are taken here"
            raise ProtocolError(problem, "too_large", status=413)
        return validated(model, read_json(body))

    async def body(self) -> bytes:
        """All of it; ProtocolError once it is JSON that would take long to read."""

        async def read() -> bytes:
            pieces, left = list[bytes](), COSTLY
            async for piece in self.request.stream():
                left = check_costly(piece, left)
                pieces.append(piece)
            return b"".join(pieces)

        return await self._within(read())

    @contextlib.asynccontextmanager
    async def form(self, files: int = 1) -> AsyncIterator[FormData]:
        """The body as a form with so many files at most, which are closed afterwards."""
        try:
            form = await self._within(self.request.form(max_files=files, max_fields=FIELDS))
        except HTTPException as error:
            raise ProtocolError(f"the form cannot be read: {error.detail}", "invalid_form") from None
        try:
            yield form
        finally:
            await form.close()

    async def _within(self, reading: Awaitable[T]) -> T:
        """Awaits the body, and counts it as under way; ProtocolError after `BODY_SECONDS`, or without room."""
        try:
            body = await asyncio.wait_for(reading, BODY_SECONDS)
        except asyncio.TimeoutError:
            raise ProtocolError(f"the body did not come within {BODY_SECONDS:g} s", "request_timeout", status=408) from None
        self._check_room()
        self._counted -= Counter((self.owner,))
        self._counted = self.server.requests
        self._counted[self.owner] += 1
        return body

    async def _receive(self) -> Any:
        if self._counted is not self.server.coming:
            return await self._came()
        try:
            message = await asyncio.wait_for(self._came(), BODY_PAUSE)
        except asyncio.TimeoutError:
            raise ProtocolError(f"nothing of the body came for {BODY_PAUSE:g} s", "request_timeout", status=408) from None
        self._bytes += len(message.get("body", b""))
        self._check_size(self._bytes)
        return message

    def _check_size(self, size: int) -> None:
        """ProtocolError for a body of more bytes than one may have."""
        most = self.server.settings.limits.body_bytes
        if size > most:
            problem = f"the body is larger than {most / 2**20:g} MiB, the most that is taken; send less, or smaller sound"
            raise ProtocolError(problem, "too_large", status=413)

    # --- its answer ---------------------------------------------------------------------------------------------------

    async def ask(self, question: str | Tensor, task: str, pace: Pace, **options: Any) -> AnswerStream:
        """Ask a text, or samples [S] at 16 kHz, in a session of its own (`options`), which ends with this request. UserError of
        the engine, also EngineLost."""
        engine = self.server.host.engine
        self.session = await asyncio.to_thread(lambda: engine.session(pace=pace, **options))
        answer: AnswerStream = self.session.ask(question, task)
        return answer

    async def begun(self, question: str | Tensor, task: str, **options: Any) -> AsyncIterator[Output]:
        """The events of an answer, as they are read, once the first has come; arguments and errors as of `ask`."""

        async def work() -> AsyncIterator[Output]:
            return await begun(unbroken(await self.ask(question, task, "read", **options)))

        return await self.while_connected(work())

    async def whole(self, question: str | Tensor, task: str, **options: Any) -> tuple[str, Tensor, Ended]:
        """Text, sound [S] and end of an answer, unless the client goes away meanwhile; arguments and errors as of `ask`."""

        async def work() -> list[Output]:
            return [event async for event in unbroken(await self.ask(question, task, "whole", **options))]

        return joined(await self.while_connected(work()))

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits work and returns its result; cancels it and raises ClientDisconnect where the client goes away meanwhile."""
        doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ClientDisconnect
            return doing.result()
        finally:
            gone.cancel()
            if doing.cancel():
                await asyncio.wait((doing,))

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def end(self) -> None:
        """Let it go, and close its session without waiting for that."""
        if self._over:
            return
        self._over = True
        self._counted -= Counter((self.owner,))
        if self.session is not None:
            asyncio.get_running_loop().run_in_executor(None, _close, self.session)


def _close(session: Any) -> None:
    with contextlib.suppress(UserError):  # a lost engine has no session left
        session.close()


def validated(model: type[M], value: Any) -> M:
    """Validates a JSON value by a pydantic model; ProtocolError names the first field that is wrong."""
    if not isinstance(value, dict):
        raise ProtocolError(f"the body is a JSON {type(value).__name__}; send an object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ProtocolError(*first_mistake(error, value)) from None


# --- streams ----------------------------------------------------------------------------------------------------------


class StreamedResponse(StreamingResponse):
    """A response that is sent while it is made. Its request ends with it: when it is whole, when the client has gone, or has
    taken nothing for as long as a session may be idle."""

    def __init__(self, job: Job, pieces: AsyncIterator[bytes], media_type: str) -> None:
        super().__init__(pieces, media_type=media_type, headers={"x-accel-buffering": "no"})
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        patience = self._job.server.settings.limits.idle_seconds
        try:
            await super().__call__(scope, receive, lambda message: asyncio.wait_for(send(message), patience))
        finally:
            self._job.end()


def event_stream(job: Job, events: AsyncIterator[Event], last: str | None = None) -> StreamedResponse:
    """Events as server-sent ones, and data that ends the stream; what breaks them is told as the last of them."""

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n".encode()
        except Exception as error:
            yield f"data: {json.dumps(logged(error).body)}\n\n".encode()
            return
        if last is not None:
            yield f"data: {last}\n\n".encode()

    return StreamedResponse(job, pieces(), "text/event-stream")
