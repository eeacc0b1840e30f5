"""Slots of the engine's cache and who holds them.

A conversation keeps its slot between its turns, so that only what is new is fed; the one that waited longest gives it up where
others need it. Its turns are kept apart (`omni.generate.history`), so it finds another slot and is fed again there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from omni.generate.history import CachedHistory
from omni.generate.options import BOUNDS, Bound, check_number

_TURNS = count()


@dataclass(eq=False)
class Seat:
    """A conversation's claim to a slot of the cache.

    Attributes:
        limit: positions that it may fill.
        slot: its slot, None while it has none.
        held: its columns in the slot.
        busy: whether an answer of it is under way; such a seat keeps its slot.
        used: number that grows with each use.
    """

    limit: int
    slot: int | None = None
    held: CachedHistory = field(default_factory=CachedHistory)
    busy: bool = False
    used: int = 0


class Slots:
    """The slots, lowest first, so that the rows of a step are neighbours. `holders`: the seat that has each slot; a second
    row of an answer has the seat of the first."""

    def __init__(self, number: int) -> None:
        self.holders: list[Seat | None] = [None] * number

    def grow(self, number: int) -> None:
        self.holders += [None] * (number - len(self.holders))

    @property
    def free(self) -> int:
        """Number of slots that nobody holds."""
        return self.holders.count(None)

    def idle(self) -> list[Seat]:
        """Seats that have a slot and no answer under way, the one that waited longest first."""
        held = {id(seat): seat for seat in self.holders if seat is not None and not seat.busy}
        return sorted(held.values(), key=lambda seat: seat.used)

    def take(self, seat: Seat) -> int:
        """A free slot for a seat, or one of a seat that is idle."""
        if None not in self.holders:
            self.give(self.idle()[0])
        slot = self.holders.index(None)
        self.holders[slot] = seat
        return slot

    def place(self, seat: Seat) -> None:
        """Give a seat its slot, where it has none, and mark it as busy."""
        seat.busy = True
        self.hold(seat)

    def hold(self, seat: Seat) -> None:
        """Give a seat its slot, where it has none, and let it be the last that gives one up."""
        seat.used = next(_TURNS)
        if seat.slot is None:
            seat.slot, seat.held = self.take(seat), CachedHistory()

    def closer(self, slot: int, origin: bool) -> int:
        """The slot to which a busy seat's row in `slot` is to move, so that rows of a step are neighbours and few others lie
        between them; `slot` itself where it is close enough. `origin`: steps begin with slot 0, whoever holds it."""
        busy = [slot, *(n for n, seat in enumerate(self.holders) if seat is not None and seat.busy)]
        count, span = len(set(busy)), max(busy) + 1 - (0 if origin else min(busy))
        return slot if slot < count or span <= count + count // 10 + 1 else self.lowest(slot)

    def lowest(self, slot: int) -> int:
        """The first slot up to `slot` without a busy seat, or `slot`."""
        return next((n for n, seat in enumerate(self.holders[:slot]) if seat is None or not seat.busy), slot)

    def exchange(self, slot: int, other: int) -> Seat | None:
        """Exchange two slots, of a busy seat and of one that is idle, which is returned; or of none."""
        seat, idle = self.holders[slot], self.holders[other]
        self.holders[slot], self.holders[other] = idle, seat
        for holder, old, new in ((seat, slot, other), (idle, other, slot)):
            if holder is not None and holder.slot == old:
                holder.slot = new
        return idle

    def give(self, seat: Seat) -> None:
        """Free a seat's slots."""
        self.holders = [None if holder is seat else holder for holder in self.holders]
        seat.slot = None

    def drop(self, slot: int) -> None:
        """Free one slot."""
        self.holders[slot] = None


LIMITS = {
    "slots": Bound(1, 65536, "None for as many as are asked for"),
    "context": BOUNDS["context"],
    "patience": Bound(1e-3, 86_400, "seconds; None for the default", whole=False),
    "queue": Bound(0, 2**31 - 1, "questions; None for any number"),
    "threads": Bound(1, 1024, "by default PyTorch's own number"),
}
"""Bounds of an engine's numbers."""


def check_limits(**limits: float | None) -> None:
    """UserError for one of `LIMITS` that is out of its bounds; None counts as not given."""
    for name, number in limits.items():
        if number is not None:
            check_number(name, number, LIMITS[name])
