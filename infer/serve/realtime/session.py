"""A Realtime session: what a client's events do, whatever carries them, and its bounds: how much comes, how long it lasts.

client's events --> handle --> configuration, items, input buffer --> turns --> responses --> send
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from infer.serve.errors import Denied, as_protocol_error
from infer.serve.host import EngineHost
from infer.serve.keys import Keys, Quota
from infer.serve.realtime import protocol
from infer.serve.realtime.configuration import Configuration, Voices, ignored, shown, updated
from infer.serve.realtime.hearing import SessionInput
from infer.serve.realtime.items import ContentPart, ConversationItem, Items, from_base64, read_item
from infer.serve.realtime.playback import Transport
from infer.serve.realtime.protocol import Event, ProtocolError, new_id
from infer.serve.realtime.responses import Responses
from infer.serve.realtime.transcripts import PartialTranscripts, Transcripts
from infer.serve.settings import ServeSettings
from infer.serve.telemetry import Metrics, SessionLog
from infer.turns.vad import VoiceActivity
from omni.config import ModelConfig
from omni.errors import UserError
from omni.generate.question import longest

EXPIRED, POLICY = 1000, 1008  # close codes of WebSockets: a regular end, and a limit
LOOK = 5.0  # seconds between two looks at a session's limits


class RealtimeSession:
    """One client's session.

    Args:
        vad: the voice activity of all sessions.
        wants_omni: the client takes this project's own events (`omni.…`).

    Attributes:
        longest: seconds of the longest question that the model takes.
        responses: its answers; `hearing`, its input.
    """

    def __init__(
        self,
        host: EngineHost,
        settings: ServeSettings,
        voices: Voices,
        vad: VoiceActivity,
        metrics: Metrics,
        transport: Transport,
        configuration: Configuration | None = None,
        wants_omni: bool = False,
    ) -> None:
        self.id, self.conversation_id = new_id("sess"), new_id("conv")
        self.settings, self.voices, self.transport, self.metrics = settings, voices, transport, metrics
        self.wants_omni, self.longest = wants_omni, longest(host.engine.config)
        self.log = SessionLog(self.id)
        self.configuration = configuration or Configuration()
        self.items = Items(kept=remembered(host.engine.config))
        self.expires_at = int(time.time() + settings.limits.session_seconds)
        self._sent = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        me = weakref.proxy(self)  # of its parts: a session is in no cycle, and is freed when its transport lets it go
        self.responses = Responses(me, host)
        self.partials = PartialTranscripts(me, host)
        self.hearing = SessionInput(me, self.responses, vad, self.partials)
        self.transcripts = Transcripts(me, self.responses, host)

    # --- events out ---------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Send an event, with an id of its own."""
        self._sent += 1
        self.transport.put({"event_id": f"event_{self.id[5:]}{self._sent:06x}", **event})

    def begin(self) -> None:
        """The first event."""
        self.send({"type": "session.created", "session": self._shown()})

    def _shown(self) -> Event:
        return shown(self.configuration, self.voices, self.id, self.expires_at)

    def tell_error(self, message: str, code: str = "server_error", error_type: str = "server_error") -> None:
        """An error that no event of the client brought."""
        self.send(ProtocolError(message, code, error_type=error_type).event())

    # --- events in ----------------------------------------------------------------------------------------------------

    async def handle(self, text: str | bytes) -> None:
        """Do what a message of the client says; what is wrong with it is told as an `error` event."""
        event_id = None
        try:
            event, event_id = protocol.read_event(text)
            await HANDLERS[event.type](self, event)
        except ProtocolError as error:
            self.send(error.event(event_id))
        except Exception as error:
            if not isinstance(error, UserError):
                self.log.exception("an event failed")
            self.send(as_protocol_error(error).event(event_id))

    async def _update(self, event: protocol.SessionUpdate) -> None:
        configuration = updated(self.configuration, event.session, started=bool(self.items) or self.responses.last is not None)
        self.configuration = configuration
        self.hearing.configure(configuration)
        session = self._shown()
        if unused := ignored(event.session, session):
            session["omni"]["ignored"] = unused
        self.send({"type": "session.updated", "session": session})

    async def _append(self, event: protocol.Append) -> None:
        data = from_base64(event.audio, "audio")
        if len(data) > protocol.LONGEST_APPEND:
            most = protocol.LONGEST_APPEND // 2**20
            raise ProtocolError(f"audio is longer than {most} MiB; send it in pieces", "string_above_max_length", "audio")
        await self.hearing.append(data)

    async def hear(self, samples: np.ndarray) -> None:
        """Sound that came by a way of its own: samples [S] at 24 kHz."""
        try:
            await self.hearing.take(samples)
        except ProtocolError as error:
            self.send(error.event())

    async def _commit(self, event: protocol.Commit) -> None:
        self.hearing.commit()

    async def _clear(self, event: protocol.Clear) -> None:
        self.hearing.clear()
        self.send({"type": "input_audio_buffer.cleared"})

    # --- items --------------------------------------------------------------------------------------------------------

    def add_item(self, item: ConversationItem, after: str | None = None) -> None:
        """Put an item into the conversation, and say so."""
        self.items.add(item, after)
        before = self.items.before(item)
        self.send({"type": "conversation.item.added", "previous_item_id": before, "item": item.shown()})
        self.send({"type": "conversation.item.done", "previous_item_id": before, "item": item.shown()})

    def add_spoken(self, item_id: str, sound: np.ndarray) -> ConversationItem:
        """A user's item of committed sound [S] at 24 kHz, with its events."""
        item = ConversationItem("message", "user", id=item_id, content=[ContentPart("input_audio", None, sound)])
        last = list(self.items)[-1].id if len(self.items) else None
        self.send({"type": "input_audio_buffer.committed", "previous_item_id": last, "item_id": item.id})
        self.add_item(item)
        if self.configuration.audio.input.transcription is not None or self.configuration.type == "transcription":
            self.transcripts.add(item)
        return item

    async def _create_item(self, event: protocol.ItemCreate) -> None:
        self.add_item(read_item(event.item, self.longest), event.previous_item_id)

    async def _delete_item(self, event: protocol.ItemDelete) -> None:
        item = self.items.find(event.item_id, "item_delete_invalid_item_id")
        last = self.responses.last
        if last is not None and last.item is item:
            await last.stop("client_cancelled")
        self.items.discard(item)
        self.send({"type": "conversation.item.deleted", "item_id": event.item_id})

    async def _retrieve_item(self, event: protocol.ItemRetrieve) -> None:
        item = self.items.find(event.item_id, "item_retrieve_invalid_item_id")
        shown = item.shown(self.configuration.audio.input.format)
        size = sum(len(part.get("audio", "")) for part in shown.get("content", ()))
        if size > self.settings.limits.retrieved_bytes:
            shown, size = item.shown(), 0
        while size and self.transport.unread > self.settings.limits.unread_bytes // 2:  # of those before it
            await asyncio.sleep(0.02)
        self.send({"type": "conversation.item.retrieved", "item": shown})

    async def _truncate_item(self, event: protocol.ItemTruncate) -> None:
        item = self.items.find(event.item_id, "item_truncate_invalid_item_id")
        if item.role != "assistant" or not item.content or item.content[0].type != "output_audio":
            message = f"item {item.id[:80]!r} is no assistant's message with sound, and only those can be cut"
            raise ProtocolError(message, param="item_id")
        if event.content_index:
            message = f"content_index is {event.content_index}, but the sound of a message is its content 0"
            raise ProtocolError(message, param="content_index")
        last = self.responses.last
        response = last if last is not None and last.item is item else None
        sent = response.outlet.sent if response is not None else item.sent
        end_ms = event.audio_end_ms
        if not self.transport.sound_in_events:  # it is known here what was played
            end_ms = min(end_ms, int((sent if response is None else response.outlet.heard) * 1000))
        elif end_ms > sent * 1000 + 1:
            raise ProtocolError(
                f"audio_end_ms is {end_ms}, but only {sent * 1000:.0f} ms of this item were sent",
                "invalid_value",
                "audio_end_ms",
            )
        if response is not None:
            await response.stop("client_cancelled")
            response.outlet.clear()
        await self.responses.cut(item, end_ms / 1000)
        item.cut_ms = end_ms if item.cut_ms is None else min(item.cut_ms, end_ms)
        cut = {"item_id": item.id, "content_index": 0, "audio_end_ms": item.cut_ms}
        self.send({"type": "conversation.item.truncated", **cut})

    def answered(self) -> None:
        """A response of the conversation has ended."""
        self.hearing.answered()

    # --- the end ------------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the others of this session; its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log.error("a task of the session failed", exc_info=task.exception())

    async def close(self) -> None:
        """End all of it, and free its slot."""
        self.responses.silence()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.partials.close()
        await self.responses.close()


HANDLERS: dict[str, Callable[[RealtimeSession, Any], Coroutine[Any, Any, None]]] = {
    "session.update": RealtimeSession._update,
    "input_audio_buffer.append": RealtimeSession._append,
    "input_audio_buffer.commit": RealtimeSession._commit,
    "input_audio_buffer.clear": RealtimeSession._clear,
    "conversation.item.create": RealtimeSession._create_item,
    "conversation.item.delete": RealtimeSession._delete_item,
    "conversation.item.retrieve": RealtimeSession._retrieve_item,
    "conversation.item.truncate": RealtimeSession._truncate_item,
    "response.create": lambda session, event: session.responses.create(event),
    "response.cancel": lambda session, event: session.responses.cancel(event),
    "output_audio_buffer.clear": lambda session, event: session.responses.clear_output(event),
}
"""Handlers of a client's events, by type."""


def remembered(config: ModelConfig) -> float:
    """Seconds of questions that fill the model's context: older sound is never given to it again."""
    return config.decoder.context * config.projector.stack / config.encoder.frames_per_second


class Closed(Exception):
    """The server ends the session, with the code and reason of a WebSocket's close frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason[:120]


class SessionBounds:
    """Ends a session that does not keep to its limits; the client is told by an `error` event. `came`: when anything came."""

    def __init__(self, session: RealtimeSession, keys: Keys, owner: str) -> None:
        self._session, self._keys, self._owner, self._limits = session, keys, owner, session.settings.limits
        self._began = self.came = time.monotonic()
        self._usage = Quota(self._limits)

    def count(self) -> None:
        """Count a message that was handled by the sound that it brought, or else as an event; Closed where it is too much."""
        self.came = time.monotonic()
        seconds, self._session.hearing.uncounted = self._session.hearing.uncounted, 0.0
        came = {"seconds": seconds} if seconds else {"events": 1}
        self._keys.usage[self._owner].count(False, **came)
        try:
            self._usage.count(**came)
        except Denied as error:
            self._session.send(as_protocol_error(error).event())
            raise Closed(POLICY, str(error)) from None

    async def watch(self) -> None:
        """Raises Closed when the session lasts too long, or nothing happens in it."""
        while True:
            await asyncio.sleep(min(LOOK, self._limits.idle_seconds / 4, self._limits.session_seconds / 4))
            if self._session.hearing.uncounted:  # of a call, whose sound comes by a way of its own
                self.count()
            now = time.monotonic()
            if now - self._began > self._limits.session_seconds:
                minutes = self._limits.session_seconds / 60
                self._session.tell_error(
                    f"Your session hit the maximum duration of {minutes:g} minutes.", "session_expired", "invalid_request_error"
                )
                raise Closed(EXPIRED, "session_expired")
            if now - max(self.came, self._session.transport.sent_at) > self._limits.idle_seconds:
                self._session.tell_error("nothing came or went for too long", "session_idle_timeout", "invalid_request_error")
                raise Closed(EXPIRED, "idle")
