"""Questions whose sound is still coming: encoded as chunks fill, and prefilled into their conversation's row.

    push --> [samples] --> a chunk's features --> columns: history | input | features so far        end | answer: once asked

All of it is done in time that nobody else needs, as in `omni.engine.forget`. What was fed is compared with the question once it
is asked, and what differs is fed again: an answer is the same with it and without.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from omni.engine.forget import Refill, feed
from omni.engine.slots import Seat
from omni.errors import UserError
from omni.generate.feature_stream import FeatureStream
from omni.generate.history import Exchange, dropped_for, lay_out
from omni.generate.question import Asked, encode_questions, is_finite
from omni.generate.runner import Runner
from omni.layout import Layout
from omni.lora.attach import CHANGING, selection_of
from omni.lora.selection import RowSelection, using
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns, Turn
from omni.utils.hardware import finish_queued

LOG = logging.getLogger(__name__)

AFTER = 2
"""Columns of a spoken question after its features: `end` and `answer`, which are fed with the rest once it is asked."""


STEP = 64
"""Features by which the columns of a question that grows are laid out again."""


@dataclass(eq=False)
class Listen:
    """What is heard of a conversation's next question before it is asked.

    Attributes:
        stream: its features.
        past: the turns before it, None while the last one is under way: then it is encoded only.
        system: token ids of the system message.
        forget: the oldest turns go where they find no room.
        selection: adapter and edits of the conversation.
        failed: it cannot be fed; the question says why.
        fork: as of `omni.engine.client.Running`; its row has none yet.
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
        """What there was to feed, and where it was."""
        return self.stream.known, self.seat.slot, self.seat.held, len(self.seat.held.keys)

    @property
    def ready(self) -> bool:
        """Whether its row may lack something."""
        stream = self.stream
        return not (self.failed or stream.closed or stream.lost or self.past is None) and self._held != self._now

    def _stays(self, layout: Layout) -> Sequence[Exchange]:
        """The turns that stay before a question of at least this length."""
        past, question = self.past or (), self.stream.known + 1 + AFTER
        return past[dropped_for(layout, past, question, self.system, self.seat.limit) :] if self.forget else past

    def refill(self, layout: Layout, length: int) -> Refill:
        """What the row is to hold at present, at most `length` columns."""
        known = self.stream.known
        size = -(-max(known, 1) // STEP) * STEP
        if self._asked is None or self._asked.turn.features != size:
            self._asked = Exchange(Turn(self.stream.task, features=size), 0, sound=self.stream.number)
        asked, after = self._asked, size - known + AFTER
        asked.features = self.stream.features
        said = self._stays(layout)
        whole, keys = lay_out(layout, said, asked, self.system)
        end = min(len(keys) - after, length)
        columns = Columns(whole.tokens[:, :end], whole.targets[:, :end], whole.feature_index[:end], whole.features)
        return Refill(self.seat, [*said, asked], columns, keys[:end], self.selection)

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

    def lacks(self, layout: Layout) -> Exchange | None:
        """A question of the history without features."""
        return next((e for e in self._stays(layout) if e.clip is not None and e.features is None), None)

    def encode_before(self, model: SpeechModel) -> bool:
        """Encode the question that `lacks` features; returns whether that was done."""
        missing = self.lacks(model.layout)
        assert missing is not None
        try:
            with CHANGING, using(selection_of(model, [self.selection], model.device)), torch.inference_mode():
                (features,) = encode_questions(model, [Asked(missing.turn, missing.clip, missing.prepared)])
            if is_finite(features):
                missing.features, missing.prepared = features, None
                return True
        except Exception as error:
            self._fails(error)
        self.failed = True
        return False

    def feed(self, runner: Runner, columns: int) -> int:
        """Feed up to that many columns that the row lacks; returns how many."""
        try:
            with CHANGING:
                refill = self.refill(runner.layout, min(self.seat.limit, runner.length))
                fed = feed(runner, refill, min(columns, runner.chunk))
            self._held = () if fed else self._now
            return fed
        except Exception as error:
            self._fails(error)
            self.seat.held.keys = []
            return 0

    def _fails(self, error: Exception) -> None:
        """Of a lack of memory, or an adapter that was removed: the question says so to its listener."""
        self.failed = True
        if not isinstance(error, UserError):
            LOG.warning("a question could not be fed while its sound came: %s", error)


class Listens:
    """The questions that are listened to, one of each conversation; given by its clients, served by the stepping thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may drop one
        self._open: dict[Seat, Listen] = {}

    def put(self, listen: Listen) -> None:
        """Listen for a conversation, or with another past than before."""
        with self._lock:
            self._open[listen.seat] = listen

    def drop(self, seat: Seat, stream: FeatureStream | None = None) -> None:
        """Listen no more for a conversation; where a stream is given, only to that."""
        with self._lock:
            if stream is None or (seat in self._open and self._open[seat].stream is stream):
                self._open.pop(seat, None)

    def later(self, listen: Listen) -> None:
        """Let the others come first."""
        with self._lock:
            if self._open.get(listen.seat) is listen:
                self._open[listen.seat] = self._open.pop(listen.seat)

    def open(self) -> list[Listen]:
        """Those that are open, in their order."""
        with self._lock:
            closed = [seat for seat, listen in self._open.items() if listen.stream.closed]
            for seat in closed:
                del self._open[seat]
            return list(self._open.values())
