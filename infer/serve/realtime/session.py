"""A Realtime session: what a client's events do, whatever carries them.

client's events --> handle --> configuration, items, input buffer --> turns --> responses --> send
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from infer.serve.host import EngineHost
from infer.serve.logs import SessionLog
from infer.serve.metrics import Metrics
from infer.serve.realtime import protocol
from infer.serve.realtime.configuration import Configuration, Voices, check_modalities, shown, updated
from infer.serve.realtime.dialogue import Dialogue, turns_of
from infer.serve.realtime.hearing import Hearing
from infer.serve.realtime.items import Item, Items, Part, from_base64, read_item
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.protocol import Event, ProtocolError, new_id
from infer.serve.realtime.response import Response, Wanted
from infer.serve.realtime.transcripts import Transcripts
from infer.serve.realtime.vad import VoiceActivity
from infer.serve.settings import ServeSettings
from omni.errors import UserError

CHANGEABLE = ("instructions", "output_modalities", "audio", "max_output_tokens", "tools", "tool_choice", "omni")
"""Fields of the configuration that `response.create` may change for its response."""


class Transport(Protocol):
    """What carries a session.

    Attributes:
        sound_in_events: sound goes out as events.
    """

    sound_in_events: bool

    def put(self, event: Event) -> None:
        """Send an event; waits for nobody."""

    def end(self, reason: str) -> None:
        """Close it, once what was put before has gone."""

    def outlet(self, rate: int, emit: Callable[[np.ndarray], None]) -> Outlet:
        """Where the sound of a new answer goes, at this rate or another one of its own; `emit` is called with what goes."""


class RealtimeSession:
    """One client's session.

    Args:
        vad: the voice activity of all sessions.
        configuration: how it begins.
        wants_omni: the client takes this project's own events (`omni.…`).

    Attributes:
        items: the conversation.
        response: the last response of the conversation.
        ducked: its sound is softer, because somebody speaks.
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
        self.wants_omni = wants_omni
        self.log = SessionLog(self.id)
        self.configuration = configuration or Configuration()
        self.items = Items()
        self.response: Response | None = None
        self.ducked = False
        self.expires_at = int(time.time() + settings.limits.session_seconds)
        self._host = host
        self._dialogue = Dialogue(host)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beside: set[Response] = set()  # responses out of band
        self._waits: Wanted | None = None  # a turn that came while an answer was under way that it does not interrupt
        self.hearing = Hearing(self, vad)
        self.transcripts = Transcripts(self, host)
        self._handlers: dict[str, Callable[[Any], Any]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._create_item,
            "conversation.item.delete": self._delete_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.truncate": self._truncate_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
            "output_audio_buffer.clear": self._clear_output,
        }

    # --- events out ---------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Send an event, with an id of its own."""
        self.transport.put({"event_id": new_id("event"), **event})

    def begin(self) -> None:
        """The first event."""
        self.send({"type": "session.created", "session": self._shown()})

    def _shown(self) -> Event:
        return shown(self.configuration, self.voices, self.id, self.expires_at)

    def rate_limits(self) -> list[Event]:
        limit = self.settings.limits.key_events
        return [{"name": "requests", "limit": limit, "remaining": limit, "reset_seconds": 60.0}]

    def tell_error(self, message: str, code: str = "server_error", kind: str = "server_error") -> None:
        """An error that no event of the client brought."""
        self.send(ProtocolError(message, code, kind=kind).event())

    # --- events in ----------------------------------------------------------------------------------------------------

    async def handle(self, text: str | bytes) -> None:
        """Do what a message of the client says; what is wrong with it is told as an `error` event."""
        event_id = None
        try:
            event, event_id = protocol.read_event(text)
            await self._handlers[event.type](event)
        except ProtocolError as error:
            self.send(error.event(getattr(error, "event_id", None) or event_id))
        except UserError as error:
            self.send(ProtocolError(str(error), "server_error", kind="server_error").event(event_id))
        except Exception as error:
            self.log.exception("an event failed")
            self.send(
                ProtocolError(f"the server failed ({type(error).__name__})", "server_error", kind="server_error").event(
                    event_id
                )
            )

    async def _update(self, event: protocol.SessionUpdate) -> None:
        found = updated(self.configuration, event.session, started=bool(self.items) or self.response is not None)
        self.configuration = found
        self.hearing.configure(found)
        self.send({"type": "session.updated", "session": self._shown()})

    async def _append(self, event: protocol.Append) -> None:
        if len(event.audio) > protocol.LONGEST_APPEND * 4 // 3 + 4:
            most = protocol.LONGEST_APPEND // 2**20
            raise ProtocolError(f"audio is longer than {most} MiB; send it in pieces", "string_above_max_length", "audio")
        await self.hearing.append(from_base64(event.audio, "audio"))

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

    def add_item(self, item: Item, after: str | None = None) -> None:
        """Put an item into the conversation, and say so."""
        self.items.add(item, after)
        before = self.items.before(item)
        self.send({"type": "conversation.item.added", "previous_item_id": before, "item": item.shown()})
        self.send({"type": "conversation.item.done", "previous_item_id": before, "item": item.shown()})

    def add_spoken(self, item_id: str, sound: np.ndarray) -> Item:
        """A user's item of committed sound [S] at 24 kHz, with its events."""
        item = Item("message", "user", id=item_id, content=[Part("input_audio", None, sound)])
        last = list(self.items)[-1].id if len(self.items) else None
        self.send({"type": "input_audio_buffer.committed", "previous_item_id": last, "item_id": item.id})
        self.add_item(item)
        if self.configuration.audio.input.transcription is not None or self.configuration.type == "transcription":
            self.transcripts.add(item)
        return item

    def drop(self, item: Item) -> None:
        """Take an item out that nobody was told of."""
        if item in list(self.items):
            self.items.remove(item)

    async def _create_item(self, event: protocol.ItemCreate) -> None:
        self.add_item(read_item(event.item), event.previous_item_id)

    async def _delete_item(self, event: protocol.ItemDelete) -> None:
        item = self.items.find(event.item_id, "item_delete_invalid_item_id")
        if self.response is not None and self.response.item is item:
            await self.response.stop("client_cancelled")
        self.drop(item)
        self.send({"type": "conversation.item.deleted", "item_id": event.item_id})

    async def _retrieve_item(self, event: protocol.ItemRetrieve) -> None:
        item = self.items.find(event.item_id, "item_retrieve_invalid_item_id")
        self.send({"type": "conversation.item.retrieved", "item": item.shown()})

    async def _truncate_item(self, event: protocol.ItemTruncate) -> None:
        item = self.items.find(event.item_id, "item_truncate_invalid_item_id")
        if item.role != "assistant" or not item.content or item.content[0].type != "output_audio" or event.content_index:
            raise ProtocolError(
                "only the sound of an assistant's message can be cut, content_index 0", "invalid_value", "item_id"
            )
        response = self.response if self.response is not None and self.response.item is item else None
        sent = response.outlet.sent if response is not None else item.sent
        if event.audio_end_ms > sent * 1000 + 1:
            raise ProtocolError(
                f"audio_end_ms is {event.audio_end_ms}, but only {sent * 1000:.0f} ms of this item were sent",
                "invalid_value",
                "audio_end_ms",
            )
        if response is not None:
            await response.stop("client_cancelled")
        await self.cut(item, event.audio_end_ms / 1000)
        cut = {"item_id": item.id, "content_index": 0, "audio_end_ms": event.audio_end_ms}
        self.send({"type": "conversation.item.truncated", **cut})

    async def cut(self, item: Item, heard: float) -> None:
        """Cut an answer in the history to the seconds that were heard, and its transcript with it."""
        if item.answer is None or (item.heard is not None and heard >= item.heard):
            return
        item.heard = heard
        await self._dialogue.cut(item, heard, self._host.engine.frame_rate)
        item.status = "incomplete"
        item.content[0].text = item.answer.text or ""

    # --- responses ----------------------------------------------------------------------------------------------------

    @property
    def sample_rate(self) -> int:
        """Of the engine's sound, in Hz."""
        rate: int = self._host.engine.sample_rate
        return rate

    @property
    def active(self) -> Response | None:
        """The conversation's response that is under way."""
        return self.response if self.response is not None and not self.response.over.is_set() else None

    @property
    def playing(self) -> bool:
        """Whether an answer is heard, or about to be."""
        return self.active is not None or (self.response is not None and self.response.outlet.ahead() > 0)

    def options_of(self, wanted: Configuration) -> dict[str, Any]:
        """Keywords of the engine's session for a configuration."""
        answering = self.settings.answering
        options = answering.keywords()
        if wanted.omni.temperature is not None:
            options["temperature"] = wanted.omni.temperature
        if wanted.max_output_tokens != "inf":
            options["max_new_tokens"] = wanted.max_output_tokens
        options["adapter"] = self.voices.adapter(wanted.audio.output.voice)
        options["system"] = wanted.instructions if answering.use_instructions else ""
        return options

    async def _create_response(self, event: protocol.ResponseCreate) -> None:
        if self.configuration.type == "transcription":
            raise ProtocolError("a transcription session writes down what it hears and answers nothing", "invalid_session_type")
        given = event.response or {}
        configuration = self._configured(given)
        alone = given.get("conversation") == "none"
        if given.get("conversation") not in (None, "auto", "none"):
            shown = repr(given["conversation"])[:60]
            raise ProtocolError(f"response.conversation is {shown}; use 'auto' or 'none'", param="response.conversation")
        items = self._read_input(given["input"]) if given.get("input") is not None else list(self.items)
        before, question = turns_of(items)
        wanted = Wanted(configuration, before, question, not alone, _metadata(given.get("metadata")))
        if not alone and self.active is not None:
            raise ProtocolError(
                f"the conversation has an active response, {self.active.id}; wait for response.done, or cancel it",
                "conversation_already_has_active_response",
            )
        if alone and len(self._beside) + 1 >= self.settings.limits.responses:
            most = self.settings.limits.responses
            raise ProtocolError(f"{most} responses of this session are under way; wait for one", "rate_limit_exceeded")
        self.respond(wanted)

    def _configured(self, given: Event) -> Configuration:
        """The session's configuration with what a response changes."""
        change = {name: given[name] for name in CHANGEABLE if given.get(name) is not None}
        if isinstance(change.get("audio"), dict):
            change["audio"] = {"output": change["audio"].get("output") or {}}
        try:
            found = updated(self.configuration, change, started=True)
        except ProtocolError as error:
            place = (error.param or "").replace("session", "response", 1)
            raise ProtocolError(str(error).replace("session.", "response.", 1), error.code, place) from None
        check_modalities(found.output_modalities, "response.output_modalities")
        return found

    def _read_input(self, given: Any) -> list[Item]:
        """Items of a response's own input; references are looked up in the conversation."""
        if not isinstance(given, list):
            raise ProtocolError("response.input must be a list of items", param="response.input")
        found = []
        for number, one in enumerate(given):
            if isinstance(one, dict) and one.get("type") == "item_reference":
                found.append(self.items.find(str(one.get("id")), "item_reference_invalid_item_id"))
            else:
                found.append(read_item(one, f"response.input.{number}"))
        return found

    def respond(self, wanted: Wanted) -> None:
        """Begin a response."""
        if not wanted.conversation:
            dialogue = Dialogue(self._host)
            beside = Response(self, dialogue, wanted)
            self._beside.add(beside)
            self.spawn(self._run_beside(beside, dialogue))
            return
        self.response, self.ducked = Response(self, self._dialogue, wanted), False
        self.items.add(self.response.item)
        self.spawn(self._run(self.response))

    async def _run(self, response: Response) -> None:
        await response.run()
        self.metrics.answered(response)
        self.hearing.answered()
        waits, self._waits = self._waits, None
        if waits is not None:
            self.respond_to_turn(waits.endpointing)

    async def _run_beside(self, response: Response, dialogue: Dialogue) -> None:
        try:
            await response.run()
        finally:
            self._beside.discard(response)
            await dialogue.close()

    def respond_to_turn(self, endpointing: float | None) -> None:
        """Answer the turn that was just committed, or once the answer under way has ended."""
        before, question = turns_of(self.items)
        wanted = Wanted(self.configuration, before, question, endpointing=endpointing)
        if self.active is not None:
            self._waits = wanted
        elif question is not None:
            self.respond(wanted)

    async def interrupt(self) -> None:
        """Somebody speaks: what plays ends, and the history is cut to what was heard."""
        response = self.response
        if response is None:
            return
        if not response.over.is_set():
            await response.stop("turn_detected")
        elif response.outlet.ahead() > 0:
            heard = response.outlet.heard
            response.outlet.clear()
            await self.cut(response.item, heard)

    async def _cancel_response(self, event: protocol.ResponseCancel) -> None:
        under_way = [one for one in (self.active, *self._beside) if one is not None]
        found = [one for one in under_way if event.response_id in (None, one.id)]
        if not found:
            named = f" {event.response_id[:80]!r}" if event.response_id else ""
            raise ProtocolError(f"Cancellation failed: no active response{named} found", "response_cancel_not_active")
        await found[0].stop("client_cancelled")

    async def _clear_output(self, event: protocol.OutputClear) -> None:
        if self.transport.sound_in_events:
            raise ProtocolError(
                "output_audio_buffer.clear is for WebRTC; cancel the response and truncate its item", "invalid_event"
            )
        if self.response is not None:
            self.response.outlet.clear()

    def first_audio(self, response: Response) -> None:
        """Note that an answer's first sound was sent."""
        self.metrics.first_audio(response)
        if self.wants_omni:
            endpointing = response.wanted.endpointing
            self.send(
                {
                    "type": "omni.timings",
                    "item_id": response.item.id,
                    "response_id": response.id,
                    "endpointing_ms": None if endpointing is None else round(endpointing * 1000),
                    "first_audio_ms": None if response.first_audio is None else round(response.first_audio * 1000),
                }
            )

    # --- the end ------------------------------------------------------------------------------------------------------

    def spawn(self, work: Any) -> None:
        """Run a coroutine beside the others of this session; its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log.error("a task of the session failed", exc_info=task.exception())

    def end(self, reason: str) -> None:
        """Have the transport end the session, once what was sent before has gone."""
        self.transport.end(reason)

    async def close(self) -> None:
        """End all of it, and free its slot."""
        for response in (self.response, *self._beside):
            if response is not None:
                response.silence()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._dialogue.close()


def _metadata(given: Any) -> dict[str, str] | None:
    """A response's metadata; ProtocolError where it is none."""
    if given is None:
        return None
    texts = isinstance(given, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in given.items())
    if not texts or len(given) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in given.items()):
        raise ProtocolError(
            "response.metadata must have at most 16 texts of at most 512 characters, under names of at most 64",
            param="response.metadata",
        )
    return dict(given)
