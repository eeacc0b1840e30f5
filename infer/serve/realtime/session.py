"""A Realtime session: what a client's events do, whatever carries them.

client's events --> handle --> configuration, items, input buffer --> turns --> responses --> send
"""

from __future__ import annotations

import asyncio
import time
import weakref

from infer.serve.realtime import protocol
from infer.serve.realtime.configuration import ignored, shown, updated
from infer.serve.realtime.hearing import SessionInput, Transcripts
from infer.serve.realtime.protocol import Event, ProtocolError, as_protocol_error
from infer.serve.realtime.responses import Responses
from infer.serve.realtime.state import SessionState, from_base64, read_item
from omni.errors import UserError


class RealtimeSession(SessionState):
    """One client's session, from its events: `responses` are its answers, `hearing` is its input."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expires_at = int(time.time() + self.settings.limits.session_seconds)
        me = weakref.proxy(self)  # of its parts: a session is in no cycle, and is freed when its transport lets it go
        self.responses = Responses(me)
        self.transcripts = Transcripts(me, self.responses)
        self.hearing = SessionInput(me, self.responses, self.transcripts)
        self.answered = self.hearing.answered

    def begin(self) -> None:
        """Send the first event."""
        session = shown(self.configuration, self.voices, self.id, self._expires_at)
        self.send({"type": "session.created", "session": session})

    # --- events in ----------------------------------------------------------------------------------------------------

    async def handle(self, text: str | bytes) -> None:
        """Do what a message of the client says; what is wrong with it is told as an `error` event."""
        event_id = None
        try:
            protocol.check_costly(text)
            message = protocol.read_json(text, "the message")
            if not isinstance(message, dict):
                raise ProtocolError(f"the message is a JSON {type(message).__name__}; send an object", "invalid_json")
            event_id = message.get("event_id")
            await self._act(protocol.read_event(message))
        except Exception as error:
            if not isinstance(error, (ProtocolError, UserError)):
                self.log.exception("an event failed")
            known = isinstance(event_id, str) and len(event_id) <= 512
            self.send(as_protocol_error(error).event(event_id if known else None))

    async def _act(self, event: protocol.ClientEvent) -> None:
        match event:
            case protocol.SessionUpdate():
                self._update(event.session)
            case protocol.Append():
                await self.hearing.append(from_base64(event.audio, "audio"))
            case protocol.Bare(type="input_audio_buffer.commit"):
                self.hearing.commit()
            case protocol.Bare(type="input_audio_buffer.clear"):
                self.hearing.clear()
                self.send({"type": "input_audio_buffer.cleared"})
            case protocol.Bare():
                await self.responses.clear_output()
            case protocol.ItemCreate():
                self.add_item(read_item(event.item, self.longest), event.previous_item_id)
            case protocol.ItemNamed(type="conversation.item.delete"):
                item = self.items.find(event.item_id, "item_delete_invalid_item_id")
                if (last := self.responses.of(item)) is not None:
                    await last.stop("client_cancelled")
                self.items.discard(item)
                self.send({"type": "conversation.item.deleted", "item_id": event.item_id})
            case protocol.ItemNamed():
                await self._retrieve_item(event)
            case protocol.ItemTruncate():
                await self._truncate_item(event)
            case protocol.ResponseCreate():
                self.responses.create(event.response or protocol.ResponseOptions())
            case protocol.ResponseCancel():
                await self.responses.cancel(event.response_id)

    def _update(self, change: Event) -> None:
        started = bool(self.items) or self.responses.last is not None
        self.configuration = updated(self.configuration, change, started)
        self.hearing.configure()
        session = shown(self.configuration, self.voices, self.id, self._expires_at)
        if unused := ignored(change, session):
            session["omni"]["ignored"] = unused
        self.send({"type": "session.updated", "session": session})

    async def _retrieve_item(self, event: protocol.ItemNamed) -> None:
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
        response, end_ms = self.responses.of(item), event.audio_end_ms
        sent = item.sent if response is None else response.outlet.sent
        if not self.transport.sound_in_events:  # it is known here what was played
            end_ms = min(end_ms, int((sent if response is None else response.outlet.heard) * 1000))
        elif end_ms > sent * 1000 + 1:
            message = f"audio_end_ms is {end_ms}, but only {sent * 1000:.0f} ms of this item were sent"
            raise ProtocolError(message, param="audio_end_ms")
        if response is not None:
            await response.stop("client_cancelled")
            response.outlet.clear()
        await self.responses.cut(item, end_ms / 1000)
        item.cut_ms = end_ms if item.cut_ms is None else min(item.cut_ms, end_ms)
        cut = {"item_id": item.id, "content_index": 0, "audio_end_ms": item.cut_ms}
        self.send({"type": "conversation.item.truncated", **cut})

    async def close(self) -> None:
        """End all of it, and free its slot."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.transcripts.close()
        await self.responses.close()
