"""The events of OpenAI's Realtime API (GA names, as the `openai` package's `types/realtime` has them): reading and writing;
and errors as clients get them: whose mistake it is, and what to do.

A client's event is validated by the model of its type; fields that are not known are left alone. A server's event is a plain
dict, without keys whose value is None where clients want them absent.
"""

from __future__ import annotations

import json
import math
import reprlib
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from omni.errors import EngineLost, RoomError, UserError

Id = Annotated[str, StringConstraints(min_length=1, max_length=512)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Event = dict[str, Any]

LONGEST_APPEND = 15 * 2**20  # bytes of one append, as OpenAI limits it; in base64 they take a third more


COSTLY = 50_000  # most signs `{`, `[` and `,` of JSON: to read each takes some 100 ns, and nobody else is served meanwhile

SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring = 0, 80  # it looks at the beginning of a value alone, however large that is

LOST = "the engine was lost and is started again; ask again in some seconds"
"""Message to clients when the engine's process has ended; the log has the cause."""

ENGINE_PROBLEMS = ("this engine ", "this session ")
"""Beginnings of the engine's errors that are about itself, and not about its input."""


class ProtocolError(Exception):
    """An error of a client's event or request, or of the server's, as the client is told.

    Attributes:
        code: for programs; clients compare some of them.
        param: the field that is wrong, as `session.audio.input`.
        status: of HTTP, 500 and above where it is no mistake of the client.
        retry: whether the same request may succeed later.
        error_type: by the status: `invalid_request_error`, `rate_limit_exceeded` or `server_error`.
    """

    def __init__(
        self, message: str, code: str = "invalid_value", param: str | None = None, status: int = 400, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.status, self.retry = code, param, status, retry
        self.error_type = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            self.error_type = "rate_limit_exceeded"

    def event(self, event_id: str | None = None) -> Event:
        """The `error` event; `event_id` is the client's."""
        error = {"type": self.error_type, "code": self.code, "message": str(self), "param": self.param, "event_id": event_id}
        return {"type": "error", "error": filled(error)}

    @property
    def body(self) -> Event:
        """The body of a response over HTTP."""
        return {"error": {"message": str(self), "type": self.error_type, "param": self.param, "code": self.code or None}}


class Denied(ProtocolError):
    """A request without permission, or over a quota."""


def as_protocol_error(error: Exception) -> ProtocolError:
    """The error for a client; the caller logs one of status 500 without a client's mistake."""
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, EngineLost):
        return ProtocolError(LOST, "engine_lost", status=503, retry=True)
    if not isinstance(error, UserError):
        return ProtocolError(f"the server failed ({type(error).__name__})", "server_error", status=500)
    if str(error).startswith(ENGINE_PROBLEMS):
        return ProtocolError(str(error), "server_error", status=500)
    if isinstance(error, RoomError):
        message = f"instructions, {str(error).partition(':')[0]}: shorten instructions, history or question"
        return ProtocolError(message, "context_length_exceeded")
    return ProtocolError(str(error))


def broken(text: str | None, engine: Any) -> Exception:
    """The error of an answer that broke, by its text, on this engine."""
    return ProtocolError(text or "the answer broke", "server_error", status=500) if engine.alive else EngineLost(text)


class _ClientEvent(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    event_id: Id | None = None


class SessionUpdate(_ClientEvent):
    type: Literal["session.update"]
    session: dict[str, Any]


class Append(_ClientEvent):
    type: Literal["input_audio_buffer.append"]
    audio: str


class Bare(_ClientEvent):
    """An event that its type says all of."""

    type: Literal["input_audio_buffer.commit", "input_audio_buffer.clear", "output_audio_buffer.clear"]


class ItemCreate(_ClientEvent):
    type: Literal["conversation.item.create"]
    item: dict[str, Any]
    previous_item_id: Id | None = None


class ItemNamed(_ClientEvent):
    type: Literal["conversation.item.delete", "conversation.item.retrieve"]
    item_id: Id


class ItemTruncate(_ClientEvent):
    type: Literal["conversation.item.truncate"]
    item_id: Id
    content_index: Annotated[int, Field(ge=0)] = 0
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseOptions(BaseModel):
    """What a response has of its own; other fields change the session's configuration for it."""

    model_config = ConfigDict(extra="allow", strict=True)

    conversation: Literal["auto", "none"] | None = None
    input: list[Any] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None


class ResponseCreate(_ClientEvent):
    type: Literal["response.create"]
    response: ResponseOptions | None = None


class ResponseCancel(_ClientEvent):
    type: Literal["response.cancel"]
    response_id: Id | None = None


ClientEvent = SessionUpdate | Append | Bare | ItemCreate | ItemNamed | ItemTruncate | ResponseCreate | ResponseCancel

_READER: TypeAdapter[ClientEvent] = TypeAdapter(Annotated[ClientEvent, Field(discriminator="type")])

TYPES = tuple(name for model in get_args(ClientEvent) for name in get_args(model.model_fields["type"].annotation))


def read_event(message: Event) -> ClientEvent:
    """The event that a client's message is; ProtocolError for an unknown type, or a field of the wrong type."""
    if message.get("type") not in TYPES:
        shown = SHORT.repr(message.get("type"))[:80]
        raise ProtocolError(f"event type {shown} is unknown; use one of {', '.join(TYPES)}", "invalid_event_type", "type")
    try:
        return _READER.validate_python(message)
    except ValidationError as error:
        raise ProtocolError(*first_mistake(error, message)) from None


def check_costly(text: Any, left: int = COSTLY) -> int:
    """Counts the signs `{`, `[` and `,` in JSON (text or bytes); returns how many are left. ProtocolError beyond `left`."""
    for sign in ("{", "[", ",") if isinstance(text, str) else (b"{", b"[", b","):
        index = text.find(sign)
        while index >= 0:
            left, index = left - 1, text.find(sign, index + 1)
            if left < 0:
                raise ProtocolError(
                    f"the JSON has more than {COSTLY:,} signs {{, [ and comma; send less", "too_large", status=413
                )
    return left


def read_json(data: str | bytes, name: str = "the body", param: str | None = None) -> Any:
    """The value of a JSON text; ProtocolError where it is none, with its place."""
    try:
        return json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (RecursionError, ValueError) as error:
        raise ProtocolError(f"{name} is no JSON: {error}", "invalid_json", param) from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number of JSON")
    return number


def first_mistake(error: ValidationError, values: Any = None, under: str = "") -> tuple[str, str, str]:
    """Message, code and field of pydantic's first error in `values`, which lie `under` a name; the field is a path through the
    values, without pydantic's own names."""
    mistake = error.errors(include_url=False, include_input=True)[0]
    missing = mistake["type"] == "missing"
    parts = mistake["loc"] if values is None else _own(mistake["loc"], values, missing)
    param = ".".join([under] * bool(under) + [str(part) for part in parts])
    shown = "" if missing else f" (it is {SHORT.repr(mistake['input'])[:80]})"
    return f"{param}: {mistake['msg']}{shown}", "missing_required_parameter" if missing else "invalid_value", param


def _own(parts: Sequence[int | str], values: Any, missing: bool) -> list[int | str]:
    """The parts of a pydantic location that lead through the values, with a missing field at its end; not those of unions."""
    own: list[int | str] = []
    for number, part in enumerate(parts, 1):
        if (isinstance(values, dict) and part in values) or (isinstance(values, list) and isinstance(part, int)):
            values = values[part]  # type: ignore[index]
            own.append(part)
        elif missing and number == len(parts):
            own.append(part)
    return own


def new_id(prefix: str) -> str:
    """An id such as `item_3f2a…`."""
    return f"{prefix}_{secrets.token_hex(10)}"


def filled(values: Event) -> Event:
    """The values that are not None: strict clients drop events with null where they expect nothing."""
    return {key: value for key, value in values.items() if value is not None}
