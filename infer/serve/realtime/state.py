"""State of a Realtime session that its parts share: who it is for, its items, its events out, and its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import Configuration, Voices
from infer.serve.realtime.items import ContentPart, ConversationItem, Items
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event, ProtocolError, new_id
from infer.serve.settings import ServeSettings
from infer.serve.telemetry import Metrics, SessionLog
from infer.turns.vad import VoiceActivity
from omni.generate.question import longest


class Transport(Protocol):
    """Carries a session's events; `unread` counts the bytes that were put and the client has not taken."""

    sound_in_events: bool
    sent_at: float  # when an event was put last, by `time.monotonic`

    @property
    def unread(self) -> int: ...

    def put(self, event: Event) -> None:
        """Send an event; waits for nobody."""

    def end(self, reason: str) -> None:
        """Close it, once what was put before has gone."""

    def outlet(self, rate: int, emit: Callable[[np.ndarray], None]) -> Outlet:
        """Where the sound of a new answer goes, at this rate or another one of its own; `emit` is called with what goes."""


@dataclass(eq=False)
class SessionState:
    """One client's session, as its parts see it.

    Attributes:
        vad: the voice activity of all sessions.
        wants_omni: the client takes this project's own events (`omni.…`).
        longest: seconds of the longest question that the model takes.
    """

    host: EngineHost
    settings: ServeSettings
    voices: Voices
    vad: VoiceActivity
    metrics: Metrics
    transport: Transport
    configuration: Configuration = field(default_factory=Configuration)
    wants_omni: bool = False

    def __post_init__(self) -> None:
        self.id, self.conversation_id = new_id("sess"), new_id("conv")
        config = self.host.engine.config
        self.longest = longest(config)
        positions = config.decoder.context * config.projector.stack
        self.items = Items(kept=positions / config.encoder.frames_per_second)  # older sound is never given to the model again
        self.log = SessionLog(self.id)
        self._sent = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def send(self, event: Event) -> None:
        """Send an event, with an id of its own."""
        self._sent += 1
        self.transport.put({"event_id": f"event_{self.id[5:]}{self._sent:06x}", **event})

    def tell_error(self, message: str, code: str = "server_error", error_type: str = "server_error") -> None:
        """An error that no event of the client brought."""
        self.send(ProtocolError(message, code, error_type=error_type).event())

    def add_item(self, item: ConversationItem, after: str | None = None) -> None:
        """Put an item into the conversation, and say so."""
        self.items.add(item, after)
        event = {"previous_item_id": self.items.before(item), "item": item.shown()}
        self.send({"type": "conversation.item.added", **event})
        self.send({"type": "conversation.item.done", **event})

    def add_spoken(self, item_id: str, sound: np.ndarray) -> ConversationItem:
        """A user's item of committed sound [S] at 24 kHz, with its events."""
        item = ConversationItem("message", "user", id=item_id, content=[ContentPart("input_audio", None, sound)])
        last = list(self.items)[-1].id if len(self.items) else None
        self.send({"type": "input_audio_buffer.committed", "previous_item_id": last, "item_id": item.id})
        self.add_item(item)
        return item

    def answered(self) -> None:
        """A response of the conversation has ended."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside the others of this session; its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log.error("a task of the session failed", exc_info=task.exception())
