"""A small server of the Realtime API that hears nothing and always says the same, and that can be bent to break any point."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

Event = dict[str, Any]

SAYS = ("zero", " three", " six")
STEP = 0.01
"""Seconds between two deltas."""

CONFIGURATION: Event = {
    "type": "realtime", "model": "fake", "instructions": "", "output_modalities": ["audio"], "max_output_tokens": "inf",
    "tools": [], "tool_choice": "auto", "tracing": None, "truncation": "auto",
    "audio": {
        "input": {"format": {"type": "audio/pcm", "rate": 24000}, "noise_reduction": None, "transcription": None,
                  "turn_detection": {"type": "server_vad", "create_response": True, "interrupt_response": True}},
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "default", "speed": 1.0},
    },
}  # fmt: skip
WHOLE = ("format", "turn_detection", "transcription", "tool_choice")


class HangUp(Exception):
    """The server closes the connection."""


class Wrong(Exception):
    """An event of the client is answered by an error with this code."""


class FakeServer:
    """An async context manager whose value is the server's address.

    Args:
        out: changes what is sent: an event to the events that go in its place.
        into: changes what comes; None for nothing; raises Wrong or HangUp.
        subprotocols: whether one is selected.
    """

    def __init__(
        self,
        out: Callable[[Event], list[Event]] = lambda event: [event],
        into: Callable[[Event], Event | None] = lambda event: event,
        subprotocols: bool = True,
    ) -> None:
        self.out, self.into, self.subprotocols = out, into, subprotocols

    async def __aenter__(self) -> str:
        self._server = await serve(self._talk, "127.0.0.1", 0, max_size=None, compression=None, select_subprotocol=self._select)
        return f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _select(self, socket: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
        return Subprotocol("realtime") if self.subprotocols and "realtime" in offered else None

    async def _talk(self, socket: ServerConnection) -> None:
        session = FakeSession(self, socket)
        try:
            await session.run()
        except (HangUp, ConnectionClosed):
            pass
        finally:
            if session.speaking is not None:
                session.speaking.cancel()


class FakeSession:
    """One session."""

    def __init__(self, server: FakeServer, socket: ServerConnection) -> None:
        self.server, self.socket = server, socket
        self.configuration = copy.deepcopy(CONFIGURATION)
        self.items: list[Event] = []
        self.lengths: dict[str, int] = {}  # milliseconds of answers
        self.buffer, self.heard, self.turn, self.quiet = b"", 0, "", 0
        self.speaking: asyncio.Task[None] | None = None
        self.why: str | None = None
        self.numbers = itertools.count(1)

    def new(self, kind: str) -> str:
        return f"{kind}_{next(self.numbers)}"

    async def send(self, kind: str, **values: Any) -> None:
        for event in self.server.out(copy.deepcopy({"type": kind, "event_id": self.new("event"), **values})):
            await self.socket.send(json.dumps(event))

    async def run(self) -> None:
        await self.send("session.created", session={"id": "sess_1", "object": "realtime.session", **self.configuration})
        async for message in self.socket:
            event: Any = None
            try:
                try:
                    event = json.loads(message)
                except ValueError:
                    raise Wrong("invalid_json") from None
                if not isinstance(event, dict):
                    raise Wrong("invalid_json")
                changed = self.server.into(copy.deepcopy(event))
                if changed is not None:
                    await self.handle(changed)
            except Wrong as wrong:
                message = "Cancellation failed: nothing is active" if "cancel" in str(wrong) else "it is wrong"
                error = {"type": "invalid_request_error", "code": str(wrong), "message": message}
                given = event.get("event_id") if isinstance(event, dict) else None
                await self.send("error", error=error | ({"event_id": given} if given else {}))

    async def handle(self, event: Event) -> None:
        done = getattr(self, "on_" + event["type"].replace(".", "_"), None)
        if done is None:
            raise Wrong("invalid_event_type")
        await done(event)

    # --- configuration and sound --------------------------------------------------------------------------------------

    async def on_session_update(self, event: Event) -> None:
        if event["session"].get("output_modalities", ["audio"]) not in (["audio"], ["text"]):
            raise Wrong("invalid_value")
        self.configuration = merged(self.configuration, event["session"])
        detection = self.configuration["audio"]["input"]["turn_detection"]
        if detection is not None:
            detection |= {"create_response": True, "interrupt_response": True} | detection
        await self.send("session.updated", session={"id": "sess_1", "object": "realtime.session", **self.configuration})

    async def on_input_audio_buffer_append(self, event: Event) -> None:
        try:
            sound = base64.b64decode(event["audio"], validate=True)
        except ValueError:
            raise Wrong("invalid_value") from None
        self.buffer += sound
        self.heard += len(sound) // 48
        detection = self.configuration["audio"]["input"]["turn_detection"]
        if detection is None:
            return
        loud = np.abs(np.frombuffer(sound, "<i2")).max(initial=0) > 1000
        self.quiet = 0 if loud else self.quiet + 1
        if loud and not self.turn:
            self.turn = self.new("item")
            await self.send("input_audio_buffer.speech_started", item_id=self.turn, audio_start_ms=self.heard - 40)
            if detection["interrupt_response"]:
                await self.stop("turn_detected")
        elif self.turn and self.quiet == 2:
            await self.send("input_audio_buffer.speech_stopped", item_id=self.turn, audio_end_ms=self.heard)
            item_id, self.turn = self.turn, ""
            await self.commit(item_id)
            if detection["create_response"]:
                if self.speaking is not None:
                    await self.speaking
                await self.on_response_create({})

    async def on_input_audio_buffer_clear(self, event: Event) -> None:
        self.buffer = b""
        await self.send("input_audio_buffer.cleared")

    async def on_input_audio_buffer_commit(self, event: Event) -> None:
        if not self.buffer:
            raise Wrong("input_audio_buffer_commit_empty")
        await self.commit(self.new("item"))

    async def commit(self, item_id: str) -> None:
        pcm = self.configuration["audio"]["input"]["format"]["type"] == "audio/pcm"
        seconds, self.buffer = len(self.buffer) / (48000 if pcm else 8000), b""
        await self.send("input_audio_buffer.committed", item_id=item_id)
        part = {"type": "input_audio", "transcript": None}
        await self.add({"id": item_id, "type": "message", "role": "user", "content": [part]})
        if self.configuration["audio"]["input"]["transcription"] is not None:
            part["transcript"] = "it buzzes"
            usage = {"type": "duration", "seconds": seconds}
            name = "conversation.item.input_audio_transcription.completed"
            await self.send(name, item_id=item_id, content_index=0, transcript="it buzzes", usage=usage)

    # --- items --------------------------------------------------------------------------------------------------------

    def find(self, item_id: str | None, code: str) -> Event:
        for item in self.items:
            if item["id"] == item_id:
                return item
        raise Wrong(code)

    async def add(self, item: Event, after: str | None = None, done: bool = True) -> None:
        place = len(self.items)
        if after is not None:
            place = 0 if after == "root" else self.items.index(self.find(after, "invalid_previous_item_id")) + 1
        self.items.insert(place, item)
        before = self.items[place - 1]["id"] if place else None
        for kind in ("added", "done")[: 1 + done]:
            await self.send(f"conversation.item.{kind}", item=item, previous_item_id=before)

    async def on_conversation_item_create(self, event: Event) -> None:
        item = {"id": self.new("item"), "object": "realtime.item", **event["item"]}
        if any(one["id"] == item["id"] for one in self.items):
            raise Wrong("item_create_duplicate_item_id")
        for part in item.get("content", []):
            if part.pop("audio", None) is not None:
                part["transcript"] = None
        await self.add(item, event.get("previous_item_id"))

    async def on_conversation_item_retrieve(self, event: Event) -> None:
        item = self.find(event["item_id"], "item_retrieve_invalid_item_id")
        await self.send("conversation.item.retrieved", item=item)

    async def on_conversation_item_delete(self, event: Event) -> None:
        self.items.remove(self.find(event["item_id"], "item_delete_invalid_item_id"))
        await self.send("conversation.item.deleted", item_id=event["item_id"])

    async def on_conversation_item_truncate(self, event: Event) -> None:
        item, until = self.find(event["item_id"], "item_truncate_invalid_item_id"), event["audio_end_ms"]
        length = self.lengths[item["id"]]
        if until > length:
            raise Wrong("invalid_value")
        words = item["content"][0]["transcript"].split()
        item["content"][0]["transcript"] = " ".join(words[: len(words) * until // length])
        await self.send("conversation.item.truncated", item_id=item["id"], content_index=0, audio_end_ms=until)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def stop(self, why: str) -> None:
        if self.speaking is not None and not self.speaking.done():
            self.why = why
            await self.speaking

    async def on_response_cancel(self, event: Event) -> None:
        if self.speaking is None or self.speaking.done():
            raise Wrong("response_cancel_not_active")
        await self.stop("client_cancelled")

    async def on_response_create(self, event: Event) -> None:
        if self.speaking is not None and not self.speaking.done():
            raise Wrong("conversation_already_has_active_response")
        self.why = None
        self.speaking = asyncio.create_task(self.answer(event.get("response") or {}))

    async def answer(self, wanted: Event) -> None:
        now = merged(self.configuration, wanted)
        spoken, alone = now["output_modalities"] == ["audio"], wanted.get("conversation") == "none"
        part, kind = ("transcript", "output_audio_transcript") if spoken else ("text", "output_text")
        response: Event = {"id": self.new("resp"), "object": "realtime.response", "status": "in_progress", "output": []}
        if "metadata" in wanted:
            response["metadata"] = wanted["metadata"]
        if not alone:
            response["conversation_id"] = "conv_1"
        await self.send("response.created", response=response)
        limits = [{"name": "requests", "limit": 9, "remaining": 9, "reset_seconds": 1.0}]
        await self.send("rate_limits.updated", rate_limits=limits)
        content: Event = {"type": "output_audio" if spoken else "output_text", part: ""}
        item: Event = {"id": self.new("item"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        where = {"response_id": response["id"], "output_index": 0}
        await self.send("response.output_item.added", item=item, **where)
        if not alone:
            await self.add(item, done=False)
        item["content"] = [content]
        within = {**where, "item_id": item["id"], "content_index": 0}
        shown = {"type": "audio" if spoken else "text"}
        await self.send("response.content_part.added", part={**shown, part: ""}, **within)
        pcm = now["audio"]["output"]["format"]["type"] == "audio/pcm"
        piece = base64.b64encode(bytes(960 if pcm else 160)).decode()  # 20 ms
        says = SAYS * 30 if "Count" in json.dumps(self.items[-2:]) else SAYS
        limited = now["max_output_tokens"] != "inf" and now["max_output_tokens"] < len(says)
        for word in says[:1] if limited else says:
            if self.why is not None:
                break
            content[part] += word
            await self.send(f"response.{kind}.delta", delta=word, **within)
            if spoken:
                await self.send("response.output_audio.delta", delta=piece, **within)
                self.lengths[item["id"]] = self.lengths.get(item["id"], 0) + 20
            await asyncio.sleep(STEP)
        if spoken:
            await self.send("response.output_audio.done", **within)
        await self.send(f"response.{kind}.done", **{part: content[part]}, **within)
        await self.send("response.content_part.done", part={**shown, part: content[part]}, **within)
        status = "cancelled" if self.why else "incomplete" if limited else "completed"
        item["status"] = "completed" if status == "completed" else "incomplete"
        if not alone:
            await self.send("conversation.item.done", item=item)
        await self.send("response.output_item.done", item=item, **where)
        if status != "completed":
            response["status_details"] = {"type": status, "reason": self.why or "max_output_tokens"}
        usage = {"total_tokens": 2, "input_tokens": 1, "output_tokens": 1, "input_token_details": {"cached_tokens": 0}}
        await self.send("response.done", response={**response, "status": status, "output": [item], "usage": usage})


def merged(now: Event, change: Event) -> Event:
    """The configuration with a change's fields in their places."""
    out = {**now}
    for key, value in change.items():
        deeper = isinstance(value, dict) and isinstance(now.get(key), dict) and key not in WHOLE
        out[key] = merged(now[key], value) if deeper else copy.deepcopy(value)
    return out


@contextlib.contextmanager
def running(server: Any) -> Iterator[Any]:
    """A server in a thread, and its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
