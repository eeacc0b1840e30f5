"""What the checks share: connections to one server, all that it sent, and traces that several checks look at."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from omni.errors import UserError, in_one_line
from tests.realtime.client import Came, Played, RealtimeClient, made_question
from tests.realtime.points import NEEDS_SPEECH, Point, PointEnded, PointFailed, Result, ServerEvent, field

SHORT, WORDS, LONG = (
    "What is two plus three?",
    "repeat zero three six",
    "Count aloud from one to forty, one number after the other.",
)
"""Questions whose answers should be short, of several words, and long."""

LONGEST_QUIET = 1.0
"""Seconds for which something is watched that must not come."""

PATIENCE = 8
"""Timeouts that one check may take."""

KEY_PROTOCOL = "openai-insecure-api-key."
"""Start of the subprotocol that brings a browser's key."""


@dataclass(frozen=True)
class ManualTurn:
    """A question whose turn the client ended, and its answer.

    Attributes:
        came: all events of the session.
        asked: `conversation.item.added` of the question.
    """

    came: Sequence[Came]
    asked: ServerEvent
    answer: Played


@dataclass(frozen=True)
class CheckedPoint:
    """How the check of a point ended.

    Attributes:
        reason, event: why it was not simply kept.
    """

    point: Point
    result: Result
    reason: str = ""
    event: ServerEvent | None = None
    seconds: float = 0.0


def trusting(file: str) -> ssl.SSLContext:
    """TLS that trusts a certificate, or those of its authority, besides the usual ones; UserError where there is none."""
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(file)
    except OSError as error:  # ssl's errors are some
        reason = getattr(error, "reason", None) or error.strerror or error
        raise UserError(f"--certificate {file!r} cannot be read: {reason}; give a PEM file with a certificate") from error
    return context


class Kit:
    """One examination of a server.

    Args:
        address: of its WebSocket.
        speech: a recording [S] of a spoken question, int16 at 24 kHz; None for none.
        timeout: seconds that an event is waited for.
        trust: TLS for a certificate that is no public one.

    Attributes:
        clients: all sessions that were opened.
        quiet: seconds for which something is watched that must not come.
        sound: the recording, or a buzz in its place.
    """

    def __init__(
        self,
        address: str,
        key: str | None = None,
        speech: np.ndarray | None = None,
        timeout: float = 20.0,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.address, self.key, self.timeout = address, key, timeout
        self.trust: dict[str, Any] = {} if trust is None else {"ssl": trust}
        self.quiet = min(LONGEST_QUIET, timeout / 10)
        self.clients: list[RealtimeClient] = []
        self.sound = made_question() if speech is None else speech
        self.has_speech = speech is not None
        self._turns: dict[str, ManualTurn | PointFailed] = {}

    # --- sessions -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def connected(self, query: str = "", browser: bool = False) -> AsyncIterator[RealtimeClient]:
        """A new session from which nothing has been read yet; PointFailed where there is none.

        Args:
            browser: bring the key in a subprotocol.
        """
        key = self.key or "none"
        protocols = [Subprotocol("realtime"), Subprotocol(f"{KEY_PROTOCOL}{key}")] if browser else None
        headers = {"Authorization": f"Bearer {key}"}
        try:
            socket = await connect(
                self.address + query,
                subprotocols=protocols,
                additional_headers=None if browser else headers,
                **self.trust,
                compression=None,
                max_size=None,
                open_timeout=self.timeout,
                close_timeout=1,
            )
        except (OSError, asyncio.TimeoutError, WebSocketException) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, ssl.SSLCertVerificationError):
                reason = f"its certificate is not trusted: {error.verify_message}; name it by --certificate FILE"
            raise PointFailed(f"no connection: {reason}") from None
        client = RealtimeClient(socket, self.timeout)
        self.clients.append(client)
        try:
            yield client
        finally:
            await client.close()

    @asynccontextmanager
    async def session(self, detection: dict[str, Any] | None = None, **session: Any) -> AsyncIterator[RealtimeClient]:
        """A configured session; without turn detection, unless some is given.

        Args:
            session: other settings; `audio.input.turn_detection` is put into them.
        """
        audio = session.pop("audio", {})
        listens = {**audio.get("input", {}), "turn_detection": detection}
        async with self.connected() as client:
            await client.expect("session.created")
            await client.update(**session, audio={**audio, "input": listens})
            yield client

    # --- traces that several checks look at ---------------------------------------------------------------------------

    async def written(self) -> ManualTurn:
        """A written question and its answer, played once."""
        return await self._once("written", lambda client: client.write(SHORT))

    async def spoken(self) -> ManualTurn:
        """A spoken question and its answer, played once."""
        return await self._once("spoken", lambda client: say(client, self.sound.tobytes()))

    async def _once(self, name: str, ask: Callable[[RealtimeClient], Awaitable[ServerEvent]]) -> ManualTurn:
        if name not in self._turns:
            try:
                async with self.session() as client:
                    asked = await ask(client)
                    self._turns[name] = ManualTurn(client.came, asked, await client.respond())
            except PointFailed as failed:
                self._turns[name] = failed
        found = self._turns[name]
        if isinstance(found, PointFailed):
            raise PointFailed(str(found), found.event)
        return found

    # --- the examination ----------------------------------------------------------------------------------------------

    async def examine(self, points: Sequence[Point], began: Callable[[int, str], None]) -> list[CheckedPoint]:
        """Check the points in their order; `began` is told the number and the name of each."""
        findings = []
        for number, one in enumerate(points):
            began(number, one.name)
            findings.append(await self._examined(one))
        return findings

    async def _examined(self, point: Point) -> CheckedPoint:
        if point.speech and not self.has_speech:
            return CheckedPoint(point, "skipped", NEEDS_SPEECH)
        start = asyncio.get_running_loop().time()
        result: Result = "pass"
        reason, event = "", None
        try:
            await asyncio.wait_for(point.check(self), PATIENCE * self.timeout)
        except PointEnded as ended:
            result, reason, event = ended.result, str(ended), ended.event
        except asyncio.TimeoutError:
            result, reason = "fail", f"it did not end within {PATIENCE * self.timeout:g} s"
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            result, reason = "fail", f"an event is built otherwise than any that is known ({in_one_line(error)})"
            event = self.clients[-1].last
        return CheckedPoint(point, result, reason, event, asyncio.get_running_loop().time() - start)


async def begun(client: RealtimeClient) -> ServerEvent:
    """`response.created` of a long answer whose sound has begun."""
    await client.write(LONG)
    await client.send("response.create")
    created = await client.expect("response.created")
    await client.expect("response.output_audio.delta", never=("response.done",))
    return created


async def say(client: RealtimeClient, sound: bytes) -> ServerEvent:
    """Send sound in pieces of a second and commit it; returns `conversation.item.added` of its item."""
    for start in range(0, len(sound), 48_000):
        await client.append(sound[start : start + 48_000])
    await client.send("input_audio_buffer.commit")
    committed = await client.expect("input_audio_buffer.committed")
    item_id = field(committed, "item_id", str)
    return await client.expect(
        "conversation.item.added", where=lambda event: field(event, "item.id") == item_id, never=("response.created",)
    )
