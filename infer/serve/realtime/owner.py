"""What the parts of a session (input, responses, transcripts) need of it, and what carries it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import numpy as np

from infer.serve.logs import SessionLog
from infer.serve.metrics import Metrics
from infer.serve.realtime.configuration import Configuration, Voices
from infer.serve.realtime.items import ConversationItem, Items
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event
from infer.serve.settings import ServeSettings


class Transport(Protocol):
    """What carries a session.

    Attributes:
        sound_in_events: sound goes out as events.
        unread: bytes that were put and that the client has not taken.
    """

    sound_in_events: bool

    @property
    def unread(self) -> int: ...

    def put(self, event: Event) -> None:
        """Send an event; waits for nobody."""

    def end(self, reason: str) -> None:
        """Close it, once what was put before has gone."""

    def outlet(self, rate: int, emit: Callable[[np.ndarray], None]) -> Outlet:
        """Where the sound of a new answer goes, at this rate or another one of its own; `emit` is called with what goes."""


class Owner(Protocol):
    """A session, as its parts see it; `infer.serve.realtime.session.RealtimeSession` documents these."""

    conversation_id: str
    settings: ServeSettings
    voices: Voices
    metrics: Metrics
    transport: Transport
    configuration: Configuration
    wants_omni: bool
    longest: float
    items: Items
    log: SessionLog

    def send(self, event: Event) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...

    def answered(self) -> None: ...

    def add_spoken(self, item_id: str, sound: np.ndarray) -> ConversationItem: ...
