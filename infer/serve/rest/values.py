"""Values of clients' JSON, named in errors as JSON does."""

from __future__ import annotations

from typing import Any


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
