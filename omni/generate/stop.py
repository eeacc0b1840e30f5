"""Stop strings: passes a text on up to where one of them may start."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Takes a text piece by piece and returns the part before the first stop string.

    Characters that may be the start of one are held back until more is known.

    Args:
        stops: the stop strings, none of them empty.

    Attributes:
        found: a stop string was found; nothing is returned from then on.
        characters: number of characters returned so far.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = tuple(stops)
        self.found = False
        self.characters = 0
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece; returns the text that is now certain, maybe none."""
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        places = [place for place in map(text.find, self.stops) if place >= 0]
        if places:
            self.found = True
            return self._give(text[: min(places)])
        kept = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - kept :]
        return self._give(text[: len(text) - kept])

    def finish(self) -> str:
        """Returns the text that was held back, when no more can follow."""
        text, self._held = self._held, ""
        return self._give(text)

    def _give(self, text: str) -> str:
        self.characters += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string starts."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
