"""State of a Realtime session that its parts share: the items of its conversation, its events out, and its tasks.

Items are messages of users, assistants and systems, function calls and their outputs. One is kept as the client sees it,
with what the model needs besides: a spoken question's samples, and the answer as the engine's history has it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from infer.pcm import PCM_RATE, Resampler, decode, encode
from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import LONGEST_TEXT, Configuration, SoundFormat, Voices
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event, ProtocolError, filled, new_id
from infer.serve.settings import ServeSettings
from infer.serve.telemetry import Metrics, SessionLog
from infer.turns.vad import VoiceActivity
from omni.generate.messages import Message
from omni.generate.question import longest

CONTENT = {
    "user": ("input_text", "input_audio"),
    "assistant": ("output_text", "output_audio"),
    "system": ("input_text",),
}
"""Types of content of a message, by its role."""

OLD_NAMES = {"text": "output_text", "audio": "output_audio"}
"""Names that content of assistants had before, which clients still send."""

HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which no text can have that a model reads
DATA_URL = re.compile(r"\s*data:[^,]{0,200},", re.IGNORECASE)  # what comes before the base64 of a data URL

KINDS = ("message", "function_call", "function_call_output")

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
            sound = None if form is None or self.sound is None else in_format(self.sound, form)
            return part if sound is None else {**part, "audio": base64.b64encode(sound).decode()}
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


def in_format(sound: np.ndarray, form: SoundFormat) -> bytes:
    """Raw bytes of samples [S] at 24 kHz, int16."""
    if form.samples_per_second == PCM_RATE:
        return sound.astype("<i2", copy=False).tobytes()
    rate = Resampler(PCM_RATE, form.samples_per_second)
    return encode(np.concatenate([rate.push(sound.astype(np.float32) / 32768), rate.finish()]), form.type)


def read_item(values: Event, longest: float, param: str = "item") -> ConversationItem:
    """Read an item of a client; ProtocolError for an unknown type or role, content that does not fit it, no base64, or a
    question of more than the longest seconds."""
    if not isinstance(values, dict):
        raise ProtocolError(f"{param} is a {type(values).__name__}; give an object", param=param)
    item_type = values.get("type", "message")
    if item_type not in KINDS:
        raise ProtocolError(
            f"{param}.type {repr(item_type)[:60]} is not known here; use one of {', '.join(KINDS)}", param=f"{param}.type"
        )
    item_id = values.get("id")
    if item_id is not None and (not isinstance(item_id, str) or not 0 < len(item_id) <= 512):
        raise ProtocolError(f"{param}.id must be a text of 1 to 512 characters", param=f"{param}.id")
    status = "incomplete" if values.get("status") == "incomplete" else "completed"
    item = ConversationItem(item_type, id=item_id or new_id("item"), status=status)
    if item_type != "message":
        for name in ("call_id", "name", "arguments") if item_type == "function_call" else ("call_id", "output"):
            item.values[name] = _text(
                values.get(name), f"{param}.{name}", optional=name == "call_id" and item_type == "function_call"
            )
        return item
    role = values.get("role")
    if not isinstance(role, str) or role not in CONTENT:
        raise ProtocolError(f"{param}.role {repr(role)[:60]}: use one of {', '.join(CONTENT)}", param=f"{param}.role")
    content = values.get("content")
    if not isinstance(content, list) or not content:
        raise ProtocolError(f"{param}.content must be a list of one part or more", param=f"{param}.content")
    item.role = role
    item.content = [_part(part, role, longest, f"{param}.content.{number}") for number, part in enumerate(content)]
    if item.seconds > LONGEST_ITEM_SECONDS:
        raise ProtocolError(
            f"{param} has {item.seconds:.0f} s of sound; at most {LONGEST_ITEM_SECONDS:g} s are taken", param=param
        )
    return item


def _part(values: Any, role: str, longest: float, param: str) -> ContentPart:
    if not isinstance(values, dict):
        raise ProtocolError(f"{param} is a {type(values).__name__}; give an object with a type", param=param)
    part_type = values.get("type")
    if role == "assistant":
        part_type = OLD_NAMES.get(str(part_type), part_type)
    if part_type not in CONTENT[role]:
        raise ProtocolError(
            f"{param}.type {repr(values.get('type'))[:60]} does not fit the role {role!r}; use {', '.join(CONTENT[role])}",
            param=f"{param}.type",
        )
    if part_type in ("input_text", "output_text"):
        return ContentPart(part_type, _text(values.get("text"), f"{param}.text"))
    transcript = _text(values.get("transcript"), f"{param}.transcript", optional=True)
    if part_type == "output_audio":
        return ContentPart(part_type, transcript or "")
    sound = from_base64(values.get("audio"), f"{param}.audio")
    if len(sound) % 2:
        raise ProtocolError(f"{param}.audio has {len(sound)} bytes; a sample of audio/pcm takes two", param=f"{param}.audio")
    if not sound:
        raise ProtocolError(f"{param}.audio has no samples; leave it out, or send sound", param=f"{param}.audio")
    check_length(len(sound) / 2, longest, f"{param}.audio", "send it in pieces", f"{param}.audio")
    return ContentPart(part_type, transcript, (decode(sound, "audio/pcm") * 32768).astype(np.int16))


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


def _text(value: Any, param: str, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if not isinstance(value, str):
        raise ProtocolError(
            f"{param} must be a text", "missing_required_parameter" if value is None else "invalid_value", param
        )
    if len(value) > LONGEST_TEXT:
        raise ProtocolError(f"{param} has {len(value):,} characters; at most {LONGEST_TEXT:,} are taken", param=param)
    half = HALF.search(value)
    if half:
        raise ProtocolError(
            f"character {half.start()} of {param} is {half[0]!a}, half of a surrogate pair; send whole characters", param=param
        )
    return value


class Items:
    """The items of a conversation, in their order, at most so many; the samples of the newest `kept` seconds of questions
    stay."""

    def __init__(self, most: int = 4096, kept: float = 600.0) -> None:
        self.most, self.kept = most, kept
        self._items: list[ConversationItem] = []

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def find(self, item_id: str, code: str, param: str = "item_id") -> ConversationItem:
        """The item of that id; ProtocolError with this code, and the field that has the id, where there is none."""
        for item in reversed(self._items):
            if item.id == item_id:
                return item
        raise ProtocolError(f"there is no item {item_id[:80]!r} in the conversation", code, param)

    def before(self, item: ConversationItem) -> str | None:
        """Id of the item before it; None for the first."""
        index = self._items.index(item)
        return self._items[index - 1].id if index else None

    def add(self, item: ConversationItem, after: str | None = None) -> None:
        """Put an item at the end, or after that of an id (`root`: first). ProtocolError where its id is taken, there is no such
        item to follow, or there are too many."""
        if any(other.id == item.id for other in self._items):
            raise ProtocolError(f"there is an item {item.id[:80]!r} already", "item_create_duplicate_item_id", "item.id")
        if len(self._items) >= self.most:
            raise ProtocolError(f"the conversation has {self.most} items; delete some", "conversation_full")
        index = len(self._items)
        if after == "root":
            index = 0
        elif after is not None:
            index = self._items.index(self.find(after, "item_create_invalid_previous_item_id", "previous_item_id")) + 1
        self._items.insert(index, item)
        self._forget_sound()

    def discard(self, item: ConversationItem) -> None:
        """Take an item out, where it is there."""
        self._items = [other for other in self._items if other is not item]

    def _forget_sound(self) -> None:
        """Drop the samples of the oldest questions, which are beyond what any model remembers; the newest stays."""
        total = 0.0
        for item in reversed(self._items):
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
        self.tell_item("added", item)
        self.tell_item("done", item)

    def tell_item(self, state: str, item: ConversationItem) -> None:
        """Say that an item was `added`, or is `done`."""
        before = self.items.before(item)
        self.send({"type": f"conversation.item.{state}", "previous_item_id": before, "item": item.shown()})

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
