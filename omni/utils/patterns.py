"""Selects parameters and modules by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType

from omni.errors import UserError

NONE: Mapping[str, str] = MappingProxyType({})


def match_names(
    patterns: Iterable[str],
    names: Sequence[str],
    where: str,
    strict: bool = True,
    noun: str = "parameter",
    also: Mapping[str, str] = NONE,
) -> set[str]:
    """The names that at least one pattern matches.

    A pattern is of the shell's kind (`decoder.blocks.*.mlp.*`; the star also spans dots), or, after `re:`, a regular
    expression for the whole name.

    Args:
        where: the configuration key the patterns come from, for the error.
        strict: refuse a pattern that matches nothing.
        noun: for a name, in the error.
        also: second names, each with the first name that it means (`omni.model.linears.tied_names`); one whose first name is
            not in `names` is ignored.

    Raises:
        UserError: a pattern matches no name (the closest names are given), or is not a regular expression.
    """
    chosen: set[str] = set()
    own = {name: name for name in names}
    known = own | {second: first for second, first in also.items() if first in own}
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expression = re.compile(pattern[3:])
            except re.error as error:
                raise UserError(f"{where}: {pattern!r} is not a regular expression ({error})") from error
            hits = {first for name, first in known.items() if expression.fullmatch(name)}
        else:
            hits = {first for name, first in known.items() if fnmatchcase(name, pattern)}
        if not hits and strict:
            close = _closest(pattern, names)
            near = "the closest names are " if close else "names are such as "
            near += ", ".join(close or names[:3]) or "none"
            raise UserError(f"{where}: pattern {pattern!r} matches no {noun}; {near}")
        chosen |= hits
    return chosen


def _closest(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three names, or leading parts of names with a star, that resemble the pattern."""
    depth = pattern.count(".")
    heads = dict.fromkeys(
        name if name.count(".") <= depth else ".".join(name.split(".")[: max(depth, 1)]) + ".*" for name in names
    )
    return get_close_matches(pattern, heads, n=3, cutoff=0.3)
