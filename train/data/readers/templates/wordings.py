"""Expands a sentence template to all its wordings.

The notation is that of hassil, the templates of Home Assistant's intents: `(a | b)` alternatives, `[a]` or `[a | b]` optional
words, `<name>` a wording of the file's `wordings`, `{name}` a slot, which stays as it is. All of them nest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from omni.errors import UserError, closest

MOST = 10_000
"""Most wordings of a sentence."""

DEEPEST = 50
"""Most brackets within each other."""

SLOT = re.compile(r"\{([^{}]*)\}")
_MARKS = "()[]{}<>|"


class Wordings:
    """The named wordings of a file, each one or more templates.

    Attributes:
        used: names that a template has named, directly or by way of another.
    """

    def __init__(self, named: Mapping[str, Sequence[str]] | None = None) -> None:
        self.named = dict(named or {})
        self.used: set[str] = set()

    def expand(self, template: str, within: tuple[str, ...] = ()) -> tuple[str, ...]:
        """All wordings of a template, each once, with single spaces.

        Args:
            within: names of the wordings that the template is a part of.

        Raises:
            UserError: a mark that is not closed, an unknown name, wordings that name each other in a circle, too many.
        """
        reading = _Reading(self, template, within)
        found = reading.alternatives("")
        return _checked(dict.fromkeys(" ".join(wording.split()) for wording in found), template)

    def of(self, name: str, within: tuple[str, ...]) -> tuple[str, ...]:
        """All wordings under a name."""
        if name not in self.named:
            raise UserError(f"<{name}> is no key of wordings; {closest(name, self.named)}")
        if name in within:
            circle = " in ".join(f"<{one}>" for one in (name, *reversed(within[within.index(name) :])))
            raise UserError(f"wordings name each other in a circle ({circle}): write one of them out")
        self.used.add(name)
        parts = [self.expand(template, (*within, name)) for template in self.named[name]]
        return _checked(itertools.chain.from_iterable(parts), f"<{name}>")


def _checked(wordings: Iterable[str], what: str) -> tuple[str, ...]:
    found = tuple(itertools.islice(wordings, MOST + 1))
    if len(found) > MOST:
        raise UserError(f"{what!r} has more than {MOST} wordings: take optional words or alternatives out")
    return found


class _Reading:
    """Reads one template from left to right."""

    def __init__(self, wordings: Wordings, template: str, within: tuple[str, ...]) -> None:
        self.wordings, self.template, self.within, self.at = wordings, template, within, 0
        self.depth = 0

    def alternatives(self, end: str) -> list[str]:
        """Read sequences apart by bars, up to the mark `end`, "" for the template's end."""
        self.depth += 1
        found = self._sequence()
        while self._next() == "|" and end:
            self.at += 1
            found += self._sequence()
        if self._next() != end:
            raise self._bad(f"{self._next() or 'the end'!r} stands where {end or 'the end'!r} is due")
        self.at += 1
        self.depth -= 1
        return found

    def _next(self) -> str:
        return self.template[self.at : self.at + 1]

    def _sequence(self) -> list[str]:
        done = [""]
        while (mark := self._next()) and mark not in ")]}>|":
            done = list(_checked((f"{a}{b}" for a, b in itertools.product(done, self._part(mark))), self.template))
        return done

    def _part(self, mark: str) -> Sequence[str]:
        """Read one part: alternatives, optional words, a name, or plain text."""
        start = self.at
        self.at += 1
        if self.depth >= DEEPEST and mark in "([":
            raise self._bad(f"more than {DEEPEST} brackets stand within each other")
        if mark == "(":
            return self.alternatives(")")
        if mark == "[":
            return [*self.alternatives("]"), ""]
        if mark in "<{":
            close = ">" if mark == "<" else "}"
            end = self.template.find(close, self.at)
            name = self.template[self.at : end].strip()
            if end < 0 or not name or any(other in name for other in _MARKS):
                raise self._bad(f"{mark!r} is not followed by a name and {close!r}")
            self.at = end + 1
            return self.wordings.of(name, self.within) if mark == "<" else [f"{{{name}}}"]
        while self._next() and self._next() not in _MARKS:
            self.at += 1
        return [self.template[start : self.at]]

    def _bad(self, why: str) -> UserError:
        return UserError(f"{self.template!r}: {why}; the marks are (a | b), [optional], <wording> and {{slot}}")
