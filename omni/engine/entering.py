"""Questions on their way into the cache: encoded by who asks where a core is left beside the steps, else together, between two
of them; then prefilled together, piece by piece.

Dimensions: K streams, N features, W width.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from omni.engine.answer import Running
from omni.generate.history import Exchange
from omni.generate.prefill import Fork, Prefill, pack
from omni.generate.question import FEATURES_NOT_FINITE, Asked, encode_questions, is_finite
from omni.generate.rows import RunnerRow
from omni.generate.runner import Runner
from omni.lora.attach import active_edits, changes, selection_of, using
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import cores, finish_queued

ENCODED_TOGETHER = 16
"""Questions that are encoded together at most."""

WAIT = 0.03
"""Seconds for which one who asks waits while another encodes; after that the question is encoded between two steps."""


def unheard(running: Running) -> list[Exchange]:
    """Spoken questions of its conversation that the encoder has not heard yet."""
    return [e for e in running.said if e.clip is not None and e.features is None]


def advance(running: Running) -> bool:
    """Encode a chunk of a question that was heard while it came, but not as far as it had come; False where none waits."""
    heard = running.exchange.heard
    if heard is None or not heard.begun:  # the whole is quicker
        return False
    with using(running.active):
        return heard.advance()


@torch.inference_mode()
def encode(model: SpeechModel, alike: Sequence[Running]) -> list[Running]:
    """Encode what is unheard of questions with the same adapters and edits; returns those with features that are not finite,
    whose features are dropped again. Of one that was heard while its sound came, the rest is encoded."""
    todo = [exchange for running in alike for exchange in unheard(running)]
    with using(alike[0].active):
        for exchange in todo:
            if exchange.heard is not None:
                exchange.features, exchange.heard = exchange.heard.finish(), None
        todo = [exchange for exchange in todo if exchange.features is None]
        for low in range(0, len(todo), ENCODED_TOGETHER):
            chunk = todo[low : low + ENCODED_TOGETHER]
            encoded = encode_questions(model, [Asked(e.turn, e.clip, e.prepared) for e in chunk])
            for exchange, features in zip(chunk, encoded, strict=True):
                exchange.features, exchange.prepared = features, None
    finish_queued(model.device)
    broken = []
    for running in alike:
        running.encode = running.clock.seconds
        nonfinite = [e for e in running.said if not is_finite(e.features)]
        if nonfinite:
            running.reply.fail(FEATURES_NOT_FINITE)
            broken.append(running)
        for exchange in nonfinite:
            exchange.features = None
    return broken


class Hearing:
    """Encodes questions in the threads of those who ask, where that delays nobody else's sound."""

    def __init__(self, model: SpeechModel) -> None:
        self._model, self._one = model, threading.Lock()

    def beside(self, running: Running) -> None:
        """Do of a question's encoding what can be done beside the steps: at least what the encoder is given.

        On a CPU with more cores than a step takes threads also the rest, one question at a time: others' share the core with
        all else that is done for listeners. What is left, or was not finite, is found by the stepping thread.
        """
        model = self._model
        for exchange in unheard(running):
            if exchange.clip is not None and exchange.prepared is None and exchange.heard is None:
                exchange.prepared = model.config.encoder.prepare(exchange.clip)
        if model.device.type == "cpu" and torch.get_num_threads() < cores() and self._one.acquire(timeout=WAIT):
            try:
                encode(model, [running])
            finally:
                self._one.release()


TOGETHER = 16
"""Questions that are prefilled together at most."""

ALIKE = 2.0
"""Prompts are prefilled together up to this ratio of their lengths: the shorter ones are padded."""


@dataclass(eq=False)
class Talk:
    """An answer whose rows are in the engine.

    Attributes:
        slots, rows: the speaking one first; the second leaves when its text has ended.
        columns: those that the speaking row wrote.
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
    """Talks that are prefilled together. `talks`: with features; of the same kind (`together`)."""

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
