"""What stays of a conversation when its oldest turns go: fed into its row before the next question comes.

A row's columns know what came before them, so that without the oldest turns all that stays is fed again (`overflow="forget"`).
Between two turns the engine does that in pieces, when nothing else is due; a question that comes before the end feeds the rest.
Which turns go depends on the turns alone (`omni.generate.history.forgotten`), never on how far this came, and each piece is
compared with what the row holds at that moment: an answer is the same with it and without.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni.engine.slots import Seat
from omni.errors import UserError
from omni.generate.history import Exchange, Key, forgotten, lay_out
from omni.generate.prefill import Prefill, pack
from omni.generate.runner import Runner
from omni.layout import Layout
from omni.lora.attach import CHANGING, active_edits, changes, selection_of
from omni.lora.selection import RowSelection, using
from omni.tasks import Columns
from omni.utils.hardware import finish_queued

LOG = logging.getLogger(__name__)

HOLD = 0.05
"""Seconds that a piece may take; a question that comes meanwhile waits for its end."""

LEAST = 16
"""Columns of the smallest piece: fewer take as long."""


@dataclass(eq=False)
class Refill:
    """What the row of a conversation is to hold before its next question.

    Attributes:
        said: the turns that stay, with features.
        columns, keys: their columns, after the system message.
        selection: adapter and edits of the conversation.
    """

    seat: Seat
    said: Sequence[Exchange]
    columns: Columns
    keys: list[Key]
    selection: RowSelection = None


def plan(layout: Layout, seat: Seat, past: Sequence[Exchange], system: Sequence[int], selection: RowSelection) -> Refill | None:
    """The refill of a conversation whose oldest turns go before its next question; None where none go, or the encoder has not
    heard a question that stays."""
    stays = past[forgotten(layout, past, system, seat.limit) :]
    if len(stays) == len(past) or any(e.clip is not None and e.features is None for e in stays):
        return None
    columns, keys = lay_out(layout, stays, None, system)
    return Refill(seat, stays, columns, keys, selection) if len(keys) < seat.limit else None


class Refills:
    """The refills that wait, the newest of each conversation; given by its listeners, fed by the stepping thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may drop one
        self._waiting: dict[Seat, Refill] = {}

    def put(self, refill: Refill) -> None:
        with self._lock:
            self._waiting[refill.seat] = refill

    def drop(self, refill: Refill) -> None:
        with self._lock:
            if self._waiting.get(refill.seat) is refill:
                del self._waiting[refill.seat]

    def drop_of(self, seat: Seat) -> None:
        with self._lock:
            self._waiting.pop(seat, None)

    def first(self, runner: Runner | None) -> Refill | None:
        """The refill that waits longest. Those of conversations that have lost their slot, or are being answered, are dropped:
        the question feeds what is left."""
        with self._lock:
            waiting = list(self._waiting.values())
        for refill in waiting:
            if runner is not None and refill.seat.slot is not None and not refill.seat.busy:
                return refill
            self.drop(refill)
        return None

    def piece(self, runner: Runner, refill: Refill, columns: int) -> int:
        """Feed up to that many columns more; returns how many. One that is done, or fails, is dropped."""
        try:
            with CHANGING:  # a removal waits for the piece, and is not refused for it
                fed = feed(runner, refill, min(columns, runner.chunk))
        except Exception as error:  # a lack of memory, an adapter that was removed: the question says so to its listener
            if not isinstance(error, UserError):
                LOG.warning("what stays of a conversation could not be fed before its next question: %s", error)
            refill.seat.held.keys = []
            fed = 0
        if not fed:
            self.drop(refill)
        return fed


@torch.inference_mode()
def feed(runner: Runner, refill: Refill, columns: int) -> int:
    """Feed a row up to that many of the columns that it lacks; returns how many."""
    model, cache, seat, keys = runner.model, runner.cache, refill.seat, refill.keys
    norm = model.decoder.norm.weight
    if seat.slot is None or (cache.device, cache.dtype) != (norm.device, norm.dtype):
        return 0  # the model was moved or cast: the next question makes another cache
    under, held = (active_edits(model), changes(model)), seat.held
    after: Key = ()  # in the place of the question, which is not fed
    start = held.shared([*keys, after], under)
    if start == len(keys):
        return 0
    start = held.keep([*keys[: start + columns], after], under, cache, seat.slot)
    end = min(start + columns, len(keys))
    features = [e.features for e in refill.said if e.features is not None]
    whole = refill.columns
    part = Columns(whole.tokens[:, :end], whole.targets[:, :end], whole.feature_index[:end], whole.features)
    with using(selection_of(model, [refill.selection], model.device)):
        Prefill(model, cache, [seat.slot], pack(model.layout, [part], features, [start])).piece(end - start)
    finish_queued(model.device)
    held.keys = keys[:end]
    return end - start


def columns_in(slack: float, seconds: float) -> int:
    """Columns of a piece where somebody is due in `slack` seconds and a column takes `seconds`; 0 where no piece fits."""
    columns = int(min(slack, HOLD) / seconds)
    return columns if columns >= LEAST else LEAST if slack >= 2 * LEAST * seconds else 0
