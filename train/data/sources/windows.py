"""The order of a source's rows where row groups are read as wholes, for slow disks and buckets.

    epoch     the groups in shuffled order, their rows one after another                 G groups, N rows
    run       each of P packers takes a run of N / P of these rows, one row more or less
    window    so many groups of a run that follow one another; their rows are shuffled

Draw d of an epoch is draw d // P of run d mod P. A row is a pure function of (key of the epoch, d, P), found in O(log G): no
draw needs those before it. A group is read by one packer alone, besides those that the P - 1 ends of runs cut in two.

Groups of one writer have one number of rows, but for some. The others, O of them, are `odd`: they are spread evenly over the
order and shuffled among themselves; the number of rows before a group follows from sums over these, which an epoch takes once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from train.data.seeding import shuffled, shuffled_all

if TYPE_CHECKING:
    import numpy as np

KEPT_EPOCHS, KEPT_WINDOWS = 2, 4096
"""Orders and windows that are kept, those used last: packers may be in two epochs."""


@dataclass(frozen=True)
class GroupSizes:
    """Numbers of rows of G groups: `common`, but for the `odd` ones.

    Attributes:
        odd, sizes: numbers of the odd groups, ascending, and their numbers of rows, int64 [O].
    """

    count: int
    common: int
    odd: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, sizes: np.ndarray) -> GroupSizes:
        """Of each group's number of rows, integers [G]."""
        import numpy as np

        frequency = np.bincount(sizes, minlength=2)
        common = 1 + int(frequency[1:].argmax())
        odd = np.flatnonzero(sizes != common)
        return cls(len(sizes), common, odd, sizes[odd].astype(np.int64))

    def without(self, rows: Sequence[int]) -> GroupSizes:
        """The same groups without these rows, each named once."""
        import numpy as np

        sums = np.concatenate(([0], np.cumsum(self.sizes)))
        firsts = self.common * (self.odd - np.arange(len(self.odd))) + sums[:-1]  # of the odd groups
        groups = []
        for row in rows:
            before = bisect_right(firsts, row)  # odd groups that start here or before
            group, first = (int(self.odd[before - 1]), int(firsts[before - 1])) if before else (-1, 0)
            end = first + (int(self.sizes[before - 1]) if before else 0)
            groups.append(group if row < end else group + 1 + (row - end) // self.common)
        odd = np.union1d(self.odd, np.array(groups, np.int64))
        sizes = np.full(len(odd), self.common, np.int64)
        sizes[np.searchsorted(odd, self.odd)] = self.sizes
        np.subtract.at(sizes, np.searchsorted(odd, np.array(groups, np.int64)), 1)
        return GroupSizes(self.count, self.common, odd, sizes)


class GroupDraw(NamedTuple):
    """A row group of a draw, and how long it is needed: until its packer comes to another window.

    Attributes:
        packer: number of the packer among all.
        window: epoch, and the place in it where the window starts.
        group: number of the group among those of the source.
    """

    packer: int
    window: tuple[int, int]
    group: int


class WindowRow(NamedTuple):
    """A row: its number in the source, that of its group, and the place in the epoch where its window starts."""

    row: int
    group: int
    start: int

    def drawn(self, packer: int, epoch: int) -> GroupDraw:
        """The group of a draw of this packer, in this epoch."""
        return GroupDraw(packer, (epoch, self.start), self.group)


class GroupWindows:
    """The order of rows; see the module.

    Args:
        width: groups of a window.
    """

    def __init__(self, groups: GroupSizes, width: int) -> None:
        import numpy as np

        self.groups, self.width = groups, width
        self.sums = np.concatenate(([0], np.cumsum(groups.sizes)))  # rows of the odd groups before each of them
        self.regular = groups.odd - np.arange(len(groups.odd))  # other groups before each odd one
        self.rows = groups.common * (groups.count - len(groups.odd)) + int(self.sums[-1])
        self._orders: OrderedDict[tuple[int | str, ...], _Order] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], _Window] = OrderedDict()

    def find(self, place: int, packers: int, *epoch: int | str) -> WindowRow:
        """The row of draw `place` of the epoch with this key, where draws are shared by so many packers."""
        run, mine = place % packers, place // packers
        length, longer = divmod(self.rows, packers)
        start = run * length + min(run, longer)
        window = self._window(start, start + length + (run < longer), start + mine, epoch)
        row = window.start + shuffled(start + mine - window.start, window.end - window.start, *epoch, "window", window.start)
        slot = bisect_right(window.ends, row)
        return WindowRow(row + window.shifts[slot], window.groups[slot], window.start)

    def first(self, group: int) -> int:
        """Number of a group's first row."""
        odd = bisect_left(self.groups.odd, group)
        return self.groups.common * (group - odd) + int(self.sums[odd])

    def _window(self, start: int, end: int, place: int, epoch: tuple[int | str, ...]) -> _Window:
        """The window of a place in the run from `start` to `end`."""
        window = self._windows.get((start, end))
        if window is None or window.epoch != epoch or not window.start <= place < window.end:
            window = self._windows[start, end] = self._make(start, end, place, epoch)
            if len(self._windows) > KEPT_WINDOWS:
                self._windows.popitem(last=False)
        self._windows.move_to_end((start, end))
        return window

    def _make(self, start: int, end: int, place: int, epoch: tuple[int | str, ...]) -> _Window:
        if epoch not in self._orders:
            self._orders[epoch] = _Order(self, epoch)
            if len(self._orders) > KEPT_EPOCHS:
                self._orders.popitem(last=False)
        order = self._orders[epoch]
        origin = order.slot(start)
        first = origin + (order.slot(place) - origin) // self.width * self.width
        slots = range(first, min(first + self.width, order.slot(end - 1) + 1))
        groups = [order.group(slot) for slot in slots]
        before = [order.before(slot) for slot in slots]
        ends = [*before[1:], order.before(slots[-1] + 1)]
        shifts = [self.first(group) - rows for group, rows in zip(groups, before, strict=True)]
        return _Window(epoch, max(start, before[0]), min(end, ends[-1]), ends, groups, shifts)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_orders": OrderedDict(), "_windows": OrderedDict()}


class _Window(NamedTuple):
    """Places of an epoch from `start` to `end`; of each group there its end, its number, and the row of place 0 minus 0."""

    epoch: tuple[int | str, ...]
    start: int
    end: int
    ends: list[int]
    groups: list[int]
    shifts: list[int]


class _Order:
    """The order of the groups in an epoch: slot s of G has one of them."""

    def __init__(self, of: GroupWindows, epoch: tuple[int | str, ...]) -> None:
        import numpy as np

        self.of, self.epoch = of, epoch
        self.count, self.common, self.some = of.groups.count, of.groups.common, len(of.groups.odd)
        self.odd = shuffled_all(self.some, *epoch, "odd")
        self.sums = np.concatenate(([0], np.cumsum(of.groups.sizes[self.odd])))

    def before(self, slot: int) -> int:
        """Number of rows in the slots before this one."""
        odd = slot * self.some // self.count
        return self.common * (slot - odd) + int(self.sums[odd])

    def slot(self, place: int) -> int:
        """The slot of a row, by its place in the epoch."""
        return bisect_right(range(self.count + 1), place, key=self.before) - 1

    def group(self, slot: int) -> int:
        """The group in a slot."""
        odd = slot * self.some // self.count
        if (slot + 1) * self.some // self.count > odd:
            return int(self.of.groups.odd[self.odd[odd]])
        place = shuffled(slot - odd, self.count - self.some, *self.epoch, "groups")
        return place + bisect_right(self.of.regular, place)
