"""Questions on their way into the cache: prefilled together, piece by piece.

Dimensions: K streams, N features, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omni.engine.client import Running
from omni.generate.prefill import Fork, Prefill, pack
from omni.generate.rows import RunnerRow
from omni.generate.runner import Runner
from omni.lora.attach import active_edits, changes, selection_of
from omni.lora.selection import using
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import finish_queued

TOGETHER = 16
"""Questions that are prefilled together at most."""

ALIKE = 2.0
"""Prompts are prefilled together up to this ratio of their lengths: the shorter ones are padded."""


@dataclass(eq=False)
class Talk:
    """An answer whose rows are in the engine.

    Attributes:
        slots: of its rows, the speaking one first.
        rows: its rows once they started; the second leaves when its text has ended.
        columns: what the speaking row wrote.
        frames: number of frames among them; `exact`, of those whose samples no later frame changes.
        left: whether its rows are free again.
    """

    running: Running
    slots: list[int]
    rows: list[RunnerRow] = field(default_factory=list)
    columns: list[tuple[int, ...]] = field(default_factory=list)
    frames: int = 0
    exact: float = 0.0
    left: bool = False


def same_kind(talks: Sequence[Talk], most: int) -> list[Talk]:
    """The first of talks and those with its adapters and edits, at most that many."""
    first = talks[0].running.start.selection
    return [talk for talk in talks if talk.running.start.selection == first][: min(most, TOGETHER)]


def left_of(talk: Talk, runner: Runner) -> int:
    """Columns of its prompt that its slot does not hold."""
    running = talk.running
    return len(running.keys) - running.seat.held.shared(running.keys, _under(runner.model))


def _under(model: SpeechModel) -> object:
    return active_edits(model), changes(model)


class Entering:
    """Talks that are prefilled together.

    Args:
        talks: with features; of the same kind (`together`).
    """

    def __init__(self, runner: Runner, talks: Sequence[Talk]) -> None:
        self.runner, self.talks = runner, talks
        model, first = runner.model, talks[0].running
        keeps = []
        for talk in talks:
            running, (row, *_) = talk.running, talk.slots
            keeps.append(running.seat.held.keep(running.keys, _under(model), runner.cache, row))
        features = [e.features for talk in talks for e in talk.running.said if e.features is not None]
        packed = pack(model.layout, [talk.running.columns for talk in talks], features, keeps)
        fork = None if first.fork is None else Fork(talks[0].slots[1], first.fork)
        self._prefill = Prefill(model, runner.cache, [talk.slots[0] for talk in talks], packed, fork)

    @property
    def left(self) -> int:
        return self._prefill.left

    @property
    def rows(self) -> int:
        return len(self.talks)

    def piece(self, columns: int) -> bool:
        """Feed up to that many columns of each row; returns whether the rows have started."""
        model = self.runner.model
        selection = selection_of(model, [talk.running.start.selection for talk in self.talks], model.device)
        with using(selection):
            hidden = self._prefill.piece(min(columns, self.runner.chunk))
        if hidden is None:
            return False
        self._begin(hidden)
        return True

    def _begin(self, hidden: Hidden) -> None:
        slots, starts = [], []
        for talk in self.talks:
            running = talk.running
            running.seat.held.keys = list(running.keys)
            slots += talk.slots
            if running.fork is None:
                starts.append(running.start)
            else:
                starts += [replace(running.start, partner=talk.slots[1]), replace(running.start, audio=False)]
        rows = iter(self.runner.begin(slots, hidden, starts))
        finish_queued(self.runner.model.device)
        for talk in self.talks:
            talk.rows = [next(rows) for _ in talk.slots]
            talk.running.prefill = talk.running.clock.seconds


def together(talks: Sequence[Talk], runner: Runner) -> list[Talk]:
    """The talks to prefill next: the first one, with others that wait for about as many columns. One with a fork goes alone."""
    first = talks[0]
    if first.running.fork is not None:
        return [first]
    own = left_of(first, runner)
    alike = [first]
    for talk in talks[1:]:
        if talk.running.fork is None and own / ALIKE <= left_of(talk, runner) <= own * ALIKE:
            alike.append(talk)
    return alike[:TOGETHER]
