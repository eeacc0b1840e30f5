"""Finds equal digests among rows, in memory: 16 bytes for each, beyond ten million rows it may not suffice."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Digests:
    """64-bit digests, each with the number of its row, in the order of the rows."""

    def __init__(self) -> None:
        self._values, self._rows = array("Q"), array("Q")

    def add(self, value: int, row: int) -> None:
        """Add a digest; rows must come in ascending order."""
        self._values.append(value)
        self._rows.append(row)

    def extend(self, other: Digests) -> None:
        """Add the digests of later rows."""
        self._values.extend(other._values)
        self._rows.extend(other._rows)

    def repeats(self) -> Iterator[tuple[int, int]]:
        """Iterate over rows with a digest of an earlier row, with the first such row, in order."""
        import numpy as np

        values, rows = self._arrays()
        _, first, which = np.unique(values, return_index=True, return_inverse=True)
        firsts = rows[first][which]
        again = rows != firsts
        yield from zip(rows[again].tolist(), firsts[again].tolist(), strict=True)

    def shared(self, other: Digests) -> Iterator[tuple[int, int]]:
        """Iterate over rows with a digest that `other` has too, with the first such row there, in order."""
        import numpy as np

        (values, rows), (known, firsts) = self._arrays(), other._arrays()
        if not len(known):
            return
        known, first = np.unique(known, return_index=True)
        at = np.minimum(np.searchsorted(known, values), len(known) - 1)
        there = known[at] == values
        yield from zip(rows[there].tolist(), firsts[first][at[there]].tolist(), strict=True)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Digests and their rows, uint64 [n] each."""
        import numpy as np

        return np.array(self._values, np.uint64), np.array(self._rows, np.uint64)
