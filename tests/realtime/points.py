"""A point of the Realtime API that a server keeps or not: its name, what it is for, and how its check ends."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

ServerEvent = dict[str, Any]
Result = Literal["pass", "fail", "skipped", "note"]
Check = Callable[[Any], Awaitable[None]]
"""Looks at a server, by way of a `Kit` or of a client of it."""

NEEDS_SPEECH = "needs --sound FILE with speech"
"""Why a point is skipped where no recording was given."""

LONGEST_TEXT, LONGEST_EVENT = 160, 600
"""Characters that are shown of a text in an event, and of the event."""


class PointEnded(Exception):
    """How a check ended, where its point was not simply kept.

    Attributes:
        event: what the server sent.
    """

    result: Result = "fail"

    def __init__(self, reason: str, event: ServerEvent | None = None) -> None:
        super().__init__(reason)
        self.event = event


class PointFailed(PointEnded):
    """The server does not keep the point."""


class PointSkipped(PointEnded):
    """The point could not be looked at."""

    result: Result = "skipped"


class PointNoted(PointEnded):
    """Something that clients should know, and no failure."""

    result: Result = "note"


@dataclass(frozen=True)
class Point:
    """One point.

    Attributes:
        name: short, for `--only`.
        topic: heading that it stands under.
        title: what a server does that keeps it.
        why: what happens to clients otherwise.
        speech: it needs a recording of speech.
        check: returns, or raises `PointEnded`.
    """

    name: str
    topic: str
    title: str
    why: str
    speech: bool
    check: Check


class Topic:
    """Points that belong together, in their order.

    Args:
        name: the heading.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.points: list[Point] = []

    def point(self, why: str, speech: bool = False) -> Callable[[Check], Check]:
        """Decorates the check of a point, whose name is the function's and whose title is its docstring."""

        def add(check: Check) -> Check:
            title = " ".join((check.__doc__ or "").split()).rstrip(".")
            self.points.append(Point(check.__name__.replace("_", "-"), self.name, title, why, speech, check))
            return check

        return add

    def in_session(self, why: str, **session: Any) -> Callable[[Check], Check]:
        """Decorates the check of a point that looks at one client, of a session without turn detection."""

        def add(check: Check) -> Check:
            @wraps(check)
            async def checked(kit: Any) -> None:
                async with kit.session(**session) as client:
                    await check(client)

            return self.point(why)(checked)

        return add


def field(event: ServerEvent, path: str, kind: type | tuple[type, ...] = object) -> Any:
    """The value at a path such as `item.content.0.type`; PointFailed where it is missing or of another kind."""
    value: Any = event
    for key in path.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise PointFailed(f"{event.get('type')} has no {path}", event)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object and kind is not bool):
        raise PointFailed(f"{path} of {event.get('type')} is {shortened(value)}", event)
    return value


def equal(event: ServerEvent, path: str, wanted: object) -> None:
    """PointFailed where the value at a path is another one than `wanted`."""
    value = field(event, path)
    if value != wanted:
        raise PointFailed(f"{path} of {event.get('type')} is {shortened(value)}, not {shortened(wanted)}", event)


def error_code(event: ServerEvent, code: str) -> None:
    """PointFailed where an `error` event has another code."""
    value = field(event, "error", dict).get("code")
    if value != code:
        raise PointFailed(f"error.code is {shortened(value)}, not {code!r}", event)


def shortened(value: object) -> str:
    """A value as JSON on one line, with long texts and long lists cut."""
    text = json.dumps(_cut(value), ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_EVENT else f"{text[:LONGEST_EVENT]}…"


def _cut(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]}… ({len(value)} characters)"
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    return [_cut(one) for one in value[:8]] if isinstance(value, list) else value
