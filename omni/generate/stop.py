"""Stop strings: a text that is passed on as far as it is sure that none of them starts there."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Takes a text piece by piece, and gives what comes before the first stop string.

    What may be the beginning of one is held back until more is known.

    Args:
        stops: none of them empty.

    Attributes:
        found: a stop string was there; nothing is given from then on.
        characters: given so far.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = tuple(stops)
        self.found = False
        self.characters = 0
        self._held = ""

    def push(self, text: str) -> str:
        """What can be given with one more piece, maybe nothing."""
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
        """What was held back, when no more can follow."""
        text, self._held = self._held, ""
        return self._give(text)

    def _give(self, text: str) -> str:
        self.characters += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text a stop string starts with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
