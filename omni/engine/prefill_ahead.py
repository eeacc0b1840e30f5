"""Feeds a conversation's row before its next question is asked, in time that nobody else needs.

A question whose sound is still coming is encoded as chunks fill, and prefilled:

    push --> [samples] --> a chunk's features --> columns: history | input | features so far        end | answer: once asked

What stays when the oldest turns go (`overflow="forget"`) is fed again, since a row's columns know what came before them. Which
turns go depends on the turns alone (`omni.generate.history.forgotten`), never on how far this came.

Each piece is compared with what the row holds at that moment, and what differs from the question is fed again once it is asked:
an answer is the same with it and without.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from omni.engine.answer import Seat
from omni.errors import UserError
from omni.generate.history import Exchange, Key, dropped_for, forgotten, lay_out
from omni.generate.listening import FeatureStream
from omni.generate.question import Asked, encode_questions, is_finite
from omni.generate.runner import Prefill, Runner, pack
from omni.layout import Layout
from omni.lora.attach import CHANGING, RowSelection, active_of, selection_of, using
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns, Turn, prompt
from omni.utils.hardware import finish_queued

LOG = logging.getLogger(__name__)

HOLD = 0.05
"""Seconds that a piece may take; a question that comes meanwhile waits for its end."""

LEAST = 16
"""Columns of the smallest piece: fewer take as long."""


@dataclass(eq=False)
class Refill:
    """The wanted content of a conversation's row before its next question. `said`: the turns that stay, with features;
    columns, keys: their columns, after the system message, and the keys of the first of them, which are fed."""

    seat: Seat
    said: Sequence[Exchange]
    columns: Columns
    keys: list[Key]
    selection: RowSelection = None

    def piece(self, runner: Runner, columns: int) -> int | None:
        """Feed up to that many columns that the row lacks; returns how many. Where it fails (no memory, an adapter that was
        removed), the row is empty and None is returned: the question says so to its listener."""
        try:
            with CHANGING:  # a removal waits for the piece, and is not refused for it
                return feed(runner, self, min(columns, runner.chunk))
        except Exception as error:
            _warn(error)
            self.seat.held.keys = []
            return None


def _warn(error: Exception) -> None:
    if not isinstance(error, UserError):
        LOG.warning("a conversation could not be fed before its next question: %s", error)


def plan(layout: Layout, seat: Seat, past: Sequence[Exchange], system: Sequence[int], selection: RowSelection) -> Refill | None:
    """The refill of a conversation whose oldest turns go before its next question; None where none go, or the encoder has not
    heard a question that stays."""
    stays = past[forgotten(layout, past, system, seat.limit) :]
    if len(stays) == len(past) or any(e.clip is not None and e.features is None for e in stays):
        return None
    columns, keys = lay_out(layout, stays, None, system)
    return Refill(seat, stays, columns, keys, selection) if len(keys) < seat.limit else None


@torch.inference_mode()
def feed(runner: Runner, refill: Refill, columns: int) -> int:
    """Feed a row up to that many of the columns that it lacks; returns how many."""
    model, cache, seat, keys = runner.model, runner.cache, refill.seat, refill.keys
    norm = model.decoder.norm.weight
    if seat.slot is None or (cache.device, cache.dtype) != (norm.device, norm.dtype):
        return 0  # the model was moved or cast: the next question makes another cache
    active, held = active_of(model), seat.held
    under = active.edits, active.changes
    after: Key = ()  # in the place of the question, which is not fed
    start = held.shared([*keys, after], under)
    if start == len(keys):
        return 0
    start = held.keep([*keys[: start + columns], after], under, cache, seat.slot)
    end = min(start + columns, len(keys))
    features = [e.features for e in refill.said if e.features is not None]
    with using(selection_of(model, [refill.selection], model.device)):
        Prefill(model, cache, [seat.slot], pack(model.layout, [refill.columns[:end]], features, [start])).piece(end - start)
    finish_queued(model.device)
    held.keys = keys[:end]
    return end - start


def columns_in(slack: float, seconds: float) -> int:
    """Columns of a piece where somebody is due in `slack` seconds and a column takes `seconds`; 0 where no piece fits."""
    columns = int(min(slack, HOLD) / seconds)
    return columns if columns >= LEAST else LEAST if slack >= 2 * LEAST * seconds else 0


@lru_cache
def columns_around(layout: Layout, task: str) -> tuple[int, int]:
    """Columns of a spoken question before its features, and after them: these are fed once it is asked."""
    heard = (prompt(layout, Turn(task, features=1, system=None)).feature_index >= 0).tolist()
    return heard.index(True), len(heard) - heard.index(True) - 1


STEP = 64
"""Features by which the columns of a question that grows are laid out again."""


@dataclass(eq=False)
class Listen:
    """A conversation's next question, while it is heard before it is asked.

    Attributes:
        past: the turns before it, None while the last one is under way: then it is encoded only.
        system: token ids of the system message.
        forget: the oldest turns go where they find no room.
        failed: it cannot be fed; the question says why.
        fork: as of `omni.engine.answer.Running`; its row has none yet.
    """

    seat: Seat
    stream: FeatureStream
    past: Sequence[Exchange] | None
    system: Sequence[int] = ()
    forget: bool = False
    selection: RowSelection = None
    failed: bool = False
    fork: None = field(default=None, init=False)
    _held: tuple[object, ...] = field(default=(), init=False)
    _asked: Exchange | None = field(default=None, init=False)

    @property
    def _now(self) -> tuple[object, ...]:
        """State by which a further piece is known to be needed: features, slot, and the columns that it holds."""
        return self.stream.known, self.seat.slot, self.seat.held, len(self.seat.held.keys)

    @property
    def ready(self) -> bool:
        """Whether its row may lack something."""
        stream = self.stream
        return not (self.failed or stream.closed or stream.lost or self.past is None) and self._held != self._now

    def stays(self, layout: Layout) -> Sequence[Exchange]:
        """The turns that stay before a question of at least this length."""
        past, question = self.past or (), self.stream.known + sum(columns_around(layout, self.stream.task))
        return past[dropped_for(layout, past, question, self.system, self.seat.limit) :] if self.forget else past

    def refill(self, layout: Layout, length: int) -> Refill:
        """The wanted content of the row at present, at most `length` columns."""
        known = self.stream.known
        size = -(-max(known, 1) // STEP) * STEP
        if self._asked is None or self._asked.turn.features != size:
            self._asked = Exchange(Turn(self.stream.task, features=size), 0, sound=self.stream.number)
        asked, after = self._asked, size - known + columns_around(layout, self.stream.task)[1]
        asked.features = self.stream.features
        said = self.stays(layout)
        whole, keys = lay_out(layout, said, asked, self.system)
        return Refill(self.seat, [*said, asked], whole, keys[: min(len(keys) - after, length)], self.selection)

    def encode(self, model: SpeechModel) -> bool:
        """Encode the chunk that waits; returns whether it did."""
        try:
            with CHANGING, using(selection_of(model, [self.selection], model.device)):
                done = self.stream.advance()
            finish_queued(model.device)
        except UserError:  # an adapter that was removed
            done, self.stream.lost = False, True
        self.failed |= done and not is_finite(self.stream.features)
        return done

    def encode_before(self, model: SpeechModel, missing: Exchange) -> bool:
        """Encode a question of the history without features; returns whether that was done."""
        try:
            with CHANGING, using(selection_of(model, [self.selection], model.device)), torch.inference_mode():
                (features,) = encode_questions(model, [Asked(missing.turn, missing.clip, missing.prepared)])
            if is_finite(features):
                missing.hear(features)
                return True
        except Exception as error:
            _warn(error)
        self.failed = True
        return False

    def feed(self, runner: Runner, columns: int) -> int:
        """Feed up to that many columns that the row lacks; returns how many."""
        fed = self.refill(runner.layout, min(self.seat.limit, runner.length)).piece(runner, columns)
        self.failed = fed is None
        self._held = () if fed else self._now
        return fed or 0
