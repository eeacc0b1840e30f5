"""Points of an answer: the order of its events, what they hold, how it is asked for and cancelled; and of all events."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from tests.realtime.client import RATE, Came, Played, RealtimeClient, written
from tests.realtime.kit import LONG, SHORT, Kit, ManualTurn
from tests.realtime.points import PointFailed, PointNoted, PointSkipped, ServerEvent, Topic, equal, field, shortened

ANSWERS = Topic("answers")

DELTAS = {
    "response.output_audio.delta": "response.output_audio.done",
    "response.output_audio_transcript.delta": "response.output_audio_transcript.done",
    "response.output_text.delta": "response.output_text.done",
}
"""Deltas and the events that end them."""

ORDER = (
    ("response.created", "response.output_item.added"),
    ("response.output_item.added", "response.content_part.added"),
    ("conversation.item.added", "response.content_part.added"),
    *(("response.content_part.added", delta) for delta in DELTAS),
    *DELTAS.items(),
    *((end, "response.content_part.done") for end in DELTAS.values()),
    ("response.content_part.done", "conversation.item.done"),
    ("response.content_part.done", "response.output_item.done"),
    ("conversation.item.done", "response.done"),
    ("response.output_item.done", "response.done"),
)
"""Pairs of which every event of the first type comes before any of the second."""

OPTIONAL = {*DELTAS, *DELTAS.values()}
"""Types of `ORDER` that an answer may be without."""


def in_order(came: Sequence[Came]) -> None:
    """PointFailed where an event of an answer is missing, or comes in the wrong place."""
    kinds = [str(one.event.get("type")) for one in came]
    for first, second in ORDER:
        for kind in (first, second):
            if kind not in kinds and kind not in OPTIONAL:
                raise PointFailed(f"{kind} is missing", came[-1].event)
        if first in kinds and second in kinds and len(kinds) - 1 - kinds[::-1].index(first) > kinds.index(second):
            raise PointFailed(f"{second} came before {first}", came[kinds.index(second)].event)
        if (first in DELTAS) and (first in kinds) and second not in kinds:
            raise PointFailed(f"{second} is missing", came[-1].event)
    if not any(kind in DELTAS for kind in kinds):
        raise PointFailed("the answer has no delta", came[-1].event)


def question_in_order(turn: ManualTurn) -> None:
    """PointFailed where the question's item is not there before its answer."""
    item_id = field(turn.asked, "item.id", str)
    own = [one.event.get("type") for one in turn.came if (one.event.get("item") or {}).get("id") == item_id]
    if own != ["conversation.item.added", "conversation.item.done"]:
        raise PointFailed(f"the events of the question's item are {shortened(own)}", turn.asked)
    events = [one.event for one in turn.came]
    if events.index(turn.asked) > events.index(turn.answer.created):
        raise PointFailed("the answer began before its question was told", turn.asked)


@ANSWERS.point("clients build an answer up from its events; one that is missing or early is dropped")
async def written_turn(kit: Kit) -> None:
    """A written question and its answer come with all their events, in order."""
    turn = await kit.written()
    question_in_order(turn)
    in_order(turn.answer.came)


@ANSWERS.point("clients build an answer up from its events; one that is missing or early is dropped")
async def spoken_turn(kit: Kit) -> None:
    """Sound that the client commits and its answer come with all their events, in order."""
    turn = await kit.spoken()
    question_in_order(turn)
    in_order(turn.answer.came)
    kinds = [one.event.get("type") for one in turn.came]
    if kinds.index("input_audio_buffer.committed") > kinds.index("conversation.item.added"):
        raise PointFailed("input_audio_buffer.committed came after the item", turn.asked)


@ANSWERS.point("strict clients throw on the missing key, and their connection dies")
async def spoken_question(kit: Kit) -> None:
    """A spoken question's item has one input_audio content, with the key transcript (null while it is not known)."""
    asked = (await kit.spoken()).asked
    equal(asked, "item.type", "message")
    equal(asked, "item.role", "user")
    equal(asked, "item.content.0.type", "input_audio")
    field(asked, "item.content.0.transcript")


async def answers(kit: Kit) -> list[Played]:
    """The answers of both turns."""
    return [(await kit.written()).answer, (await kit.spoken()).answer]


@ANSWERS.point("the two have different names, and typed clients drop the event with the wrong one")
async def content_types(kit: Kit) -> None:
    """A part is of the type audio or text, an item's content output_audio or output_text."""
    for played in await answers(kit):
        part = field(played.first("response.content_part.added"), "part.type")
        if part not in ("audio", "text"):
            raise PointFailed(f"part.type is {shortened(part)}", played.first("response.content_part.added"))
        equal(played.first("response.content_part.done"), "part.type", part)
        for kind in ("response.output_item.done", "conversation.item.done"):
            equal(played.first(kind), "item.content.0.type", f"output_{part}")
        equal(played.done, "response.output.0.content.0.type", f"output_{part}")


@ANSWERS.point("clients find the text and the sound of an answer by them")
async def ids(kit: Kit) -> None:
    """Every event of an answer names its response, item, output_index and content_index."""
    parts = {"response.content_part.added", "response.content_part.done", *DELTAS, *DELTAS.values()}
    for played in await answers(kit):
        response_id, item_id = field(played.created, "response.id"), played.item_id
        for one in played.came:
            kind = one.event.get("type")
            if kind in parts:
                for name, wanted in (("item_id", item_id), ("output_index", 0), ("content_index", 0)):
                    equal(one.event, name, wanted)
            if kind in ("response.output_item.added", "response.output_item.done"):
                equal(one.event, "response_id", response_id)
                equal(one.event, "item.id", item_id)
        equal(played.done, "response.output.0.id", item_id)


@ANSWERS.point("captions differ from what is kept")
async def joined(kit: Kit) -> None:
    """The deltas of a text, joined, are the text of its end, of its part and of its item."""
    for played in await answers(kit):
        for kind, name in (("response.output_audio_transcript", "transcript"), ("response.output_text", "text")):
            if not played.of(f"{kind}.done"):
                continue
            whole = played.joined(f"{kind}.delta")
            equal(played.first(f"{kind}.done"), name, whole)
            equal(played.first("response.content_part.done"), f"part.{name}", whole)
            equal(played.first("response.output_item.done"), f"item.content.0.{name}", whole)


@ANSWERS.point("a client that reads null for a number drops the event, and never asks for an answer again")
async def usage(kit: Kit) -> None:
    """response.done has a usage whose numbers are all numbers."""
    for played in await answers(kit):
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            field(played.done, f"response.usage.{name}", int)
        for path, value in leaves(field(played.done, "response.usage", dict)):
            if not isinstance(value, int | float):
                raise PointFailed(f"response.usage.{path} is {shortened(value)}", played.done)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The values in a structure that are no dicts and lists, with their paths."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path, value
        return
    for key, one in inner:
        yield from leaves(one, f"{path}.{key}" if path else str(key))


@ANSWERS.point("typed clients refuse the event")
async def rate_limits(kit: Kit) -> None:
    """rate_limits.updated, where it is sent, names only requests and tokens."""
    turns = (await kit.written(), await kit.spoken())
    told = [one.event for turn in turns for one in turn.came if one.event.get("type") == "rate_limits.updated"]
    if not told:
        raise PointSkipped("none was sent")
    for event in told:
        for limit in field(event, "rate_limits", list):
            if limit.get("name") not in ("requests", "tokens"):
                raise PointFailed(f"it names {shortened(limit.get('name'))}", event)


@ANSWERS.point("the rest must be cut by item.truncate when somebody interrupts")
async def lead(kit: Kit) -> None:
    """Sound is sent at most a second ahead of what is heard."""
    played = (await kit.spoken()).answer
    came = [one for one in played.came if one.event.get("type") == "response.output_audio.delta"]
    if not came:
        raise PointSkipped("the answer has no sound", played.done)
    sent, ahead = 0.0, 0.0
    for one in came:
        sent += len(field(one.event, "delta", str)) * 3 / 4 / (2 * RATE)
        ahead = max(ahead, sent - (one.at - came[0].at))
    if ahead > 1:
        raise PointNoted(f"of {sent:.1f} s, up to {ahead:.1f} s were sent ahead")


ASKING = Topic("asking")


@ASKING.in_session("clients give their request up after so long")
async def in_time(client: RealtimeClient) -> None:
    """An item is told within 5 s, and an answer begins to be within 10 s."""
    for seconds, kind, asking in (
        (5, "conversation.item.added", lambda: client.send("conversation.item.create", item=written(SHORT))),
        (10, "response.created", lambda: client.send("response.create")),
    ):
        start = client.now
        await asking()
        told = await client.expect(kind)
        if client.now - start > seconds:
            raise PointFailed(f"{kind} took {client.now - start:.1f} s", told)
    await client.finished(told)


@ASKING.in_session("one written answer on the side would silence all that follow")
async def override(client: RealtimeClient) -> None:
    """Settings of response.create hold for that answer alone."""
    await client.write(SHORT)
    played = await client.respond(output_modalities=["text"], instructions="Answer in one word.")
    equal(played.first("response.content_part.added"), "part.type", "text")
    told = await client.update()
    modalities = field(told, "session.output_modalities", list)
    if "audio" not in modalities:
        raise PointFailed("the session's output_modalities were changed as well", told)


@ASKING.in_session("clients that set one get no answer at all", max_output_tokens=4096)
async def limit(client: RealtimeClient) -> None:
    """max_output_tokens is taken, for the session and for one answer."""
    await client.write(SHORT)
    await client.respond()
    await client.write(SHORT)
    await client.respond(max_output_tokens="inf")


@ASKING.in_session("clients take half an answer for a whole one")
async def limited(client: RealtimeClient) -> None:
    """An answer that max_output_tokens ends is incomplete, and says so."""
    await client.write(LONG)
    played = await client.respond(max_output_tokens=1)
    equal(played.done, "response.status", "incomplete")
    equal(played.done, "response.status_details.reason", "max_output_tokens")


@ASKING.in_session("clients find their own answer by it, and wait for ever without")
async def metadata(client: RealtimeClient) -> None:
    """Metadata of response.create comes back in response.created and response.done."""
    await client.write(SHORT)
    played = await client.respond(metadata={"asked_by": "conformance"})
    for event in (played.created, played.done):
        equal(event, "response.metadata", {"asked_by": "conformance"})


@ASKING.in_session("what clients ask on the side, such as a summary, turns up in the dialogue")
async def beside(client: RealtimeClient) -> None:
    """An answer with conversation `none` stays out of the conversation."""
    asked = await client.write(SHORT)
    played = await client.respond(conversation="none", input=[written(LONG)], metadata={"topic": "aside"})
    if field(played.done, "response", dict).get("conversation_id") is not None:
        raise PointFailed("it has a conversation_id", played.done)
    for kind in ("conversation.item.added", "conversation.item.done"):
        if played.of(kind):
            raise PointFailed(f"{kind} came for it", played.first(kind))
    equal(await client.write("One."), "previous_item_id", field(asked, "item.id"))


@ASKING.in_session("clients ask on the side about parts of a conversation")
async def own_input(client: RealtimeClient) -> None:
    """response.create takes an input of its own, items and references to items of the conversation."""
    item_id = field(await client.write("What is one plus one?"), "item.id", str)
    reference = {"type": "item_reference", "id": item_id}
    await client.respond(conversation="none", input=[reference])
    await client.respond(conversation="none", input=[reference, written(SHORT)])


@ASKING.in_session("clients with a voice of their own would pay for sound and get no text", output_modalities=["text"])
async def text_only(client: RealtimeClient) -> None:
    """With output_modalities ["text"] an answer is output_text alone."""
    await client.write(SHORT)
    played = await client.respond()
    in_order(played.came)
    for kind in ("response.output_audio.delta", "response.output_audio_transcript.delta"):
        if played.of(kind):
            raise PointFailed(f"{kind} came", played.first(kind))
    equal(played.first("response.content_part.added"), "part.type", "text")
    equal(played.done, "response.output.0.content.0.type", "output_text")
    field(played.first("response.output_text.done"), "text", str)


@ASKING.point("a stopped answer goes on talking, or its client waits for its end")
async def cancel(kit: Kit) -> None:
    """response.cancel ends the answer with the status cancelled, and none of its deltas comes after."""
    async with kit.session() as client:
        await client.write(LONG)
        await client.send("response.create")
        begun = await client.expect("response.created")
        await client.expect(*DELTAS, "response.done")
        await client.send("response.cancel")
        played = await client.finished(begun)
        if field(played.done, "response.status") == "completed":
            await client.expect("error")
            raise PointSkipped("the answer was over before it could be cancelled", played.done)
        cancelled_by(played.done, "client_cancelled")
        response_id = field(begun, "response.id")
        since = next(n for n, one in enumerate(client.came) if one.event is played.done)
        await client.nothing(
            *DELTAS, since=since, seconds=kit.quiet, where=lambda event: event.get("response_id") == response_id
        )


def cancelled_by(done: ServerEvent, reason: str) -> None:
    """PointFailed where an answer was not cancelled for that reason."""
    equal(done, "response.status", "cancelled")
    equal(done, "response.status_details.reason", reason)


WIRE = Topic("all events")

LARGEST = 2**20
"""Bytes of a message that common WebSocket clients take at most."""


async def all_events(kit: Kit) -> list[Came]:
    """All that came, a written and a spoken turn among it."""
    await kit.written()
    await kit.spoken()
    return [one for client in kit.clients for one in client.came]


@WIRE.point("strict clients drop an event without one, or the second of two")
async def event_ids(kit: Kit) -> None:
    """Every event has an event_id of its own."""
    await all_events(kit)
    for client in kit.clients:
        seen = set()
        for one in client.came:
            name = one.event.get("event_id")
            if not isinstance(name, str) or not name:
                raise PointFailed("it has none", one.event)
            if name in seen:
                raise PointFailed("its id has come before", one.event)
            seen.add(name)


@WIRE.point("clients with the usual limit close the connection")
async def message_size(kit: Kit) -> None:
    """No message has more than 1 MiB."""
    for one in await all_events(kit):
        if one.size > LARGEST:
            raise PointFailed(f"{one.event.get('type')} has {one.size:,} bytes", one.event)


@WIRE.point("strict clients drop the event without a word")
async def no_nulls(kit: Kit) -> None:
    """What an item, a part or a usage does not have is absent, not null (but for the transcript of input_audio)."""
    for one in await all_events(kit):
        for path in nulls(one.event):
            raise PointFailed(f"{path} is null", one.event)


def nulls(event: ServerEvent) -> list[str]:
    """Paths of what is null in an event where strict clients expect nothing."""
    response = event.get("response")
    inside = response if isinstance(response, dict) else {}
    found = []
    for name, value in (
        ("item", event.get("item")),
        ("part", event.get("part")),
        ("response.output", inside.get("output")),
        ("response.usage", inside.get("usage")),
        ("usage", event.get("usage")),
    ):
        found += [f"{name}.{path}" for path, leaf in leaves(value) if leaf is None and path]
    return [path for path in found if not (path.endswith(".transcript") and ".content." in path and _heard(event, path))]


def _heard(event: ServerEvent, path: str) -> bool:
    """Whether a transcript's content is sound that came in."""
    value: Any = event
    for key in path.split(".")[:-1]:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value.get("type") == "input_audio"


@WIRE.point("typed clients refuse the event, and some end the session")
async def types(kit: Kit) -> None:
    """Every event validates against the types of the openai package."""
    try:
        known = event_types()
    except ImportError:
        raise PointSkipped("needs the package openai: pip install openai") from None
    from pydantic import ValidationError

    for one in await all_events(kit):
        kind = str(one.event.get("type"))
        if kind not in known:
            raise PointFailed(f"the type {kind!r} is not known", one.event)
        try:
            known[kind].model_validate(one.event, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise PointFailed(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", one.event) from None


def event_types() -> dict[str, Any]:
    """The `openai` package's models of server events, by type; ImportError where it is not installed."""
    union = importlib.import_module("openai.types.realtime").RealtimeServerEvent
    members = typing.get_args(typing.get_args(union)[0])
    return {_type_of(one): one for one in members}


def _type_of(model: Any) -> str:
    return str(typing.get_args(model.model_fields["type"].annotation)[0])
