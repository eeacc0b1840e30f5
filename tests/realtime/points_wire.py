"""Points of everything that a server sends, looked at over all sessions of the examination."""

from __future__ import annotations

import importlib
import typing
from typing import Any

from tests.realtime.connection import Came
from tests.realtime.kit import Kit
from tests.realtime.points import PointFailed, PointSkipped, ServerEvent, Topic
from tests.realtime.points_answers import leaves

WIRE = Topic("all events")

LARGEST = 2**20
"""Bytes of a message that common WebSocket clients take at most."""


async def all_events(kit: Kit) -> list[Came]:
    """All that came, a written and a spoken turn among it."""
    await kit.written()
    await kit.spoken()
    return [one for client in kit.clients for one in client.came]


@WIRE.point(
    "event-ids",
    "every event has an event_id of its own",
    "strict clients drop an event without one, or the second of two",
)
async def event_ids(kit: Kit) -> None:
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


@WIRE.point(
    "message-size",
    "no message has more than 1 MiB",
    "clients with the usual limit close the connection",
)
async def message_size(kit: Kit) -> None:
    for one in await all_events(kit):
        if one.size > LARGEST:
            raise PointFailed(f"{one.event.get('type')} has {one.size:,} bytes", one.event)


@WIRE.point(
    "no-nulls",
    "what an item, a part or a usage does not have is absent, not null (but for the transcript of input_audio)",
    "strict clients drop the event without a word",
)
async def no_nulls(kit: Kit) -> None:
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


@WIRE.point(
    "types",
    "every event validates against the types of the openai package",
    "typed clients refuse the event, and some end the session",
)
async def types(kit: Kit) -> None:
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
