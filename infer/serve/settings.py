"""Settings of a server: how it answers, whom it admits, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from infer.turns.detector import PADDING
from omni.generate.options import GREEDY, Sampling


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server, and of each key."""

    sessions: int = 64  # sockets and calls at once; more get `session_limit_reached`
    key_sessions: int = 64  # of one key
    session_seconds: float = 3600.0  # longest session; it ends with `session_expired`
    idle_seconds: float = 900.0  # seconds without anything from the client or to it, after which a session ends
    connections: int = 1024  # of any kind at once; for one more, that which has waited longest without a request is closed
    session_audio_seconds: float = 3600.0  # seconds of sound of a session in an hour; it is closed where it sends more
    session_events: int = 2000  # events of a session in a minute, besides those that bring sound
    session_frames: int = 10_000  # frames of a WebSocket, or messages of a call, in ten seconds
    session_bytes: int = 64 * 2**20  # bytes of them in a minute
    key_audio_seconds: float = 64 * 3600.0
    key_events: int = 64 * 2000  # over all sessions and requests of one key; where they are used up, no new ones are taken
    unread_bytes: int = 4 * 2**20  # bytes that wait for a client that does not read; beyond it the socket is closed
    retrieved_bytes: int = 2**20 - 2**14  # characters of base64 of an item that is retrieved: many clients take 1 MiB at most
    body_bytes: int = 26 * 2**20  # largest body of a request
    responses: int = 4  # of one session at once (one in its conversation, the others out of band)


@dataclass(frozen=True)
class Answering:
    """Options of answers."""

    sampling: Sampling = GREEDY
    seed: int = 0  # of the sampling
    max_seconds: float = 30.0
    max_tokens: int = 512  # longest answer
    text_assist: bool = False  # let a second row write the text
    context: int | None = None  # positions of a conversation
    use_instructions: bool = False  # a session's instructions come before its first question as a system message

    def keywords(
        self, speaks: bool, most: int | None = None, seed: int | None = None, **sampling: float | None
    ) -> dict[str, Any]:
        """Keywords of `SpeechLM.session`: these settings, with what a client gives instead of the seed and of fields of
        `sampling`, and at most `most` tokens, unless the server's own limit of written answers is lower.

        Without a temperature, here or of the client, the likeliest ids are taken, whatever `top_p` is.
        """
        changed: Any = {name: value for name, value in sampling.items() if value is not None}
        options = {name: getattr(self, name) for name in SESSION_KEYWORDS}
        options |= {"sampling": replace(self.sampling, **changed), "seed": self.seed if seed is None else seed}
        if most is not None and (speaks or most < self.max_tokens):
            del options["max_tokens"]
            options["max_new_tokens"] = most
        return options


SESSION_KEYWORDS = tuple(f.name for f in fields(Answering) if f.name != "use_instructions")
"""Names of the settings that are keywords of `SpeechLM.session`."""


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `create_app` needs beside the engine."""

    model: str = "omni"  # name of the model
    is_shipped: bool = False  # the model is the one of the package, whose limits the page tells
    adapters: tuple[str, ...] = ()  # names of the adapters that were loaded; each is a voice
    origins: tuple[str, ...] = ()  # origins of pages, besides the server's own, that may connect
    padding: float = PADDING  # seconds of sound that a question keeps around the speech that voice activity found
    lead: float = 0.3  # seconds of sound that are sent ahead of what a client plays
    limits: ServerLimits = field(default_factory=ServerLimits)
    answering: Answering = field(default_factory=Answering)
