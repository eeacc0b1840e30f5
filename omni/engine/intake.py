"""The intake: questions from when they were asked until their rows start. Only the stepping thread changes it.

[waiting] --> place: a slot --> [placed] --> encode --> [entering] prefill, piece by piece --> batch

One more live answer is let in by the lateness that was measured, never by a guess. With n live rows of which the 99th
percentile of lateness is L, and a step that takes c longer with one more row, another is let in while L + c < 0, and while a
step with it takes no longer than a frame plays. What a step takes is known from the engine's own steps; where these had less
than half of the rows that are asked about, from what `Engine.measure` found or kept. Where neither says anything, it is let in.

Dimensions: W width.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from omni.engine.answer import Running, Seat
from omni.engine.batch import EngineBatch
from omni.engine.prefill_ahead import Listen, Refill, columns_in
from omni.engine.stats import Recorder
from omni.generate.history import Exchange
from omni.generate.question import FEATURES_NOT_FINITE, Asked, encode_questions, is_finite
from omni.generate.runner import Fork, Prefill, Runner, pack
from omni.lora.attach import active_of, selection_of, using
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import finish_queued

TOGETHER = 16
"""Questions that are encoded, or prefilled, together at most."""


def unheard(running: Running) -> list[Exchange]:
    """Spoken questions of its conversation that the encoder has not heard yet."""
    return [e for e in running.said if e.clip is not None and e.features is None]


@torch.inference_mode()
def encode(model: SpeechModel, alike: Sequence[Running]) -> list[Running]:
    """Encode what is unheard of questions with the same adapters and edits; returns those with features that are not finite,
    whose features are dropped again. Of one that was heard while its sound came, the rest is encoded."""
    todo = [exchange for running in alike for exchange in unheard(running)]
    with using(alike[0].active):
        for exchange in todo:
            if exchange.heard is not None:
                exchange.hear(exchange.heard.finish())
                exchange.heard = None
        todo = [exchange for exchange in todo if exchange.features is None]
        for low in range(0, len(todo), TOGETHER):
            chunk = todo[low : low + TOGETHER]
            encoded = encode_questions(model, [Asked(e.turn, e.clip, e.prepared) for e in chunk])
            for exchange, features in zip(chunk, encoded, strict=True):
                exchange.hear(features)
    finish_queued(model.device)
    broken = []
    for running in alike:
        running.lay_out(model.layout)
        running.known = replace(running.known, encode=running.clock.seconds)
        nonfinite = [e for e in running.said if not is_finite(e.features)]
        if nonfinite:
            running.reply.fail(FEATURES_NOT_FINITE)
            broken.append(running)
        for exchange in nonfinite:
            exchange.features = None
    return broken


ALIKE = 2.0
"""Prompts are prefilled together up to this ratio of their lengths: the shorter ones are padded."""


class Entering:
    """Answers whose questions, all with features, are prefilled together: the first of those placed, and others that wait for
    about as many columns. One with a fork goes alone."""

    def __init__(self, runner: Runner, placed: Sequence[Running]) -> None:
        self.runner, model, first = runner, runner.model, placed[0]
        active = active_of(model)
        under = active.edits, active.changes
        left = [len(running.keys) - running.seat.held.shared(running.keys, under) for running in placed]
        alike = [r for r, n in zip(placed, left, strict=True) if r.fork is None and left[0] / ALIKE <= n <= left[0] * ALIKE]
        self.answers = alike[:TOGETHER] if first.fork is None else [first]
        self.rows = len(self.answers)
        slots = [running.slots[0] for running in self.answers]
        keeps = [r.seat.held.keep(r.keys, under, runner.cache, slot) for r, slot in zip(self.answers, slots, strict=True)]
        features = [e.features for running in self.answers for e in running.said if e.features is not None]
        packed = pack(model.layout, [running.columns for running in self.answers], features, keeps)
        fork = None if first.fork is None else Fork(first.slots[1], first.fork)
        self.prefill = Prefill(model, runner.cache, slots, packed, fork)

    def piece(self, columns: int) -> bool:
        """Feed up to that many columns of each row; returns whether the rows have started, from hidden states [B, 1, W] of
        their prompts' last columns."""
        model = self.runner.model
        with using(selection_of(model, [running.start.selection for running in self.answers], model.device)):
            hidden = self.prefill.piece(min(columns, self.runner.chunk))
        if hidden is None:
            return False
        slots, starts = [], []
        for running in self.answers:
            running.seat.held.keys = list(running.keys)
            slots += running.slots
            if running.fork is None:
                starts.append(running.start)
            else:
                starts += [replace(running.start, partner=running.slots[1]), replace(running.start, audio=False)]
        rows = iter(self.runner.begin(slots, hidden, starts))
        finish_queued(model.device)
        for running in self.answers:
            running.rows = [next(rows) for _ in running.slots]
            running.known = replace(running.known, prefill=running.clock.seconds)
        return True


LEAST = 32
"""Columns of all rows that a piece of a prefill has at least."""


class Intake:
    """Feeds what is not in the cache: questions that come in, and, in idle time, what stays of conversations, and what has
    come of questions whose sound is still coming.

    Attributes:
        waiting: questions without a slot, in their order.
        placed: those with a slot, not yet prefilled.
        entering: those that are prefilled at present.
    """

    def __init__(self, batch: EngineBatch, recorder: Recorder) -> None:
        self.waiting: deque[Running] = deque()
        self.placed: list[Running] = []
        self.entering: Entering | None = None
        self._batch, self._recorder = batch, recorder
        self._column = 1e-3  # seconds of a column's prefill, of a question's encoding and of a chunk's, as measured
        self._question, self._chunk = 1e-2, 1e-3

    @property
    def coming(self) -> list[Running]:
        """Questions with a slot."""
        entering = self.entering
        return [*self.placed, *([] if entering is None else entering.answers)]

    # --- who is let in ------------------------------------------------------------------------------------------------

    def refusal(self, running: Running, before: Sequence[Running] = ()) -> str:
        """What speaks against a live listener's answer beside the others, and those that wait before it, "" where nothing does;
        from any thread."""
        if running.codec is None or not running.task.audio:
            return ""
        live = sum(other.pace == "live" for other in [*self._batch.answers, *self.coming]) + sum(other.live for other in before)
        if (fixed := self._batch.fixed) is not None:
            taken = sum(seat is not None and seat.busy for seat in list(self._batch.slots.holders))
            if taken + sum(1 + (other.fork is not None) for other in (*before, running)) > fixed:
                return f"the {fixed} slots are taken"
        return admit(self._recorder, live, 1 / running.codec.frame_rate)

    def place(self) -> None:
        """Give waiting questions their slots, in their order."""
        while self.waiting:
            first = self.waiting[0]
            if (first.pace == "live" and self.refusal(first)) or not self._batch.room(self.waiting):
                break
            self._batch.place(first)
            self.placed.append(self.waiting.popleft())

    # --- what is fed --------------------------------------------------------------------------------------------------

    def piece(self, slack: float) -> None:
        """One piece of work: an encoding, or a piece of a prefill, that fits into `slack` seconds where it can."""
        batch, runner = self._batch, self._batch.runner
        assert runner is not None
        entering = self.entering = self.entering or self._next(runner, slack)
        if entering is None:
            return
        if all(running.cancelled for running in entering.answers):
            self.entering = None
            for running in entering.answers:
                batch.free(running)
            return
        columns = entering.prefill.left
        if slack < float("inf"):
            columns = max(-(-LEAST // entering.rows), int(slack / self._column / entering.rows))
        start, fed = time.perf_counter(), min(columns, entering.prefill.left, runner.chunk) * entering.rows
        started = entering.piece(columns)
        self._column = _mean(self._column, start, fed)
        if started:
            self.entering = None
            batch.begin(entering.answers)

    def _next(self, runner: Runner, slack: float) -> Entering | None:
        """The questions to prefill next; None where one was encoded instead, or none is left."""
        batch = self._batch
        dropped = [running for running in self.placed if running.cancelled]
        self.placed = [running for running in self.placed if not running.cancelled]
        for running in dropped:
            batch.free(running)
        if pending := [running for running in self.placed if unheard(running)]:
            first = pending[0]
            if (heard := first.exchange.heard) is not None and heard.taken:  # but not as far as it had come
                with using(first.active):
                    if heard.advance():
                        return None
            fitting = TOGETHER if slack == float("inf") else max(1, int(slack / self._question))
            alike = [running for running in pending if running.start.selection == first.start.selection]
            chosen, start = alike[: min(fitting, TOGETHER)], time.perf_counter()
            for running in encode(batch.model, chosen):
                self.placed.remove(running)
                batch.free(running, "error")
            self._question = _mean(self._question, start, len(chosen))
        elif self.placed and batch.transcribed(self.placed[0]):
            batch.say(self.placed.pop(0))
        elif self.placed:
            entering = Entering(runner, self.placed)  # where this fails, they are still placed
            self.placed = [running for running in self.placed if running not in entering.answers]
            return entering
        return None

    def refill(self, refill: Refill, slack: float) -> int | None:
        """Feed a piece of what stays of a conversation, where it fits into `slack` seconds (None where it does not); returns
        the number of columns, 0 where it is done, or failed."""
        runner, columns, start = self._batch.runner, columns_in(slack, self._column), time.perf_counter()
        if runner is None or not columns:
            return None
        if fed := refill.piece(runner, columns) or 0:
            self._column = _mean(self._column, start, fed)
        return fed

    def listen(self, listen: Listen, open: Sequence[Seat], slack: float) -> bool:
        """Encode a chunk, or feed a piece, of a question whose sound is still coming, where it fits into `slack` seconds.
        `open`: seats of all that are listened to, which keep their slots."""
        batch, start = self._batch, time.perf_counter()
        if listen.stream.due and slack >= 2 * self._chunk and listen.encode(batch.model):
            self._chunk = _mean(self._chunk, start)
            return True
        if not listen.ready or listen.seat.busy:
            return False
        if missing := [e for e in listen.stays(batch.model.layout) if e.clip is not None and e.features is None]:
            if slack < 2 * self._question or not listen.encode_before(batch.model, missing[0]):
                return False
            self._question = _mean(self._question, start)
            return True
        columns = columns_in(slack, self._column)
        if not columns or not (listen.seat.slot is not None or (not self.waiting and batch.seat_early(listen, open))):
            return False
        assert batch.runner is not None
        batch.slots.hold(listen.seat)
        fed = listen.feed(batch.runner, columns)
        if fed >= LEAST:  # fewer take as long
            self._column = _mean(self._column, start, fed)
        return fed > 0

    # --- who goes -----------------------------------------------------------------------------------------------------

    def drop(self, running: Running) -> None:
        """Let a question go that has no slot yet; one that has goes when its turn comes."""
        if running in self.waiting:
            self.waiting.remove(running)
            self._batch.release(running)

    def clear(self) -> list[Running]:
        """Take all questions away; returns them."""
        questions = [*self.coming, *self.waiting]
        self.waiting, self.placed, self.entering = deque(), [], None
        return questions


def _mean(before: float, start: float, count: int = 1) -> float:
    """The running mean of seconds, with those since `start` for so many."""
    return 0.5 * before + 0.5 * (time.perf_counter() - start) / count


SHARE = 0.9
"""Part of a frame's time that steps may take; the rest is for questions that come in."""


def admit(recorder: Recorder, live: int, frame: float) -> str:
    """What speaks against one more live answer, "" where nothing does.

    Args:
        live: answers that somebody hears at present.
        frame: seconds of a frame of sound.
    """
    if not live:
        return ""
    step, each = recorder.step_seconds(live + 1)
    if step > SHARE * frame:
        return f"a step of {live + 1} rows takes {1e3 * step:.0f} ms, a frame plays {1e3 * frame:.0f} ms"
    measured = recorder.late()
    if measured is not None and (late := measured + each) >= 0:
        return f"1 % of the sound of {live} listeners is {1e3 * late:.0f} ms late or more with one more"
    return ""
