"""A chat's connection: a session of the server in this program, over a loaded model, or a WebSocket to a Realtime server.

Both take a client's events (`send`) and deliver the server's, as the API has them, or the error that ended them, from a thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import numpy as np

from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import Voices
from infer.serve.realtime.playback import SentOutlet
from infer.serve.realtime.protocol import Event
from infer.serve.realtime.session import RealtimeSession
from infer.serve.settings import Answering, ServerLimits, ServeSettings
from infer.serve.telemetry import Metrics
from infer.turns.vad import VoiceActivity
from omni.config import ModelConfig
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM

KEY = "OMNI_API_KEY"  # environment variable with the key of `--server`
LAST_WORDS = 10.0  # seconds in which the step under way may end when the program does

SETTINGS = ServeSettings(
    lead=1e6,  # the loudspeaker stops at once, and tells what was heard
    limits=ServerLimits(session_seconds=1e9, retrieved_bytes=2**40),
)

Deliver = Callable[[Event | Exception], None]


class Connection(Protocol):
    """What a chat needs of either."""

    def send(self, event: Event) -> None:
        """Send an event; waits for no answer."""

    def close(self, save: Path | None = None) -> None:
        """End the session, once all events were handled; its history is saved to a file, where it is here."""


class LoadedModel:
    """A model in this program as the engine of a session, and its host; `beside` are keywords of each of its conversations."""

    alive = True

    def __init__(self, lm: SpeechLM, beside: dict[str, Any]) -> None:
        self.engine = self
        self._lm, self._beside = lm, beside

    @property
    def config(self) -> ModelConfig:
        return self._lm.config

    @property
    def sample_rate(self) -> int:
        return self._lm.sample_rate

    @property
    def frame_rate(self) -> float:
        return self._lm.frame_rate

    @property
    def listens(self) -> bool:
        return self.config.encoder.chunk_samples is not None

    def spare(self) -> bool:
        return self._lm.engine.spare

    def session(self, **options: Any) -> Any:
        return self._lm.session(**{**options, **self._beside})


class DeliveringTransport:
    """Delivers a session's events at once."""

    sound_in_events, unread = True, 0

    def __init__(self, deliver: Deliver) -> None:
        self.put, self.sent_at = deliver, time.monotonic()

    def end(self, reason: str) -> None:
        pass

    def outlet(self, rate: int, emit: Callable[[np.ndarray], None]) -> SentOutlet:
        return SentOutlet(rate, emit)


class LocalConnection:
    """A session in a thread of its own.

    Args:
        answering: options of its answers; `beside`, keywords of `SpeechLM.session` that no event changes.
    """

    def __init__(self, lm: SpeechLM, answering: Answering, beside: dict[str, Any], deliver: Deliver) -> None:
        self._model, self._deliver = LoadedModel(lm, beside), deliver
        self._settings = ServeSettings(lead=SETTINGS.lead, limits=SETTINGS.limits, answering=answering)
        self._save: Path | None = None
        self._error: Exception | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="omni-session", daemon=True)
        self._thread.start()
        opened.result()

    def _run(self, opened: Future[None]) -> None:
        try:
            asyncio.run(self._serve(opened))
        except Exception as error:
            self._error = error
            self._deliver(error)

    async def _serve(self, opened: Future[None]) -> None:
        """Handle events until the connection is closed."""
        self.loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event | None]()
        voices = Voices((), self._settings.model, self._model.sample_rate > 0)
        transport, host = DeliveringTransport(self._deliver), cast(EngineHost, self._model)
        self.session = RealtimeSession(host, self._settings, voices, VoiceActivity(), Metrics(), transport, wants_omni=True)
        self.session.begin()
        opened.set_result(None)
        try:
            while (event := await self._events.get()) is not None:
                await self.session.handle(json.dumps(event))
            if self._save is not None:
                await self.session.responses.dialogue.save(self._save)
        finally:
            await self.session.close()

    def send(self, event: Event) -> None:
        self.loop.call_soon_threadsafe(self._events.put_nowait, event)

    def close(self, save: Path | None = None) -> None:
        self._save = save
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._events.put_nowait, None)
            self._thread.join(LAST_WORDS)
        if self._error is not None:
            raise self._error


class ServerConnection:
    """A WebSocket to a server; UserError where it cannot be reached.

    Args:
        address: of any scheme of HTTP or WebSockets; without a path it is that of `omni-infer serve`.
    """

    def __init__(self, address: str, deliver: Deliver) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        key, self._deliver = os.environ.get(KEY), deliver
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            self._socket = connect(socket_address(address), additional_headers=headers, max_size=None)
        except (OSError, ValueError, WebSocketException) as error:
            raise UserError(f"--server {address!r} cannot be reached ({error}); a key is taken from {KEY}") from error
        threading.Thread(target=self._read, name="omni-socket", daemon=True).start()

    def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                self._deliver(json.loads(self._socket.recv()))
        except ConnectionClosed as error:
            self._deliver(UserError(f"the server has ended the session ({error})"))

    def send(self, event: Event) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(json.dumps(event))
        except ConnectionClosed:  # the reader tells
            return

    def close(self, save: Path | None = None) -> None:
        self._socket.close()


def socket_address(address: str) -> str:
    """The WebSocket's address of a server, `http://localhost:8000/` or `ws://localhost:8000/v1/realtime`."""
    parts = urlsplit(address)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return parts._replace(scheme=scheme, path=parts.path if parts.path.strip("/") else "/v1/realtime").geturl()
