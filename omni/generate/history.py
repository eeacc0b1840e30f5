"""Lays out a conversation's past as columns: the questions, and the delivered part of the answers.

The past is kept as turns. The cache is a copy that can be made again: for each question, the columns that it must hold are laid
out from the turns and compared with those it does hold (`CachedHistory`). An answer that was cut short, or whose columns were
fed in another form than the offline layout, differs from some column on, and from there it is fed again.

Dimensions: K streams, C columns, N features, W width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from omni.encoder.config import PreparedSound
from omni.errors import RoomError
from omni.generate.listening import FeatureStream, new_sound
from omni.generate.question import Asked
from omni.layout import Layout
from omni.model.kv_cache import KVCache
from omni.tasks import Columns, Task, Turn, answer, join, prompt, system_message

Key = tuple[int, ...]
"""Identifies a column: its K ids, and the sound and index of the feature that it takes (-1 and -1 for none)."""


@dataclass(eq=False)
class Exchange:
    """A turn, its number in the conversation, its spoken question [S] at 16 kHz, and that question's features [N, W] once
    they were made; until then what was prepared for the encoder, or heard while the sound came. `sound`: number of its
    features, by which their columns are known in a cache."""

    turn: Turn
    number: int
    clip: Tensor | None = None
    features: Tensor | None = None
    prepared: PreparedSound | None = None
    heard: FeatureStream | None = None
    sound: int = field(default_factory=new_sound)
    _parts: dict[bool, _Part] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.heard is not None:
            self.sound = self.heard.number

    def part(self, layout: Layout, answered: bool) -> _Part:
        """The columns of its question, without a system message, or those of its answer; made once, since every question of a
        conversation looks at all turns before it."""
        known, turn = self._parts.get(answered), self.turn
        if known is None or known.layout is not layout or known.turn is not turn:
            if answered:
                columns = answer(layout, turn)
            elif isinstance(turn.task, Task) and turn.task.question == "audio":
                columns = _spoken(layout, turn.task, turn.features)
            else:
                columns = prompt(layout, replace(turn, system=()))
            known = self._parts[answered] = _Part(layout, turn, columns, _keys(columns, self.sound))
        return known


@lru_cache(maxsize=256)
def _spoken(layout: Layout, task: Task, features: int) -> Columns:
    """Columns of any spoken question of as many features; they are not to be changed."""
    return prompt(layout, Turn(task, features=features))


class _Part(NamedTuple):
    """Columns of a turn in a layout, and their keys."""

    layout: Layout
    turn: Turn
    columns: Columns
    keys: list[Key]


def _keys(columns: Columns, sound: int) -> list[Key]:
    pairs = zip(columns.tokens.T.tolist(), columns.feature_index.tolist(), strict=True)
    return [(*column, sound if index >= 0 else -1, index) for column, index in pairs]


def lay_out(
    layout: Layout, past: Sequence[Exchange], asked: Exchange | None, system: Sequence[int] = ()
) -> tuple[Columns, list[Key]]:
    """All columns from the conversation's start to the end of the new question's prompt, or of the last answer where nothing
    is asked, and their keys. `system`: token ids of the system message, which comes before the first turn that is left."""
    message = system_message(layout, system)
    parts = [exchange.part(layout, answered) for exchange in past for answered in (False, True)]
    if asked is not None:
        parts.append(asked.part(layout, False))
    keys = _keys(message, -1) + [key for part in parts for key in part.keys]
    return join([message, *(part.columns for part in parts)]), keys


def fit(
    layout: Layout, past: Sequence[Exchange], asked: Exchange, system: Sequence[int], length: int, most: int, forget: bool
) -> tuple[list[Exchange], Columns, list[Key]]:
    """Lay out a conversation with a new question in a cache of `length` positions. Returns the turns that were kept, the
    columns and their keys. RoomError: there is no room for an answer.

    Args:
        most: positions of the largest cache that the model could have, for the error.
        forget: drop the oldest turns, those of `forgotten` first, until a quarter of the cache is free, or only the question
            is left.
    """
    dropped = dropped_for(layout, past, len(asked.part(layout, False).keys), system, length) if forget else 0
    past = list(past[dropped:])
    columns, keys = lay_out(layout, past, asked, system)
    if len(keys) >= length:
        way = "use overflow='forget', or start a new session" if past else "shorten the question"
        raise RoomError(
            f"history and question take {len(keys)} positions, but the session's cache has {length} and an "
            f"answer needs some: {way}{_or_larger(length, most)}"
        )
    return past, columns, keys


def dropped_for(layout: Layout, past: Sequence[Exchange], question: int, system: Sequence[int], length: int) -> int:
    """Number of the oldest turns that go before a question of so many columns, in a cache of `length` positions; no fewer than
    before a shorter one."""
    dropped, sizes = forgotten(layout, past, system, length), [_size(layout, exchange) for exchange in past]
    own = len(system_message(layout, system)) + question
    while dropped < len(past) and own + sum(sizes[dropped:]) > length - length // 4:
        dropped += 1
    return dropped


def forgotten(layout: Layout, past: Sequence[Exchange], system: Sequence[int], length: int) -> int:
    """Number of the oldest turns that go before the next question, whatever it is, in a cache of `length` positions.

    None while the longest question of these turns, asked again, would leave a quarter of the cache free; else as many as make
    three quarters of it free, but never the last. So turns go seldom, and little stays, which can be fed before the question
    comes: half a column again for each new one.
    """
    longest = max((len(exchange.part(layout, False).keys) for exchange in past), default=0)
    return forgotten_of([_size(layout, exchange) for exchange in past], longest, length, len(system_message(layout, system)))


def forgotten_of(sizes: Sequence[int], longest: int, length: int, system: int = 0) -> int:
    """`forgotten` by sizes: columns of each turn, of the longest question and of the system message."""
    taken, dropped = system + sum(sizes), 0
    if taken + longest <= length - length // 4:
        return 0
    while dropped < len(sizes) - 1 and taken > length // 4:
        taken -= sizes[dropped]
        dropped += 1
    return dropped


def _size(layout: Layout, exchange: Exchange) -> int:
    """Number of columns of a turn."""
    return len(exchange.part(layout, False).keys) + len(exchange.part(layout, True).keys)


def _or_larger(length: int, most: int) -> str:
    return ", or give a larger context" if length < most else "; the model has no more positions"


def check_room(layout: Layout, past: Sequence[Exchange], system: Sequence[int], length: int, most: int) -> None:
    """Refuse turns that fill a cache of `length` positions by themselves (RoomError); `most` as for `fit`."""
    taken = len(system_message(layout, system)) if past else 0
    taken += sum(_size(layout, e) for e in past)
    if taken >= length:
        raise RoomError(
            f"the history takes {taken} positions, but the session's cache has {length}: leave its oldest turns out, or use "
            f"overflow='forget'{_or_larger(length, most)}"
        )


@dataclass(eq=False)
class CachedHistory:
    """Content of one row of a cache.

    Attributes:
        keys: keys of its columns.
        under: the edits and adapters with which the columns were fed.
        high: number of positions written since the row was last empty.
    """

    keys: list[Key] = field(default_factory=list)
    under: Hashable = None
    high: int = 0

    def keep(self, wanted: Sequence[Key], under: Hashable, cache: KVCache, row: int) -> int:
        """Rewind a row of the cache to the prefix that it shares with `wanted`, whose rest is about to be fed; returns its
        length.

        The last of `wanted` is always fed. In a sliding window's ring the slots before the kept columns may have been
        overwritten: then the row is emptied.
        """
        keep = self.shared(wanted, under)
        self.under = under
        if keep == 0 or (cache.ring and self.high - keep > cache.chunk):
            cache.reset([row])
            keep = self.high = 0
        else:
            cache.rewind(row, keep)
        self.keys, self.high = self.keys[:keep], max(self.high, len(wanted))  # a failing prefill has written some of them
        return keep

    def shared(self, wanted: Sequence[Key], under: Hashable) -> int:
        """Length of the prefix that the row shares with `wanted`, the last of which does not count."""
        if under != self.under:  # its columns were fed with other edits or adapters than are active now
            return 0
        pairs = enumerate(zip(self.keys, wanted[:-1], strict=False))
        return next((i for i, (mine, other) in pairs if mine != other), min(len(self.keys), len(wanted) - 1))

    def add(self, columns: Sequence[Sequence[int]], position: int) -> None:
        """Record columns that steps wrote and fed; nothing was fed at `position` or beyond."""
        self.keys += [(*column, -1, -1) for column in columns]
        self.high = max(self.high, position)


@dataclass(frozen=True)
class Past:
    """History that a session starts with.

    Attributes:
        turns: questions with their answers in `turn`.
        asked: number of questions in all, forgotten ones included; random draws continue from it.
    """

    turns: tuple[Asked, ...] = ()
    asked: int = 0
