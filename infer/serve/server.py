"""What the routes of a server share: the engine, the keys, the open sessions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from infer.serve.host import EngineHost
from infer.serve.keys import Denied, Keys, check_origin, key_of
from infer.serve.metrics import Metrics
from infer.serve.realtime.configuration import Configuration, Voices, updated
from infer.serve.realtime.protocol import LOST
from infer.serve.realtime.session import RealtimeSession
from infer.serve.settings import ServeSettings
from infer.turns.vad import VoiceActivity


@dataclass(eq=False)
class Server:
    """What the routes share.

    Attributes:
        sessions: the open Realtime sessions, by their ids.
        requests: how many HTTP requests with an answer are under way, by the owners of their keys.
        draining: no new session is taken.
        idle: connections without a request, the oldest first.
    """

    host: EngineHost
    settings: ServeSettings
    keys: Keys
    voices: Voices
    metrics: Metrics = field(default_factory=Metrics)
    vad: VoiceActivity = field(default_factory=VoiceActivity)
    sessions: dict[str, RealtimeSession] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    draining: bool = False
    idle: dict[Any, None] = field(default_factory=dict)

    def admit(self, headers: Any, protocols: list[str]) -> tuple[str, Any]:
        """The owner of a request's key, and its secret's configuration; Denied where it is not let in."""
        check_origin(headers, self.settings.origins, not self.keys.needed)
        owner, session = self.keys.owner(key_of(headers, protocols))
        self.keys.usage[owner].count(events=1)
        return owner, session

    @property
    def answering(self) -> int:
        """Answers that somebody hears or waits for."""
        return self.requests.total() + sum(session.responses.playing for session in self.sessions.values())

    def enter(self, owner: str) -> None:
        """Count a new session for its key; Denied where none is taken."""
        if self.draining:
            raise Denied(503, "server_shutting_down", "this server ends; connect again")
        if not self.host.alive:
            raise Denied(503, "engine_lost", LOST)
        if len(self.sessions) >= self.settings.limits.sessions:
            raise Denied(429, "session_limit_reached", "this server has as many sessions as it takes; try again")
        self.keys.enter(owner)

    def begin(self, transport: Any, given: Any, wants_omni: bool) -> RealtimeSession:
        """A new session; ProtocolError where the configuration that it begins with cannot be."""
        configuration = updated(Configuration(), dict(given), started=False) if given else None
        session = RealtimeSession(
            self.host, self.settings, self.voices, self.vad, self.metrics, transport, configuration, wants_omni
        )
        self.sessions[session.id] = session
        return session

    def lost(self, reason: str) -> None:
        """Tell every session that the engine was lost; the reason is for the log alone."""
        for session in list(self.sessions.values()):
            session.tell_error(LOST)
