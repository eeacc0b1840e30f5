"""Finds equal digests among any number of rows, and counts distinct ones, in memory that does not grow with the rows.

Up to `HELD` digests are held in memory. More go to a temporary file (16 bytes each), and a Bloom filter of 32 MiB tells which
of them may have been there before. Only these are looked up in the file, `HELD` at a time. What is found is exact, as far as
digests of 64 bits differ (see `measures.digest`): where the filter errs (0.1 % at ten million digests, 30 % at a hundred
million), it costs time.

Bloom 1970, "Space/time trade-offs in hash coding with allowable errors"; the filter is `rbloom`'s.
"""

from __future__ import annotations

import math
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import writing
from train.data.inspect.measures import digest

if TYPE_CHECKING:
    import numpy as np

HELD = 1 << 20
"""Digests that are held in memory; the last exact number of distinct ones."""
ITEMS, ERRORS = 62_000_000, 0.125
"""Digests at which the filter errs in so many cases: 32 MiB, with `HASHES` bits for each digest."""
HASHES = 3
AGAIN = 1 << 63
"""Mark of a stored row whose digest may have been there before."""

Found = tuple["np.ndarray", "np.ndarray"]
"""Digests and their rows, uint64 [n] each, in the order in which they came."""


def bloom_filter(saved: bytes = b"") -> Any:
    """An empty Bloom filter for numbers of 64 bits, or one that was saved (`save_bytes`)."""
    from rbloom import Bloom

    return Bloom.load_bytes(saved, _spread) if saved else Bloom(ITEMS, ERRORS, _spread)


def _spread(value: int) -> int:
    """The 128 bits, with a sign, of which the filter makes its places; its own hash of numbers cannot be saved."""
    return (value * 0x9E3779B97F4A7C15F39CC0605CEDC835 & (1 << 128) - 1) - (1 << 127)


class Digests:
    """64-bit digests, each with the number of its row; see the module."""

    def __init__(self) -> None:
        self._values, self._rows = array("Q"), array("Q")
        self._file: IO[bytes] | None = None
        self._filter: Any = None
        self._stored = 0

    def add(self, value: int, row: int) -> None:
        """Add a digest; rows must come in ascending order. UserError where there is no room for the temporary file."""
        self._values.append(value)
        self._rows.append(row)
        if len(self._values) == HELD:
            self._store()

    def __len__(self) -> int:
        return self._stored + len(self._values)

    def save(self, file: Path) -> None:
        """Write all to a file, 16 bytes each, for `add_from`."""
        import numpy as np

        with writing(file), open(file, "wb") as out:
            for values, rows in self._chunks():
                out.write(np.stack([values, rows], axis=1).tobytes())

    def add_from(self, file: Path) -> None:
        """Add what another has saved; its rows must come after those that are here."""
        for value, row in saved(file):
            self.add(value, row)

    def repeats(self) -> Iterator[tuple[int, int]]:
        """Iterate over rows with a digest of an earlier row, with the first such row: in order, or in several parts."""
        import numpy as np

        for values, _ in _parts(self._suspects):
            firsts: np.ndarray = np.full(len(values), AGAIN, np.uint64)
            for place, rows in self._among(values):
                new, at = np.unique(place, return_index=True)
                unseen = firsts[new] == AGAIN
                firsts[new[unseen]] = rows[at[unseen]]
                again = rows != firsts[place]
                yield from zip(rows[again].tolist(), firsts[place[again]].tolist(), strict=True)

    def shared(self, other: Digests) -> Iterator[tuple[int, int]]:
        """Iterate over rows with a digest that `other` has too, with the first such row there; order as of `repeats`."""

        def known() -> Iterator[Found]:
            for values, rows in other._chunks():
                there = self._may_have(values)
                yield values[there], rows[there]

        for values, firsts in _parts(known):
            for place, rows in self._among(values):
                yield from zip(rows.tolist(), firsts[place].tolist(), strict=True)

    def _store(self) -> None:
        """Move what is in memory to the file."""
        import numpy as np

        if self._filter is None:
            self._filter, self._file = bloom_filter(), tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)
        for i, value in enumerate(self._values):
            if value in self._filter:
                self._rows[i] |= AGAIN
            else:
                self._filter.add(value)
        pairs = np.stack([np.frombuffer(self._values, np.uint64), np.frombuffer(self._rows, np.uint64)], axis=1)
        assert self._file is not None
        try:
            self._file.seek(0, 2)
            self._file.write(pairs.tobytes())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{tempfile.gettempdir()} has no room for the digests of {len(self):,} rows ({error.strerror}): free "
                f"{16 * len(self) >> 20} MiB and more there, or set TMPDIR"
            ) from error
        self._stored += len(self._values)
        self._values, self._rows = array("Q"), array("Q")

    def _marked(self) -> Iterator[Found]:
        """All digests in pieces; of stored ones, rows may have the mark `AGAIN`."""
        import numpy as np

        for start in range(0, self._stored, HELD):
            assert self._file is not None
            self._file.seek(16 * start)
            pairs = np.frombuffer(self._file.read(16 * HELD), np.uint64).reshape(-1, 2)
            yield pairs[:, 0], pairs[:, 1]
        if self._values:
            yield np.frombuffer(self._values, np.uint64).copy(), np.frombuffer(self._rows, np.uint64).copy()

    def _chunks(self) -> Iterator[Found]:
        return ((values, rows & ~_mark()) for values, rows in self._marked())

    def _suspects(self) -> Iterator[Found]:
        """Digests that may have been there before, with their rows."""
        import numpy as np

        if self._stored and self._values:
            self._store()
        for values, rows in self._marked():
            if self._stored:
                again = (rows & _mark()) > 0
            else:
                again = np.ones(len(values), bool)
                again[np.unique(values, return_index=True)[1]] = False
            yield values[again], rows[again]

    def _may_have(self, values: np.ndarray) -> np.ndarray:
        import numpy as np

        held = np.isin(values, np.frombuffer(self._values, np.uint64)) if self._values else np.zeros(len(values), bool)
        if self._filter is not None:
            held |= np.fromiter((value in self._filter for value in values.tolist()), bool, len(values))
        return held

    def _among(self, values: np.ndarray) -> Iterator[Found]:
        """Places in `values` (sorted) of this object's digests that are there, and their rows, in order."""
        import numpy as np

        for own, rows in self._chunks():
            place = np.minimum(np.searchsorted(values, own), len(values) - 1)
            there = values[place] == own
            yield place[there], rows[there]


def _mark() -> Any:
    import numpy as np

    return np.uint64(AGAIN)


def _parts(pieces: Callable[[], Iterator[Found]]) -> Iterator[Found]:
    """Parts of the digests of some pieces: about `HELD` of them each, sorted and once each, with the first of their rows."""
    import numpy as np

    count = -(-sum(len(values) for values, _ in pieces()) // HELD)
    for part in range(count):
        values: np.ndarray = np.zeros(0, np.uint64)
        rows = values
        for more, their_rows in pieces():
            mine = more % np.uint64(count) == part
            values, first = np.unique(np.concatenate([values, more[mine]]), return_index=True)
            rows = np.concatenate([rows, their_rows[mine]])[first]
        if len(values):
            yield values, rows


def saved(file: Path) -> Iterator[tuple[int, int]]:
    """Iterate over digests and rows in a file of `Digests.save`."""
    import numpy as np

    with open(file, "rb") as source:
        while data := source.read(16 * HELD):
            yield from map(tuple, np.frombuffer(data, np.uint64).reshape(-1, 2).tolist())


class KnownDigests:
    """A set of 64-bit digests, exact, in memory that does not grow with it.

    Up to `HELD` are in memory. More go to a temporary file, sorted in runs of `HELD`; what the Bloom filter takes for known is
    searched in them.
    """

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._runs: list[np.ndarray] = []
        self._file: IO[bytes] | None = None
        self._filter: Any = None

    def add(self, value: int) -> None:
        """Add a digest; UserError where there is no room for the temporary file."""
        self._held.add(value)
        if len(self._held) >= HELD:
            self._store()

    def __contains__(self, value: int) -> bool:
        if value in self._held:
            return True
        if self._filter is None or value not in self._filter:
            return False
        import numpy as np

        wanted = np.uint64(value)
        places = ((run, int(np.searchsorted(run, wanted))) for run in self._runs)
        return any(place < len(run) and run[place] == wanted for run, place in places)

    def _store(self) -> None:
        import numpy as np

        if self._file is None:
            self._filter, self._file = bloom_filter(), tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)
        for value in self._held:
            self._filter.add(value)
        run = np.sort(np.fromiter(self._held, np.uint64, len(self._held)))
        start = 8 * sum(map(len, self._runs))
        try:
            self._file.write(run.tobytes())
            self._file.flush()
        except OSError as error:
            raise UserError(f"{tempfile.gettempdir()} has no room for digests ({error.strerror}): set TMPDIR") from error
        self._runs.append(np.memmap(self._file, np.uint64, "r", start, run.shape))
        self._held = set()


class FirstRows:
    """The first row with each name, as digests; further rows may come too where there are more than `HELD` names."""

    def __init__(self) -> None:
        self.digests = Digests()
        self._seen: set[int] = set()

    def add(self, name: str, row: int) -> None:
        """Add a row's name, unless it is empty."""
        if name:
            self.add_digest(digest(name.encode("utf-8", "replace")), row)

    def add_digest(self, value: int, row: int) -> None:
        """Add the digest of a row's name."""
        if value in self._seen:
            return
        if len(self._seen) < HELD:
            self._seen.add(value)
        self.digests.add(value, row)


class Distinct:
    """Number of distinct values: exact up to `HELD`; the others are estimated by the bits that they set in a Bloom filter."""

    def __init__(self) -> None:
        self.held: set[Any] = set()
        self._filter: Any = None

    def add(self, value: Any, hashed: Callable[[Any], int] = int) -> None:
        """Count a value; `hashed` makes 64 bits of it."""
        if value in self.held:
            return
        if len(self.held) < HELD:
            self.held.add(value)
            return
        if self._filter is None:
            self._filter = bloom_filter()
        self._filter.add(hashed(value))

    def join(self, held: set[Any], saved: bytes, hashed: Callable[[Any], int] = int) -> None:
        """Count what another holds, and its filter (`filter_bytes`), too; once there is a filter, it has all of them."""
        held = self.held | held
        if self._filter is None and not saved and len(held) <= HELD:
            self.held = held
            return
        self._filter = bloom_filter() if self._filter is None else self._filter
        if saved:
            self._filter.update(bloom_filter(saved))
        for value in held:
            self._filter.add(hashed(value))
        self.held = set()

    @property
    def filter_bytes(self) -> bytes:
        """The filter of those that are not held, to be joined; b"" for none."""
        return b"" if self._filter is None else bytes(self._filter.save_bytes())

    @property
    def count(self) -> int:
        """The number."""
        return len(self.held) + (0 if self._filter is None else round(self._filter.approx_items))

    @property
    def error(self) -> float:
        """Standard error of the number, as a share of it: 0 where it is exact.

        Of n values with k of m bits each, t = k n / m, it is sqrt(e^t - t - 1) / (t sqrt(m)) (Whang, Vander-Zanden and Taylor
        1990, "A linear-time probabilistic counting algorithm for database applications").
        """
        if self._filter is None:
            return 0.0
        bits, estimated = self._filter.size_in_bits, max(1.0, self._filter.approx_items)
        t = HASHES * estimated / bits
        return math.sqrt(max(0.0, math.expm1(t) - t)) / (t * math.sqrt(bits)) * estimated / self.count
