"""The routes of calls: `POST /v1/realtime/calls` with an offer, and hanging up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from infer.serve.keys import LOOPBACK, Denied
from infer.serve.realtime.bounds import SessionBounds
from infer.serve.realtime.protocol import Event, ProtocolError, read_json
from infer.serve.realtime.webrtc import Call, CallTransport
from infer.serve.rest.errors import Failure, failure_of

if TYPE_CHECKING:
    from infer.serve.server import Server

PATH = "/v1/realtime/calls"

BODY_SECONDS = 30.0
"""Seconds in which the body of a request has to come."""


class Calls:
    """The calls of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._calls: dict[str, Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, owner: str, given: Event, offer: str, near: bool, wants_omni: bool) -> tuple[Call, str]:
        """A new call, and the answer to its offer.

        Args:
            given: configuration of its session.
            near: the client is on this machine.

        Raises:
            Denied: there are as many sessions as may be.
            ProtocolError: the configuration or the offer cannot be taken.
        """
        server, limits = self._server, self._server.settings.limits
        if server.full:
            raise Denied(429, "session_limit_reached", "this server has as many sessions as it takes; try again")
        server.keys.enter(owner)
        transport = CallTransport(limits.unread_bytes)
        try:
            session = server.begin(transport, given, wants_omni)
        except ProtocolError:
            server.keys.leave(owner)
            raise
        bounds = SessionBounds(session, server.keys, owner, limits, lambda: transport.sent_at)
        call = Call(transport, session, owner, bounds, limits.unread_bytes)
        self._calls[call.id] = call
        server.metrics.sessions.labels("webrtc").inc()
        session.log.info("session began", fields={"transport": "webrtc", "owner": owner, "call": call.id})
        try:
            answer = await call.answer(offer, near)
        except BaseException:
            await self._end(call, "no answer to the offer")
            raise
        task = asyncio.create_task(self._serve(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call, answer

    def find(self, call_id: str, owner: str) -> Call:
        """A call of an owner's; Failure where there is none."""
        call = self._calls.get(call_id)
        if call is None or call.owner != owner:
            raise Failure(404, f"there is no call {call_id[:80]!r}, or it has ended", "call_not_found")
        return call

    async def close(self) -> None:
        """End all of them."""
        for call in self._calls.values():
            call.hang_up("the server ends")
        await asyncio.gather(*self._tasks)

    async def _serve(self, call: Call) -> None:
        reason = "the server failed"
        try:
            reason = await call.run()
        except Exception:
            call.session.log.exception("a call failed")
        finally:
            await self._end(call, reason)

    async def _end(self, call: Call, reason: str) -> None:
        """Close a call, and count it no longer."""
        try:
            await call.close()
        finally:
            del self._calls[call.id], self._server.sessions[call.session.id]
            self._server.keys.leave(call.owner)
            self._server.metrics.sessions.labels("webrtc").dec()
            call.session.log.info("session ended", fields={"reason": reason})


def add_calls(app: FastAPI, server: Server) -> Calls:
    """Add the routes of this file to an application; returns its calls."""
    calls = Calls(server)

    @app.post(PATH)
    async def create(request: Request) -> Response:
        owner, secret = server.admit(request.headers, [])
        try:
            offer, session = await asyncio.wait_for(_read(request), BODY_SECONDS)
            near = request.client is not None and request.client.host in LOOPBACK
            wants_omni = request.query_params.get("omni") == "1"
            call, answer = await calls.begin(owner, _joined(secret, session), offer, near, wants_omni)
        except (Denied, HTTPException, ClientDisconnect):
            raise
        except asyncio.TimeoutError:
            return Failure(408, "the body did not come in time", "request_timeout").response()
        except Exception as error:
            return failure_of(error).response()
        return Response(answer, 201, {"location": f"{PATH}/{call.id}"}, "application/sdp")

    @app.post(PATH + "/{call_id}/hangup")
    async def hang_up(request: Request, call_id: str) -> Response:
        owner, _ = server.admit(request.headers, [])
        try:
            calls.find(call_id, owner).hang_up("the client hung up")
        except Failure as error:
            return error.response()
        return Response()

    return calls


async def _read(request: Request) -> tuple[str, Event]:
    """A request's offer and configuration, of a body of `application/sdp` or a form; ProtocolError where it has none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/sdp":
        return (await request.body()).decode("utf-8", "replace"), {}
    if kind != "multipart/form-data":
        raise ProtocolError("send the offer as application/sdp, or as multipart/form-data with sdp and session", "invalid_form")
    try:
        async with request.form(max_files=2, max_fields=8) as form:
            offer, session = [await _text(form.get(name)) for name in ("sdp", "session")]
    except HTTPException as error:
        if error.status_code != 400:
            raise
        raise ProtocolError(f"the form cannot be read: {error.detail}", "invalid_form") from None
    if offer is None:
        raise ProtocolError("the form has no sdp, the offer", "missing_required_parameter", "sdp")
    try:
        given = read_json(session or "{}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"session is no JSON: {type(error).__name__}", "invalid_json", "session") from None
    if not isinstance(given, dict):
        raise ProtocolError(f"session is a JSON {type(given).__name__}; send an object", "invalid_json", "session")
    return offer, given


async def _text(field: UploadFile | str | None) -> str | None:
    """A form's field, which some clients send as a file."""
    return (await field.read()).decode("utf-8", "replace") if isinstance(field, UploadFile) else field


def _joined(below: Mapping[str, Any], above: Event) -> Event:
    """Two configurations in one: what the second does not say is as in the first."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = _joined(old, value) if isinstance(old, Mapping) and isinstance(value, dict) else value
    return out
