"""Faults of a server of the Realtime API: one for each point of the conformance kit."""

from __future__ import annotations

import base64
import json

from tests.realtime.fake_server import Event, HangUp, Wrong


def drop(kind: str) -> dict:
    return {"out": lambda event: [] if event["type"] == kind else [event]}


def before(kind: str, other: Event) -> dict:
    return {"out": lambda event: [{"event_id": "event_0", **other}, event] if event["type"] == kind else [event]}


def put(kind: str, path: str, value: object) -> dict:
    """Events of a type have another value at a path; ... for none."""

    def out(event: Event) -> list[Event]:
        if event["type"] == kind:
            *keys, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
            place = event
            for key in keys:
                place = place[key]
            if value is ...:
                place.pop(last, None)
            else:
                place[last] = value
        return [event]

    return {"out": out}


def loud(event: Event) -> list[Event]:
    """Two seconds of sound in each delta."""
    return [{**event, "delta": base64.b64encode(bytes(96_000)).decode()} if "audio.delta" in event["type"] else event]


def hang_up(event: Event) -> list[Event]:
    if event["type"] == "error":
        raise HangUp
    return [event]


def deaf(kind: str) -> dict:
    return {"into": lambda event: None if event.get("type") == kind else event}


def refuse(word: str, code: str = "invalid_value") -> dict:
    """Events that name something are refused."""

    def into(event: Event) -> Event:
        if word in json.dumps(event):
            raise Wrong(code)
        return event

    return {"into": into}


def short(event: Event) -> Event:
    if len(event.get("audio", "")) > 2**20:
        raise HangUp
    return event


def reset(event: Event) -> Event:
    """Updates put the instructions back that they do not name."""
    if event.get("type") == "session.update":
        event["session"].setdefault("instructions", "")
    return event


def take(kind: str, *unheard: str, **other: object) -> dict:
    """Events of a type are taken with other values, and without some."""

    def into(event: Event) -> Event:
        if event.get("type") == kind:
            inner = next((event[name] for name in ("session", "item") if name in event), event)
            for name in unheard:
                inner.pop(name, None)
                event.pop(name, None)
            inner.update(other)
        return event

    return {"into": into}


def detect(**other: object) -> dict:
    """Turn detection is taken with other values."""

    def into(event: Event) -> Event:
        detection = event.get("session", {}).get("audio", {}).get("input", {}).get("turn_detection")
        if detection:
            detection.update(other)
        return event

    return {"into": into}


WRITTEN_DOWN = "conversation.item.input_audio_transcription.completed"
ITEM = "conversation.item"

FAULTS = {
    "created": (before("session.created", {"type": "rate_limits.updated"}), "the first event is another one"),
    "early-events": (deaf("input_audio_buffer.append") | drop("response.done"), "no response.done"),
    "echo": (put("session.updated", "session.audio.output.voice", ...), "no session.audio.output.voice"),
    "update-parts": ({"into": reset}, "session.instructions was changed as well"),
    "detection-echo": (put("session.updated", "session.audio.input.turn_detection.interrupt_response", ...), "interrupt"),
    "detection-off": (put("session.updated", "session.audio.input.turn_detection", {"type": "server_vad"}), "not null"),
    "semantic-vad": (detect(type="server_vad"), "not \"semantic_vad\""),
    "rate": (put("session.created", "session.audio.output.format.rate", 16000), "is 16000, not 24000"),
    "harmless-settings": (refuse("tracing"), "error came instead of session.updated"),
    "unknown-names": (refuse("marin"), "error came instead of session.updated"),
    "tools": (put("session.updated", "session.tools", []), "no session.tools.0.name"),
    "subprotocol": ({"subprotocols": False}, "the subprotocol None"),
    "unknown-event": ({"out": hang_up}, "closed the connection"),
    "bad-json": ({"out": hang_up}, "closed the connection"),
    "bad-sound": (drop("error"), "no error came"),
    "error-event-id": (put("error", "error.event_id", ...), "no error.event_id"),
    "refused-update": (take("session.update", "output_modalities"), "session.updated came instead of error"),
    "cancel-code": (put("error", "error.code", "invalid"), "not 'response_cancel_not_active'"),
    "cancel-message": (put("error", "error.message", "no"), "begins otherwise"),
    "second-response": (put("error", "error.code", "busy"), "not 'conversation_already_has_active_response'"),
    "empty-commit": (put("error", "error.code", "empty"), "not 'input_audio_buffer_commit_empty'"),
    "duplicate-item": (take(f"{ITEM}.create", "id"), f"{ITEM}.added came instead of error"),
    "unknown-item": (put("error", "error.code", "gone"), "not 'item_retrieve_invalid_item_id'"),
    "item-ids": (take(f"{ITEM}.create", "id"), "not \"item_of_mine\""),
    "item-order": (take(f"{ITEM}.create", "previous_item_id"), "previous_item_id of item 'zero'"),
    "unknown-previous": (take(f"{ITEM}.create", "previous_item_id"), f"{ITEM}.added came instead of error"),
    "retrieve": (put(f"{ITEM}.retrieved", "item.content", []), "no item.content.0.type"),
    "retrieve-spoken": (put(f"{ITEM}.retrieved", "item.content.0.transcript", ...), "no item.content.0.transcript"),
    "sound-item": (refuse('"input_audio"'), "error came instead"),
    "delete": (deaf(f"{ITEM}.delete"), "no conversation.item.deleted"),
    "delete-answer": (drop(f"{ITEM}.deleted"), "no conversation.item.deleted"),
    "history": (put(f"{ITEM}.added", "item.content", [{"type": "text"}]), "not \"output_text\""),
    "function-items": (put(f"{ITEM}.retrieved", "item.arguments", "{}"), "item.arguments"),
    "truncate": (put(f"{ITEM}.retrieved", "item.content.0.transcript", "zero three six"), "is still whole"),
    "truncate-to-nothing": (put(f"{ITEM}.retrieved", "item.content.0.transcript", "zero"), "still has a transcript"),
    "truncate-cancelled": (refuse("truncate"), "error came instead"),
    "truncate-too-far": (take(f"{ITEM}.truncate", audio_end_ms=0), f"{ITEM}.truncated came instead of error"),
    "written-turn": (drop("response.content_part.done"), "response.content_part.done is missing"),
    "spoken-turn": (put("response.content_part.added", "type", "response.content_part.begun"), "added is missing"),
    "spoken-question": (put(f"{ITEM}.added", "item.content", [{"type": "input_audio"}]), "no item.content.0.transcript"),
    "content-types": (put("response.content_part.added", "part.type", "output_audio"), "part.type"),
    "ids": (put("response.output_audio.delta", "content_index", 1), "content_index"),
    "joined": (put("response.output_audio_transcript.done", "transcript", "more"), "is \"more\", not"),
    "usage": (put("response.done", "response.usage.input_token_details.cached_tokens", None), "cached_tokens is null"),
    "rate-limits": (put("rate_limits.updated", "rate_limits.0.name", "seconds"), "it names \"seconds\""),
    "lead": ({"out": loud}, "of 6.0 s, up to"),
    "in-time": (drop("response.created"), "no response.created"),
    "override": (put("session.updated", "session.output_modalities", ["text"]), "were changed as well"),
    "limit": (put("response.done", "response.status", "failed"), "did not come to its end"),
    "limited": (take("response.create", "response"), "not \"incomplete\""),
    "metadata": (put("response.done", "response.metadata", ...), "no response.metadata"),
    "beside": (put("response.done", "response.conversation_id", "conv_1"), "it has a conversation_id"),
    "own-input": (refuse("item_reference"), "error came instead"),
    "text-only": (take("session.update", "output_modalities"), "response.output_audio.delta came"),
    "cancel": (deaf("response.cancel"), "no error came"),
    "clear": (deaf("input_audio_buffer.clear"), "no input_audio_buffer.cleared"),
    "large-append": ({"into": short}, "closed the connection"),
    "g711-out": (put("response.output_audio.delta", "delta", base64.b64encode(bytes(9600)).decode()), "where audio/pcm had"),
    "g711-in": (put(WRITTEN_DOWN, "usage.seconds", 9.0), "another length than 0.20 s"),
    "transcript": (put(WRITTEN_DOWN, "usage", ...), "no usage.type"),
    "transcript-kept": (put(f"{ITEM}.retrieved", "item.content.0.transcript", None), "is null, not \"it buzzes\""),
    "no-transcript": (before("response.done", {"type": WRITTEN_DOWN}), "one came"),
    "transcription-session": (put("session.updated", "session.type", "realtime"), "not \"transcription\""),
    "vad-turn": (put("input_audio_buffer.committed", "item_id", "other"), "item_id"),
    "semantic-turn": (drop("input_audio_buffer.speech_stopped"), "no input_audio_buffer.speech_stopped"),
    "no-answer": (detect(create_response=True), "response.created came"),
    "interruption": (detect(interrupt_response=False), "is \"completed\", not \"cancelled\""),
    "after-interruption": (drop("input_audio_buffer.committed"), "no input_audio_buffer.committed"),
    "no-interruption": (detect(interrupt_response=True), "it was cancelled"),
    "event-ids": (put("response.done", "event_id", "event_1"), "its id has come before"),
    "message-size": (put("session.updated", "session.instructions", "x" * 2**20), "session.updated has"),
    "no-nulls": (put("response.output_item.done", "item.call_id", None), "item.call_id is null"),
    "types": (put("response.output_item.added", "output_index", "0"), "output_index: Input should be a valid integer"),
}  # fmt: skip
"""For each point a server that breaks it, and what is said of it."""
