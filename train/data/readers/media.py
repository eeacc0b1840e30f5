"""Knows where records and messages name recordings and pictures: in fields, in parts, as turns of a type, by tags in texts.

    audios, speech, wavpath, ...                                    fields of a record or message, see `RECORDING`
    {"type": "audio" | "input_audio" | "audio_url", ...}            a part of a message's content, or a message
    <audio>, <speech>, <|AUDIO|>, <audio>a.wav</audio>, ...         a tag in a text, see `TAG`

What a recording may be, once it is found, `train.data.readers.files.Files.sound` knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from omni.audio.decode import SUFFIXES
from omni.errors import UserError

_SOUND, _HELD = r"(?:audio|sound|speech|wav|recording)(?:e?s)?", r"(?:_?(?:path|file|filepath|filename|url|uri|bytes|data)s?)?"
RECORDING = rf"(?:(?:question|input|user)_)?{_SOUND}{_HELD}"
"""Names of fields, and of types, that hold recordings of questions, or of who speaks in a message."""
RECORDING_OF = rf"(?:\w+_)?{_SOUND}{_HELD}"
"""Names of fields that hold recordings of whatever it may be."""
PICTURE = rf"(?:input_)?(?:image|picture|photo|img|video)s?{_HELD}"
"""Names of fields, and of types, that hold what no reader takes."""
TAG = re.compile(
    r"<(audio|speech|sound|wav)>(?P<inner>.*?)</\1>"
    r"|<\|?(?P<no>/|(?:start|begin|end)_of_)?(?:audio|speech|sound|wav|recording)(?:here)?"
    r"(?:_?\d+|_(?:pad|token|placeholder|soft_token)|(?P<end>_(?:bos|eos|start|end)))?\|?>",
    re.IGNORECASE | re.DOTALL,
)
"""A placeholder of a recording in a text; such as have `no` or `end` only frame one."""
_PICTURE_TAG = re.compile(r"<\|?(?:image|video|picture)(?:_?\d+|_(?:pad|token|placeholder))?\|?>", re.IGNORECASE)

_PLAIN = {("role", "content"): "content", ("from", "value"): "value"}
_TEXTS, _ABOUT = ("text", "input_text", "output_text"), ("type", "role", "from", "duration")


class Said(NamedTuple):
    """A text, in which recordings may have tags, those that are named beside it, and the message that says it."""

    text: str
    recordings: list[Any]
    message: Mapping[str, Any]


@lru_cache(256)
def named(pattern: str, *names: str) -> tuple[str, ...]:
    """The names of fields, or types, that match a pattern."""
    return tuple(name for name in names if re.fullmatch(pattern, name.replace(" ", "_"), re.IGNORECASE))


def present(value: Any) -> bool:
    """True where a field holds something: no null, empty text or list, nor an object of nulls."""
    if isinstance(value, dict):
        return any(map(present, value.values()))
    return any(map(present, value)) if isinstance(value, list) else value is not None and value != ""


def recording_fields(data: Mapping[str, Any]) -> list[str]:
    """Names of the fields that hold a recording, by their name or by the ending of their value."""
    known = named(RECORDING_OF, *data)
    return [
        name
        for name, value in data.items()
        if (isinstance(value, str) and "." in value[-6:] and value.lower().endswith(SUFFIXES))
        or (name in known and present(value))
    ]


def tags(text: str) -> int:
    """Number of recordings that a text has tags of; UserError for a tag of a picture."""
    if "<" not in text:
        return 0
    picture = _PICTURE_TAG.search(text)
    if picture is not None:
        raise UserError(f"a text has {picture[0]}, and pictures are not read: drop the row")
    return sum(not (match["no"] or match["end"]) for match in TAG.finditer(text))


def without_tags(text: str) -> str:
    return TAG.sub("", text).strip()


def refuse_pictures(data: Mapping[str, Any]) -> None:
    """UserError where a record, message or part has a picture or video."""
    for name in named(PICTURE, *data):
        if present(data[name]):
            raise UserError(f"has {name!r}, and pictures and videos are not read: drop the row, or the field")


def recordings_of(data: Mapping[str, Any]) -> Any:
    """The recording, or list of them, that a record names in a field; None for none. UserError where two fields do."""
    names = [name for name in named(RECORDING, *data) if present(data[name])]
    if len(names) > 1:
        raise UserError(f"has recordings in {' and in '.join(map(repr, names))}: keep one of these fields")
    return data[names[0]] if names else None


def listed(value: Any) -> list[Any]:
    """The recordings in a field that may hold one or several; a list of numbers is one."""
    if isinstance(value, list) and not any(isinstance(entry, int | float) for entry in value[:1]):
        return value
    return [value] if present(value) else []


def read_said(message: Mapping[str, Any]) -> Said:
    """What a message, or a part of its content, says, and its recordings; UserError for pictures and parts of other types. A
    text beside a recording has a tag for it where that is a part of the content, and none where it is a field of the
    message."""
    plain = message[_PLAIN[names]] if (names := tuple(message)) in _PLAIN else None
    if isinstance(plain, str) and "<" not in plain:
        return Said(plain.strip(), [], message)
    refuse_pictures(message)
    part_type, own = message.get("type") or "text", recordings_of(message)
    held = next((message[name] for name in ("content", "value", "text") if present(message.get(name))), "")
    if not isinstance(part_type, str) or named(PICTURE, part_type):
        raise UserError(f"has a part of type {part_type!r}, and only text and recordings are read: drop the row")
    if named(RECORDING, part_type):
        rest = {name: value for name, value in message.items() if name not in _ABOUT and present(value)}
        return Said("<audio>", listed(own) or listed(held) or listed(rest), message)
    parts = [_read_part(part) for part in (held if isinstance(held, list) else [held])]
    text = "\n".join(filter(None, (part.text.strip() for part in parts)))
    recordings = [recording for part in parts for recording in part.recordings]
    if recordings and not tags(text):
        text = "\n".join(["<audio>"] * len(recordings) + [text])
    inner = [path for match in TAG.finditer(text) if (path := (match["inner"] or "").strip("./ \n")) and "<" not in path]
    return Said(text, recordings or listed(own) or inner, message)


def _read_part(part: Any) -> Said:
    if isinstance(part, str | int | float) and not isinstance(part, bool):
        return Said(str(part), [], {})
    part_type = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
    if part_type not in _TEXTS and not (isinstance(part_type, str) and named(RECORDING, part_type)):
        raise UserError(f"has a part of type {part_type!r}, and only parts of type 'text' and 'audio' are read: drop the row")
    return read_said(part)
