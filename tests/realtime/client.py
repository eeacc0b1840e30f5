"""A client that plays traces of events, keeps all that came, with their times, and has sound to send."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np
import soundfile
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from omni.errors import UserError
from tests.realtime.points import PointFailed, ServerEvent, field

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def address_of(url: str, model: str) -> str:
    """The WebSocket's address of a server's URL, with or without `/v1` or `/v1/realtime`; UserError where it is none."""
    wrong = UserError(f"{url!r} is no address of a server; give one such as ws://127.0.0.1:8000/v1")
    try:
        parts = urlsplit(url)
        known = parts.scheme in SCHEMES and parts.hostname is not None and parts.port != 0
    except ValueError:
        raise wrong from None
    if not known:
        raise wrong
    path = parts.path.rstrip("/")
    if not path.endswith("/realtime"):
        path += "/realtime" if path.endswith("/v1") else "/v1/realtime"
    query = dict(parse_qsl(parts.query))
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, urlencode({"model": model, **query}), ""))


@dataclass(frozen=True)
class Came:
    """An event of the server.

    Attributes:
        at: when it came, in seconds of the loop's clock.
        size: bytes of its message.
    """

    event: ServerEvent
    at: float
    size: int


@dataclass(frozen=True)
class Played:
    """An answer from `response.created` to `response.done`.

    Attributes:
        came: its own events in their order, `conversation.item.…` of its item among them.
    """

    came: Sequence[Came]

    @property
    def created(self) -> ServerEvent:
        return self.came[0].event

    @property
    def done(self) -> ServerEvent:
        return self.came[-1].event

    @property
    def item_id(self) -> str:
        """Id of the message that it is."""
        return str(field(self.first("response.output_item.added"), "item.id", str))

    def of(self, kind: str) -> list[ServerEvent]:
        return [one.event for one in self.came if one.event.get("type") == kind]

    def first(self, kind: str) -> ServerEvent:
        """Its first event of a type; PointFailed where there is none."""
        found = self.of(kind)
        if not found:
            raise PointFailed(f"the answer has no {kind}", self.done)
        return found[0]

    def joined(self, kind: str) -> str:
        """Its deltas of a type as one text."""
        return "".join(field(event, "delta", str) for event in self.of(kind))

    @property
    def sound(self) -> bytes:
        """Its sound; PointFailed where a delta is no base64."""
        return b"".join(sound_of(event) for event in self.of("response.output_audio.delta"))


def sound_of(event: ServerEvent) -> bytes:
    """Bytes of a delta of sound; PointFailed where it is no base64."""
    try:
        return base64.b64decode(field(event, "delta", str), validate=True)
    except (binascii.Error, ValueError):
        raise PointFailed("the delta is no base64", event) from None


class RealtimeClient:
    """One session with a server.

    Args:
        timeout: seconds that an event is waited for.

    Attributes:
        came: all events, in their order.
    """

    def __init__(self, socket: ClientConnection, timeout: float) -> None:
        self.socket, self.timeout = socket, timeout
        self.came: list[Came] = []
        self._next = 0
        self._news, self._ended = asyncio.Event(), False
        self._clock = asyncio.get_running_loop().time
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.socket:
                size = len(message) if isinstance(message, bytes) else len(message.encode())
                self.came.append(Came(_event_of(message), self._clock(), size))
                self._news.set()
        except ConnectionClosed:
            pass
        finally:
            self._ended = True
            self._news.set()

    async def close(self) -> None:
        await self.socket.close()
        await self._reading

    # --- out ----------------------------------------------------------------------------------------------------------

    async def send(self, kind: str, **values: Any) -> None:
        """Send an event."""
        await self.send_text(json.dumps({"type": kind, **values}))

    async def send_text(self, text: str) -> None:
        """Send a message as it is; PointFailed where the server has closed the connection."""
        try:
            await self.socket.send(text)
        except ConnectionClosed:
            raise PointFailed(f"the server closed the connection {self._close_reason}", self.last) from None

    async def append(self, sound: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(sound).decode())

    async def update(self, **session: Any) -> ServerEvent:
        """Change the configuration; returns `session.updated`."""
        await self.send("session.update", session={"type": "realtime", **session})
        return await self.expect("session.updated")

    async def write(self, text: str) -> ServerEvent:
        """Add a user's text; returns its `conversation.item.added`."""
        await self.send("conversation.item.create", item=written(text))
        return await self.expect("conversation.item.added")

    async def respond(self, **response: Any) -> Played:
        """Ask for an answer and wait for its end."""
        await self.send("response.create", response=response)
        return await self.answer()

    # --- in -----------------------------------------------------------------------------------------------------------

    @property
    def last(self) -> ServerEvent | None:
        return self.came[-1].event if self.came else None

    @property
    def mark(self) -> int:
        """Number of events that have come."""
        return len(self.came)

    @property
    def now(self) -> float:
        return self._clock()

    async def expect(
        self,
        *kinds: str,
        never: Sequence[str] = (),
        since: int | None = None,
        where: Callable[[ServerEvent], bool] = lambda event: True,
        patient: bool = False,
    ) -> ServerEvent:
        """The next event of one of these types, or of any where none is named.

        Args:
            never: types that must not come before it; `error` is always one of them, unless it is or was awaited.
            since: look from this event on (`mark`), not from behind the last one that was expected.
            where: only events of which this is true.
            patient: every event that comes gives more time.

        Raises:
            PointFailed: another one came, none came in time, or the connection was closed.
        """
        wanted = " or ".join(kinds) or "an event"
        place = self._next if since is None else since
        until = self.now + self.timeout
        while True:
            while place < len(self.came):
                event = self.came[place].event
                kind, place = str(event.get("type")), place + 1
                if (not kinds or kind in kinds) and where(event):
                    self._next = max(self._next, place)
                    return event
                if kind in never or (kind == "error" and kinds and "error" not in kinds and place > self._next):
                    raise PointFailed(f"{kind} came instead of {wanted}", event)
                until = self.now + self.timeout if patient else until
            if self._ended:
                raise PointFailed(f"the server closed the connection {self._close_reason} instead of {wanted}", self.last)
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), max(until - self.now, 0))
            except asyncio.TimeoutError:
                raise PointFailed(f"no {wanted} came within {self.timeout:g} s", self.last) from None

    async def answer(self) -> Played:
        """The next answer, once it has ended; PointFailed where it broke."""
        played = await self.finished(await self.expect("response.created"))
        if field(played.done, "response.status") not in ("completed", "incomplete"):
            raise PointFailed("the answer did not come to its end", played.done)
        return played

    async def finished(self, created: ServerEvent) -> Played:
        """The answer that was begun so, once it has ended in some way."""
        response_id = field(created, "response.id", str)
        start = next(n for n, one in enumerate(self.came) if one.event is created)
        done = await self.expect(
            "response.done", since=start, where=lambda event: _response_of(event) == response_id, patient=True
        )
        end = next(n for n, one in enumerate(self.came) if one.event is done)
        items = {_item_of(one.event) for one in self.came[start : end + 1] if _response_of(one.event) == response_id}
        own = [
            one
            for one in self.came[start : end + 1]
            if _response_of(one.event) == response_id or (_item_of(one.event) in items - {None})
        ]
        return Played(own)

    async def nothing(
        self, *kinds: str, since: int, seconds: float, where: Callable[[ServerEvent], bool] = lambda event: True
    ) -> None:
        """PointFailed where such an event has come since then (`mark`), or comes within so many seconds."""
        await asyncio.sleep(seconds)
        for one in self.came[since:]:
            if one.event.get("type") in kinds and where(one.event):
                raise PointFailed(f"{one.event['type']} came", one.event)

    @property
    def _close_reason(self) -> str:
        code, reason = self.socket.close_code, self.socket.close_reason
        return f"({code}{f', {reason}' if reason else ''})"


def written(text: str, role: str = "user", kind: str = "input_text") -> ServerEvent:
    """An item: a text, a user's unless it says otherwise."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _event_of(message: str | bytes) -> ServerEvent:
    """The event of a message; one of the type `(no event)` where it is none."""
    try:
        event = json.loads(message)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"type": "(no event)", "message": str(message)}


def _response_of(event: ServerEvent) -> object:
    response = event.get("response")
    return response.get("id") if isinstance(response, dict) else event.get("response_id")


def _item_of(event: ServerEvent) -> object:
    item = event.get("item")
    return item.get("id") if isinstance(item, dict) else event.get("item_id")


RATE, G711_RATE = 24_000, 8_000
"""Samples per second of `audio/pcm`, and of `audio/pcmu` and `audio/pcma`."""

SUBTYPES = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}
"""libsndfile's names of G.711."""

PIECE = 0.04
"""Seconds of a microphone's pieces."""


def read_question(path: str) -> np.ndarray:
    """Samples [S] of a sound file, int16 at 24 kHz; UserError where it is none."""
    from omni.audio.io import read_audio

    return pcm16(read_audio(path, RATE, max_seconds=60).numpy())


def made_question(seconds: float = 1.2) -> np.ndarray:
    """A buzz in syllables, [S] int16 at 24 kHz: sound to answer, which nothing needs to take for speech."""
    time = np.arange(round(seconds * RATE)) / RATE
    buzz = sum(np.sin(2 * np.pi * 140 * n * time) / n for n in range(1, 20))
    return pcm16(0.1 * buzz * np.sin(np.pi * 4 * time) ** 2)


def pcm16(samples: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype("<i2")


def without_silence(sound: np.ndarray) -> np.ndarray:
    """The sound from its first loud sample on."""
    loud = np.abs(sound.astype(np.int32))
    return sound[int(np.argmax(loud > 0.1 * loud.max())) :]


def g711(sound: np.ndarray, form: str) -> bytes:
    """G.711 of samples [S] at 24 kHz."""
    thirds = sound[: len(sound) // 3 * 3].reshape(-1, 3).astype(np.float32).mean(1) / 32768
    out = io.BytesIO()
    soundfile.write(out, thirds, G711_RATE, format="RAW", subtype=SUBTYPES[form])
    return out.getvalue()


class Microphone:
    """Sends what is said in real time, and silence before and after; a context manager."""

    def __init__(self, client: RealtimeClient) -> None:
        self._client = client
        self._waiting = np.zeros(0, "<i2")

    def say(self, sound: np.ndarray) -> None:
        """Say this as soon as what was said before has gone."""
        self._waiting = np.concatenate([self._waiting, sound])

    async def __aenter__(self) -> Microphone:
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, where: types.TracebackType | None) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self) -> None:
        size, due = round(PIECE * RATE), self._client.now
        while True:
            piece, self._waiting = self._waiting[:size], self._waiting[size:]
            await self._client.append(np.pad(piece, (0, size - len(piece))).tobytes())
            due += PIECE
            await asyncio.sleep(due - self._client.now)
