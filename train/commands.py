"""The names of commands, and of options that had others."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from omni.errors import UserError

RENAMED = {"eval": {"questions": "limit"}, "validate": {"questions": "limit"}}
"""Options by command that have another name now."""


def check_renamed(command: str, names: Iterable[str], mark: str = "") -> None:
    """UserError, with the name of now, for an option (`mark` stands before it) or key of before."""
    for name in names:
        now = RENAMED.get(command, {}).get(name.partition("=")[0].removeprefix(mark)) if name.startswith(mark) else None
        if now is not None:
            raise UserError(f"{command}: {name.partition('=')[0]} is now called {mark}{now}: give that instead")


def check_command(name: str, known: Iterable[str], of: str = "") -> None:
    """UserError, with the closest name, where there is no such one: of `data`, `edit`, or `python -m train` itself."""
    names = list(known)
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"{of} command {name!r} is unknown; {hint}known: {', '.join(names)}".strip())
