"""Which digests come back, within a set of rows or in two of them, at 16 bytes for each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Digests:
    """64-bit digests, each with the number of the row it is of."""

    def __init__(self) -> None:
        self._values = array("Q")
        self._rows = array("Q")

    def add(self, value: int, row: int) -> None:
        """Take another; rows come in their order."""
        self._values.append(value)
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._values)

    def repeats(self) -> Iterator[tuple[int, int]]:
        """Rows with a digest that an earlier row has, and the first such row; in order."""
        import numpy as np

        values, rows = self._arrays()
        order = np.argsort(values, kind="stable")  # equal digests stay in the order of their rows
        values, rows = values[order], rows[order]
        first = np.ones(len(values), dtype=bool)
        first[1:] = values[1:] != values[:-1]
        leaders = rows[np.maximum.accumulate(np.where(first, np.arange(len(values)), 0))]
        again = rows != leaders
        yield from sorted(zip(rows[again].tolist(), leaders[again].tolist(), strict=True))

    def shared(self, other: Digests) -> Iterator[tuple[int, int]]:
        """Rows with a digest that `other` has, and the first row there; in order."""
        import numpy as np

        theirs, their_rows = other._arrays()
        order = np.argsort(theirs, kind="stable")
        theirs, their_rows = theirs[order], their_rows[order]
        values, rows = self._arrays()
        place = np.searchsorted(theirs, values)
        if not len(theirs):
            return
        found = theirs[np.minimum(place, len(theirs) - 1)] == values
        yield from zip(rows[found].tolist(), their_rows[place[found]].tolist(), strict=True)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        return np.frombuffer(self._values, np.uint64), np.frombuffer(self._rows, np.uint64)
