"""Points of an answer: the order of its events, what they hold, and how it is asked for and cancelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.realtime.connection import Came, Played
from tests.realtime.kit import Kit, ManualTurn
from tests.realtime.points import PointFailed, PointNoted, PointSkipped, Topic, equal, field, shortened
from tests.realtime.sounds import RATE

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


@ANSWERS.point(
    "written-turn",
    "a written question and its answer come with all their events, in order",
    "clients build an answer up from its events; one that is missing or early is dropped",
)
async def written_turn(kit: Kit) -> None:
    turn = await kit.written()
    question_in_order(turn)
    in_order(turn.answer.came)


@ANSWERS.point(
    "spoken-turn",
    "sound that the client commits and its answer come with all their events, in order",
    "clients build an answer up from its events; one that is missing or early is dropped",
)
async def spoken_turn(kit: Kit) -> None:
    turn = await kit.spoken()
    question_in_order(turn)
    in_order(turn.answer.came)
    kinds = [one.event.get("type") for one in turn.came]
    if kinds.index("input_audio_buffer.committed") > kinds.index("conversation.item.added"):
        raise PointFailed("input_audio_buffer.committed came after the item", turn.asked)


@ANSWERS.point(
    "spoken-question",
    "a spoken question's item has one input_audio content, with the key transcript (null while it is not known)",
    "strict clients throw on the missing key, and their connection dies",
)
async def spoken_question(kit: Kit) -> None:
    asked = (await kit.spoken()).asked
    equal(asked, "item.type", "message")
    equal(asked, "item.role", "user")
    equal(asked, "item.content.0.type", "input_audio")
    field(asked, "item.content.0.transcript")


async def answers(kit: Kit) -> list[Played]:
    """The answers of both turns."""
    return [(await kit.written()).answer, (await kit.spoken()).answer]


@ANSWERS.point(
    "content-types",
    "a part is of the type audio or text, an item's content output_audio or output_text",
    "the two have different names, and typed clients drop the event with the wrong one",
)
async def content_types(kit: Kit) -> None:
    for played in await answers(kit):
        part = field(played.first("response.content_part.added"), "part.type")
        if part not in ("audio", "text"):
            raise PointFailed(f"part.type is {shortened(part)}", played.first("response.content_part.added"))
        equal(played.first("response.content_part.done"), "part.type", part)
        for kind in ("response.output_item.done", "conversation.item.done"):
            equal(played.first(kind), "item.content.0.type", f"output_{part}")
        equal(played.done, "response.output.0.content.0.type", f"output_{part}")


@ANSWERS.point(
    "ids",
    "every event of an answer names its response, item, output_index and content_index",
    "clients find the text and the sound of an answer by them",
)
async def ids(kit: Kit) -> None:
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


@ANSWERS.point(
    "joined",
    "the deltas of a text, joined, are the text of its end, of its part and of its item",
    "captions differ from what is kept",
)
async def joined(kit: Kit) -> None:
    for played in await answers(kit):
        for kind, name in (("response.output_audio_transcript", "transcript"), ("response.output_text", "text")):
            if not played.of(f"{kind}.done"):
                continue
            whole = played.joined(f"{kind}.delta")
            equal(played.first(f"{kind}.done"), name, whole)
            equal(played.first("response.content_part.done"), f"part.{name}", whole)
            equal(played.first("response.output_item.done"), f"item.content.0.{name}", whole)


@ANSWERS.point(
    "usage",
    "response.done has a usage whose numbers are all numbers",
    "a client that reads null for a number drops the event, and never asks for an answer again",
)
async def usage(kit: Kit) -> None:
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


@ANSWERS.point(
    "rate-limits",
    "rate_limits.updated, where it is sent, names only requests and tokens",
    "typed clients refuse the event",
)
async def rate_limits(kit: Kit) -> None:
    turns = (await kit.written(), await kit.spoken())
    told = [one.event for turn in turns for one in turn.came if one.event.get("type") == "rate_limits.updated"]
    if not told:
        raise PointSkipped("none was sent")
    for event in told:
        for limit in field(event, "rate_limits", list):
            if limit.get("name") not in ("requests", "tokens"):
                raise PointFailed(f"it names {shortened(limit.get('name'))}", event)


@ANSWERS.point(
    "lead",
    "sound is sent at most a second ahead of what is heard",
    "the rest must be cut by item.truncate when somebody interrupts",
)
async def lead(kit: Kit) -> None:
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
