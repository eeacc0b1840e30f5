"""JSON of clients: reading it, and naming its values in errors as JSON does."""

from __future__ import annotations

import json
from typing import Any

from infer.serve.realtime.protocol import ProtocolError


def read_json(data: bytes) -> Any:
    """The value of a body; ProtocolError where it is no JSON, with the place where that is known."""
    try:
        return json.loads(data)
    except RecursionError:
        found = "it is nested too deep"
    except UnicodeDecodeError as error:
        found = f"it is not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        what = f"{error.msg} at line {error.lineno}, column {error.colno}"
        found = what if data.strip() else "it is empty"
    except ValueError:
        found = "a number in it has too many digits"
    raise ProtocolError(f"the body is no JSON: {found}", "invalid_json")


def kind_of(value: Any) -> str:
    """What a value is, such as `a list`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds: dict[str, Any] = {"a text": str, "a number": (int, float), "a list": list, "an object": dict}
    return next(name for name, kind in kinds.items() if isinstance(value, kind))


def shown(value: Any) -> str:
    """A value for an error: short ones themselves, and of others what they are."""
    return repr(value)[:60] if isinstance(value, (str, int, float)) and not isinstance(value, bool) else kind_of(value)
