"""A chat's connection: a session of the server in this program, over a loaded model, or a WebSocket to a Realtime server.

Both take a client's events (`send`, which waits for no answer) and deliver the server's, as the API has them, or the error that
ended them, from a thread. `close` ends the session once all events were handled; of one in this program it saves the history.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import Voices
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event
from infer.serve.realtime.session import RealtimeSession
from infer.serve.settings import Answering, ServerLimits, ServeSettings
from infer.serve.telemetry import Metrics
from infer.turns.vad import VoiceActivity
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM

KEY = "OMNI_API_KEY"  # environment variable with the key of `--server`
LAST_WORDS = 10.0  # seconds in which the step under way may end when the program does

SETTINGS = ServeSettings(
    lead=1e6,  # the loudspeaker stops at once, and tells what was heard
    limits=ServerLimits(session_seconds=1e9, retrieved_bytes=2**40),
)

Deliver = Callable[[Event | Exception], None]


class LoadedModel:
    """A model in this program as the engine of a session, and its host; `beside` are keywords of each of its conversations."""

    alive = True

    def __init__(self, lm: SpeechLM, beside: dict[str, Any]) -> None:
        self._lm, self._beside, self.engine = lm, beside, self
        self.config, self.sample_rate, self.frame_rate = lm.config, lm.sample_rate, lm.frame_rate
        self.listens = lm.config.encoder.chunk_samples is not None

    def spare(self) -> bool:
        return self._lm.engine.spare

    def session(self, **options: Any) -> Any:
        return self._lm.session(**{**options, **self._beside})


class DeliveringTransport:
    """Delivers a session's events at once."""

    sound_in_events, unread, outlet = True, 0, Outlet

    def __init__(self, deliver: Deliver) -> None:
        self.put, self.sent_at = deliver, time.monotonic()

    def end(self, reason: str) -> None:
        pass


class LocalConnection:
    """A session in a thread of its own.

    Args:
        answering: options of its answers; `beside`, keywords of `SpeechLM.session` that no event changes.
    """

    def __init__(self, lm: SpeechLM, answering: Answering, beside: dict[str, Any], deliver: Deliver) -> None:
        settings, host = replace(SETTINGS, answering=answering), cast(EngineHost, LoadedModel(lm, beside))
        voices, transport = Voices((), settings.model, lm.sample_rate > 0), DeliveringTransport(deliver)
        self.session = RealtimeSession(host, settings, voices, VoiceActivity(), Metrics(), transport, wants_omni=True)
        self.loop, self._events = asyncio.new_event_loop(), asyncio.Queue[Event | None]()
        self._deliver = deliver
        self._save: Path | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="omni-session", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except Exception as error:
            self._error = error
            self._deliver(error)
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    async def _serve(self) -> None:
        """Handle events until the connection is closed."""
        self.session.begin()
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
