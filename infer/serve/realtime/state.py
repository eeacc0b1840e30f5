"""State of a Realtime session that its parts share: the items of its conversation, its events out, and its tasks.

Items are messages of users, assistants and systems, function calls and their outputs. One is kept as the client sees it,
with what the model needs besides: a spoken question's samples, and the answer as the engine's history has it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from infer.pcm import PCM_RATE, Resampler, decode, encode
from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import LONGEST_TEXT, Configuration, SoundFormat, Voices
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event, Id, ProtocolError, filled, first_mistake, new_id
from infer.serve.settings import ServeSettings
from infer.serve.telemetry import LOG, Metrics
from infer.turns.vad import VoiceActivity
from omni.generate.history import Message
from omni.generate.question import longest

CONTENT = {"user": ("input_text", "input_audio"), "assistant": ("output_text", "output_audio"), "system": ("input_text",)}
"""Types of content of a message, by its role."""

OLD_NAMES = {"text": "output_text", "audio": "output_audio"}
"""Names that content of assistants had before, which clients still send."""

DATA_URL = re.compile(r"\s*data:[^,]{0,200},", re.IGNORECASE)  # what comes before the base64 of a data URL

NEEDED = {"message": ("role", "content"), "function_call": ("name", "arguments"), "function_call_output": ("call_id", "output")}
"""Fields of items, by their types."""

Text = Annotated[str, Field(max_length=LONGEST_TEXT)]

LONGEST_ITEM_SECONDS = 300.0
"""Seconds of one item's sound; each part of it is a question, and may be as long as the model takes."""


@dataclass(eq=False)
class ContentPart:
    """One part of a message's content."""

    type: str
    text: str | None = None  # the text, or the transcript of sound; None where that is not known
    sound: np.ndarray | None = None  # samples [S] at 24 kHz, int16, of a spoken question
    refused: bool = False  # the model cannot take it as a question: it is left out of the history
    forgotten: bool = False  # its samples were dropped, long after the model has forgotten them
    silent: bool = False  # nobody speaks in it: it has no answer, and an empty transcript
    turn: Any = None  # what the engine has heard of the sound while it came (`TurnSound`), or None

    def shown(self, form: SoundFormat | None = None) -> Event:
        """The part for the client; its sound too, where a format for it is given."""
        if self.type == "input_audio":
            part = {"type": self.type, "transcript": self.text}  # null too: agents-js wants the key
            if form is None or self.sound is None:
                return part
            data = self.sound.astype("<i2", copy=False).tobytes()
            if form.samples_per_second != PCM_RATE:
                rate = Resampler(PCM_RATE, form.samples_per_second)
                sound = np.concatenate([rate.push(self.sound.astype(np.float32) / 32768), rate.finish()])
                data = encode(sound, form.type)
            return {**part, "audio": base64.b64encode(data).decode()}
        key = "transcript" if self.type == "output_audio" else "text"
        return {"type": self.type, key: self.text or ""}


@dataclass(eq=False)
class ConversationItem:
    """One item."""

    type: str
    role: str | None = None
    id: str = field(default_factory=lambda: new_id("item"))
    status: str = "completed"
    content: list[ContentPart] = field(default_factory=list)
    values: Event = field(default_factory=dict)  # what else the client gave (`call_id`, `name`, `arguments`, `output`)
    prompt: ContentPart | None = None  # instructions that an assistant's message answers where nobody had asked
    answer: Message | None = None  # an assistant's message as the model's history has it; None for one that the client wrote
    version: int = 0  # counts the changes of its answer
    sent: float = 0.0  # seconds of its sound that were sent; `heard`, of which were heard, None for all
    heard: float | None = None
    cut_ms: int | None = None  # milliseconds to which the client has cut it at the least; None where it has not

    def shown(self, form: SoundFormat | None = None) -> Event:
        """The item for the client; with what its user said, where a format for that is given."""
        out: Event = {"id": self.id, "object": "realtime.item", "type": self.type, "status": self.status, "role": self.role}
        if self.type == "message":
            out["content"] = [part.shown(form) for part in self.content]
        return filled({**out, **self.values})

    @property
    def seconds(self) -> float:
        """Length of its spoken question."""
        return sum(len(part.sound) for part in self.content if part.sound is not None) / PCM_RATE


class ClientPart(BaseModel):
    """A part of a message as a client gives it."""

    type: str
    text: Text | None = None
    transcript: Text | None = None
    audio: Any = None


class ClientItem(BaseModel):
    """An item as a client gives it."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: Id | None = None
    status: Any = None
    role: Literal["user", "assistant", "system"] | None = None
    content: Annotated[list[ClientPart], Field(min_length=1)] | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Text | None = None


def read_item(values: Any, longest: float, param: str = "item") -> ConversationItem:
    """Read an item of a client; ProtocolError for an unknown type or role, content that does not fit it, no base64, or a
    question of more than the longest seconds."""
    try:
        client_item = ClientItem.model_validate(values)
    except ValidationError as error:
        raise ProtocolError(*first_mistake(error, values, param)) from None
    fields = client_item.model_dump(exclude_none=True)
    if missing := [f"{param}.{name}" for name in NEEDED[client_item.type] if name not in fields]:
        raise ProtocolError(f"{missing[0]} is missing", "missing_required_parameter", missing[0])
    status = "incomplete" if client_item.status == "incomplete" else "completed"
    item = ConversationItem(client_item.type, id=client_item.id or new_id("item"), status=status)
    if client_item.type != "message" or client_item.role is None or client_item.content is None:
        item.values = {name: fields[name] for name in ("call_id", *NEEDED[client_item.type]) if name in fields}
        return item
    item.role = client_item.role
    item.content = [
        _part(part, client_item.role, longest, f"{param}.content.{number}") for number, part in enumerate(client_item.content)
    ]
    if item.seconds > LONGEST_ITEM_SECONDS:
        message = f"{param} has {item.seconds:.0f} s of sound; at most {LONGEST_ITEM_SECONDS:g} s are taken"
        raise ProtocolError(message, param=param)
    return item


def _part(part: ClientPart, role: str, longest: float, param: str) -> ContentPart:
    part_type = OLD_NAMES.get(part.type, part.type) if role == "assistant" else part.type
    if part_type not in CONTENT[role]:
        message = f"{param}.type {part.type[:60]!r} does not fit the role {role!r}; use {', '.join(CONTENT[role])}"
        raise ProtocolError(message, param=f"{param}.type")
    if part_type in ("input_text", "output_text"):
        if part.text is None:
            raise ProtocolError(f"{param}.text is missing", "missing_required_parameter", f"{param}.text")
        return ContentPart(part_type, part.text)
    if part_type == "output_audio":
        return ContentPart(part_type, part.transcript or "")
    sound, param = from_base64(part.audio, f"{param}.audio"), f"{param}.audio"
    if not sound or len(sound) % 2:
        raise ProtocolError(f"{param} has {len(sound)} bytes; send samples of audio/pcm, of two bytes each", param=param)
    check_length(len(sound) / 2, longest, param, "send it in pieces", param)
    return ContentPart(part_type, part.transcript, (decode(sound, "audio/pcm") * 32768).astype(np.int16))


def check_length(samples: float, longest: float, name: str, way: str, param: str) -> None:
    """ProtocolError, with a way out, where samples at 24 kHz of that name last longer than a question may."""
    seconds = samples / PCM_RATE
    if seconds > longest:
        shown = math.ceil(seconds * 10 - 1e-6) / 10  # rounded up: never the limit that it exceeds
        raise ProtocolError(f"{name} has {shown:.1f} s of sound; at most {longest:g} s are taken: {way}", param=param)


def from_base64(value: Any, param: str) -> bytes:
    """Bytes of a base64 text, in lines or of a data URL too; ProtocolError where it is none."""
    if not isinstance(value, str):
        raise ProtocolError(
            f"{param} must be base64", "missing_required_parameter" if value is None else "invalid_value", param
        )
    text = "".join(DATA_URL.sub("", value).split())
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"{param} is no base64 ({error})", "invalid_base64", param) from None


class Items(list[ConversationItem]):
    """The items of a conversation, in order, at most so many; the samples of the newest `kept` seconds of questions stay."""

    def __init__(self, most: int = 4096, kept: float = 600.0) -> None:
        super().__init__()
        self.most, self.kept = most, kept

    def find(self, item_id: str, code: str, param: str = "item_id") -> ConversationItem:
        """The item of that id; ProtocolError with this code, and the field that has the id, where there is none."""
        for item in reversed(self):
            if item.id == item_id:
                return item
        raise ProtocolError(f"there is no item {item_id[:80]!r} in the conversation", code, param)

    def add(self, item: ConversationItem, after: str | None = None) -> None:
        """Put an item at the end, or after that of an id (`root`: first). ProtocolError where its id is taken, there is no such
        item to follow, or there are too many."""
        if any(other.id == item.id for other in self):
            raise ProtocolError(f"there is an item {item.id[:80]!r} already", "item_create_duplicate_item_id", "item.id")
        if len(self) >= self.most:
            raise ProtocolError(f"the conversation has {self.most} items; delete some", "conversation_full")
        index = len(self)
        if after == "root":
            index = 0
        elif after is not None:
            index = self.index(self.find(after, "item_create_invalid_previous_item_id", "previous_item_id")) + 1
        self.insert(index, item)
        self._forget_sound()

    def discard(self, item: ConversationItem) -> None:
        """Take an item out, where it is there."""
        self[:] = [other for other in self if other is not item]

    def _forget_sound(self) -> None:
        """Drop the samples of the oldest questions, which are beyond what any model remembers; the newest stays."""
        total = 0.0
        for item in reversed(self):
            newest, total = not total, total + item.seconds
            if total > self.kept and not newest:
                for part in item.content:
                    part.sound, part.forgotten = None, part.forgotten or part.sound is not None


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
        answered: called when a response of the conversation has ended.
    """

    host: EngineHost
    settings: ServeSettings
    voices: Voices
    vad: VoiceActivity
    metrics: Metrics
    transport: Transport
    configuration: Configuration = field(default_factory=Configuration)
    wants_omni: bool = False
    answered: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.conversation_id = new_id("sess"), new_id("conv")
        config = self.host.engine.config
        self.longest = longest(config)
        positions = config.decoder.context * config.projector.stack
        self.items = Items(kept=positions / config.encoder.frames_per_second)  # older sound is never given to the model again
        self.log = logging.LoggerAdapter(LOG, {"fields": {"session": self.id}})
        self._sent = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def send(self, event: Event) -> None:
        """Send an event, with an id of its own."""
        self._sent += 1
        self.transport.put({"event_id": f"event_{self.id[5:]}{self._sent:06x}", **event})

    def tell_error(self, message: str, code: str = "server_error", status: int = 500) -> None:
        """An error that no event of the client brought."""
        self.send(ProtocolError(message, code, status=status).event())

    def add_item(self, item: ConversationItem, after: str | None = None) -> None:
        """Put an item into the conversation, and say so."""
        self.items.add(item, after)
        self.tell_item("added", item)
        self.tell_item("done", item)

    def tell_item(self, state: str, item: ConversationItem) -> None:
        """Say that an item was `added`, or is `done`."""
        index = self.items.index(item)
        before = self.items[index - 1].id if index else None
        self.send({"type": f"conversation.item.{state}", "previous_item_id": before, "item": item.shown()})

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
