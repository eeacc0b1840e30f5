"""The names of commands."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from omni.errors import UserError


def check_command(name: str, known: Iterable[str], of: str = "") -> None:
    """UserError, with the closest name, where there is no such one: of `data`, `edit`, or `python -m train` itself."""
    names = list(known)
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"{of} command {name!r} is unknown; {hint}known: {', '.join(names)}".strip())
