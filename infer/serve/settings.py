"""Settings of a server: how it answers, whom it admits, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from infer.turns.detector import PADDING

LEAST_TOP_P = 1e-6  # smallest `top_p` of a model; clients send 0 for it


@dataclass(frozen=True)
class ServerLimits:
    """ServerLimits of a server, and of each key.

    Attributes:
        sessions: sockets and calls at once; more get `session_limit_reached`.
        key_sessions: of one key.
        connections: of any kind at once; for one more, that which has waited longest without a request is closed.
        session_seconds: longest session; it ends with `session_expired`.
        idle_seconds: seconds without anything from the client or to it, after which a session ends.
        session_audio_seconds: seconds of sound that a session may send in an hour; it is closed where it sends more.
        session_events: events of a session in a minute, besides those that bring sound.
        session_frames: frames of a WebSocket, or messages of a call, in ten seconds.
        session_bytes: bytes of them in a minute.
        key_audio_seconds, key_events: over all sessions and requests of one key; where they are used up, no new ones are taken.
        unread_bytes: bytes that wait for a client that does not read; beyond it the socket is closed.
        body_bytes: largest body of a request.
        responses: of one session at once (one in its conversation, the others out of band).
    """

    sessions: int = 64
    key_sessions: int = 64
    session_seconds: float = 3600.0
    idle_seconds: float = 900.0
    connections: int = 1024
    session_audio_seconds: float = 3600.0
    session_events: int = 2000
    session_frames: int = 10_000
    session_bytes: int = 64 * 2**20
    key_audio_seconds: float = 64 * 3600.0
    key_events: int = 64 * 2000
    unread_bytes: int = 4 * 2**20
    body_bytes: int = 26 * 2**20
    responses: int = 4


@dataclass(frozen=True)
class Answering:
    """How answers are made.

    Attributes:
        temperature, top_k, top_p, seed: of the sampling; 0 takes the likeliest ids.
        max_seconds, max_tokens: longest answer.
        text_assist: let a second row write the text.
        context: positions of a conversation.
        use_instructions: a session's instructions come before its first question as a system message.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_seconds: float = 30.0
    max_tokens: int = 512
    text_assist: bool = False
    context: int | None = None
    use_instructions: bool = False

    def keywords(self, temperature: float | None = None, top_p: float | None = None, seed: int | None = None) -> dict[str, Any]:
        """Keywords of `SpeechLM.session`: these settings, with what a client gives instead.

        Without a temperature, here or of the client, the likeliest ids are taken, whatever `top_p` is.
        """
        given = {"temperature": temperature, "top_p": None if top_p is None else max(top_p, LEAST_TOP_P), "seed": seed}
        own = {name: getattr(self, name) for name in SESSION_KEYWORDS}
        return own | {name: value for name, value in given.items() if value is not None}


SESSION_KEYWORDS = tuple(f.name for f in fields(Answering) if f.name != "use_instructions")


def limited(options: dict[str, Any], most: int | None, speaks: bool) -> dict[str, Any]:
    """The options with at most that many tokens, unless the server's own limit of written answers is lower."""
    if most is None or (not speaks and most >= options["max_tokens"]):
        return options
    return {**{name: value for name, value in options.items() if name != "max_tokens"}, "max_new_tokens": most}


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `create_app` needs beside the engine.

    Attributes:
        model: name of the model.
        adapters: names of the adapters that were loaded; each is a voice.
        origins: origins of pages, besides the server's own, that may connect.
        padding: seconds of sound that a question keeps around the speech that voice activity found; models answer best where
            they hear as much as in training.
        lead: seconds of sound that are sent ahead of what a client plays.
    """

    model: str = "omni"
    adapters: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    padding: float = PADDING
    lead: float = 0.3
    limits: ServerLimits = field(default_factory=ServerLimits)
    answering: Answering = field(default_factory=Answering)
