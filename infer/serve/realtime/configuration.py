"""Configuration of a Realtime session: what a client may set by parts, and what is in effect.

Harmless fields that change nothing here (noise reduction, tracing, tools, speed, unknown names of models and voices) are
accepted; the answer tells what is in effect, and names the others in `omni.ignored`. `omni` is this project's own part:
temperature and task of the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from infer.pcm import G711_RATE, PCM_RATE
from infer.serve.realtime.protocol import Event, ProtocolError, first_mistake
from infer.turns.detector import Section, SemanticVad, ServerVad

LONGEST_TEXT = 100_000  # characters of instructions and of written questions

TurnDetection = Annotated[ServerVad | SemanticVad, Field(discriminator="type")]

Tokens = Annotated[int, Field(ge=1, le=2**20)] | Literal["inf"]

BETA = {
    "modalities": "output_modalities",
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "input_audio_format": "audio.input.format",
    "output_audio_format": "audio.output.format",
    "input_audio_transcription": "audio.input.transcription",
    "input_audio_noise_reduction": "audio.input.noise_reduction",
    "turn_detection": "audio.input.turn_detection",
    "max_response_output_tokens": "max_output_tokens",
    "temperature": "omni.temperature",
}
"""Keys of the API's beta, and where they are now."""

CHANGEABLE = ("instructions", "output_modalities", "audio", "max_output_tokens", "tools", "tool_choice", "omni")
"""Fields of the configuration that `response.create` may change for its response."""

ECHOED = ("tools", *(f"audio.input.transcription.{name}" for name in ("model", "language", "prompt")))
"""Settings that are told as they were given, for clients that look for them, and change nothing."""


class SoundFormat(Section):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: int | None = None

    @property
    def samples_per_second(self) -> int:
        return PCM_RATE if self.type == "audio/pcm" else G711_RATE

    def shown(self) -> Event:
        return {"type": self.type, "rate": PCM_RATE} if self.type == "audio/pcm" else {"type": self.type}


class Transcription(Section):
    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class InputAudio(Section):
    format: SoundFormat = Field(default_factory=SoundFormat)
    noise_reduction: dict[str, Any] | None = None
    transcription: Transcription | None = None
    turn_detection: TurnDetection | None = Field(default_factory=ServerVad)


class OutputAudio(Section):
    format: SoundFormat = Field(default_factory=SoundFormat)
    voice: str | dict[str, Any] | None = None
    speed: float | None = None


class SessionAudio(Section):
    input: InputAudio = Field(default_factory=InputAudio)
    output: OutputAudio = Field(default_factory=OutputAudio)


class Omni(Section):
    """This project's own settings."""

    model_config = ConfigDict(extra="forbid")

    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None  # of all streams; None for the server's own
    task: Literal["answer", "transcribe"] = "answer"  # `answer`, or `transcribe`: the answer is the transcript of the question
    partial_transcripts: bool = False  # tell what was understood while somebody speaks


class Configuration(Section):
    """All of it, as in effect; a session of type `transcription` writes down what it hears and never answers."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str | None = None
    instructions: Annotated[str, Field(max_length=LONGEST_TEXT)] = ""
    output_modalities: list[Literal["text", "audio"]] = Field(default=["audio"], min_length=1, max_length=1)
    audio: SessionAudio = Field(default_factory=SessionAudio)
    max_output_tokens: Tokens = "inf"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    tracing: str | dict[str, Any] | None = None
    truncation: str | dict[str, Any] = "auto"
    include: list[str] | None = None
    prompt: dict[str, Any] | None = None
    omni: Omni = Field(default_factory=Omni)


@dataclass
class Voices:
    """The voices of a server: `default`, and one for each adapter; with the name of its model, and whether that speaks."""

    adapters: tuple[str, ...]
    model: str
    speaks: bool = True

    def adapter(self, voice: str | dict[str, Any] | None) -> str | None:
        """The adapter of a voice; None for the default one, which unknown names (clients send those of OpenAI) get too."""
        name = voice.get("id") if isinstance(voice, dict) else voice
        return name if name in self.adapters else None


def updated(now: Configuration, change: Event, started: bool) -> Configuration:
    """The configuration with a change applied; the type stays once the session has `started`. ProtocolError names the field
    of a bad value."""
    change = _without_unset(change)
    beta = [key for key in BETA if key in change]
    if beta:
        renamed = ", ".join(f"session.{key} (now session.{BETA[key]})" for key in beta)
        raise ProtocolError(f"unknown, as of the API's beta: {renamed}", "unknown_parameter", f"session.{beta[0]}")
    if started and change.get("type", now.type) != now.type:
        raise ProtocolError(
            f"session.type is {now.type!r} and stays so; open another session for {repr(change['type'])[:40]}",
            param="session.type",
        )
    if change.get("type") == "transcription" and isinstance(change.get("audio"), dict):
        change["audio"].pop("output", None)
    changed = merged(now.model_dump(), change)
    try:
        configuration = Configuration.model_validate(changed)
    except ValidationError as error:
        raise ProtocolError(*first_mistake(error, changed, "session")) from None
    for name, part in (("input", configuration.audio.input), ("output", configuration.audio.output)):
        rate, wanted = part.format.rate, part.format.samples_per_second
        if rate not in (None, wanted):
            param = f"session.audio.{name}.format.rate"
            raise ProtocolError(f"{param} is {rate}; {part.format.type} has {wanted} here", param=param)
    return configuration


def overridden(now: Configuration, overrides: Event) -> Configuration:
    """The configuration with what a response changes for itself."""
    change = {name: overrides[name] for name in (*CHANGEABLE, *BETA) if overrides.get(name) is not None}
    if isinstance(change.get("audio"), dict):
        change["audio"] = {"output": change["audio"].get("output") or {}}
    try:
        return updated(now, change, started=True)
    except ProtocolError as error:
        param = (error.param or "").replace("session", "response", 1)
        raise ProtocolError(str(error).replace("session.", "response."), error.code, param) from None


def _without_unset(change: Event) -> Event:
    """A copy in which null stands only where it means something: no transcription, no turn detection, no noise reduction."""
    means = ("transcription", "turn_detection", "noise_reduction", "tracing", "prompt", "idle_timeout_ms", "temperature")
    copied = {}
    for key, value in change.items():
        if isinstance(value, dict):
            copied[key] = _without_unset(value)
        elif value is not None or key in means:
            copied[key] = value
    return copied


def merged(now: Mapping[str, Any], change: Event) -> Event:
    """Merges nested dicts: the change's values win; turn detection of another type begins from its defaults."""
    out = dict(now)
    for key, value in change.items():
        old = out.get(key)
        if key == "turn_detection" and isinstance(value, dict):
            before = (old or {}).get("type", "server_vad")
            detection = value.get("type") or before
            base = old if old is not None and before == detection else {}
            out[key] = {**base, **value, "type": detection}
        elif key == "format" and isinstance(value, dict):
            out[key] = dict(value)
        elif isinstance(value, dict) and isinstance(old, dict) and key not in ("noise_reduction", "prompt"):
            out[key] = merged(old, value)
        else:
            out[key] = value
    return out


def shown(now: Configuration, voices: Voices, session_id: str, expires_at: int) -> Event:
    """The `session` object of events: the whole configuration as in effect, turn detection spelled out.

    Tools are kept for clients that look for them; what else changes nothing here is told as if it had not been given.
    """
    heard = now.audio.input
    detection = None if heard.turn_detection is None else heard.turn_detection.model_dump(exclude_none=True)
    listens: Event = {
        "format": heard.format.shown(),
        "noise_reduction": None,
        "transcription": None if heard.transcription is None else heard.transcription.model_dump(exclude_none=True),
        "turn_detection": detection,
    }
    common: Event = {"id": session_id, "object": "realtime.session", "type": now.type, "expires_at": expires_at}
    common["omni"] = now.omni.model_dump(exclude_none=True)
    if now.type == "transcription":
        return {**common, "audio": {"input": listens}, "include": None}
    return {
        **common,
        "model": voices.model,
        "instructions": now.instructions,
        "output_modalities": list(now.output_modalities) if voices.speaks else ["text"],
        "audio": {
            "input": listens,
            "output": {
                "format": now.audio.output.format.shown(),
                "voice": voices.adapter(now.audio.output.voice) or "default",
                "speed": 1.0,
            },
        },
        "max_output_tokens": now.max_output_tokens,
        "tools": now.tools,
        "tool_choice": "auto",
        "tracing": None,
        "truncation": "auto",
        "include": None,
        "prompt": None,
    }


def ignored(change: Event, accepted: Event, prefix: str = "") -> list[str]:
    """Paths of a change's fields that have no effect: the session `accepted` has other values there."""
    paths: list[str] = []
    for key, value in change.items():
        now = accepted.get(key)
        if isinstance(value, dict) and isinstance(now, dict):
            paths += ignored(value, now, f"{prefix}{key}.")
        elif (key != "rate" and value not in (None, now, {"id": now})) or (value and prefix + key in ECHOED):
            paths.append(prefix + key)
    return paths
