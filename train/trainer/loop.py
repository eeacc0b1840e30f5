"""The training loop: a list of steps over parts that it knows by their interfaces only."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from omni.errors import UserError
from train.checkpoint.checkpointer import Checkpointer
from train.checkpoint.state import Position
from train.config.run import FitConfig
from train.console.progress import TrainProgress
from train.data.batching.loader import update_states
from train.distributed.process_group import ProcessGroup, is_lost
from train.optim.optimizer import Optimizers, learning_rate, set_learning_rate
from train.trainer.logs import DataCounts
from train.trainer.metrics import StepHealth
from train.trainer.parts import Figures, Observer, Outcome
from train.trainer.screen import end_lines, lost_line
from train.trainer.signals import Stop
from train.trainer.step import Feed, TimedStep
from train.trainer.usage import Usage
from train.trainer.validation import RunValidation

USED_UP = "data.sources have given all rows that max_epochs and max_rows allow; the run ends before its budget is spent"


@dataclass(eq=False)
class Loop:
    """One start of a run: `run` to its end or to a signal. `train.trainer.build.build_loop` builds its parts.

    Attributes:
        feed: makes the feed of the steps from the position on, given the signals.
        step: takes a step of the training.
        observers: begin and log in this order, and end in the reverse one, as contexts within each other do.
    """

    config: FitConfig
    group: ProcessGroup
    optimizer: Optimizers
    feed: Callable[[Stop], Feed]
    step: TimedStep
    validation: RunValidation
    checkpointer: Checkpointer
    observers: list[Observer]
    usage: Usage
    health: StepHealth
    counts: DataCounts
    progress: TrainProgress

    @property
    def position(self) -> Position:
        return self.checkpointer.position

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Trains until the budget is spent or a signal comes (also while the end is written); the state is saved either way."""
        try:
            with Stop(self.progress.say_apart if self.group.first else None) as stop:
                outcome = self._train(stop)
            self.group.phase = "upload"
            self.checkpointer.tell_uploads(wait=True)
            trained = self.counts.trained()
            self.progress.close()
            for line in end_lines(self.position, outcome, self.checkpointer.folder, self.config.lora is not None, trained):
                self.progress.say(line)
        except KeyboardInterrupt:  # the second Ctrl-C
            self.checkpointer.close(finish=False)
            self.progress.close()
            self.progress.say_apart(lost_line(self.position.step, self.checkpointer.parent))
            raise
        finally:
            self.checkpointer.close(finish=not is_lost(sys.exc_info()[1]))
            for observer in reversed(self.observers):
                observer.close()
        return replace(outcome, signal=outcome.signal or stop.number)

    def _train(self, stop: Stop) -> Outcome:
        feed, position = self.feed(stop), self.position
        stopped = self.validation.if_due(stop) if position.step else 0  # a signal came before this validation
        while not stopped and self.checkpointer.used < 1:
            self.group.step = position.step + 1
            for observer in self.observers:
                observer.on_step_begin(position.step + 1)
            with self._saved_if_refused(), self.usage.idle():
                step = feed.next()
            self.usage.waited += step.waited
            position.seconds = step.seconds
            if self.checkpointer.used >= 1 or feed.used_up:  # minutes or rows are spent
                if position.step >= self.health.first_step and position.step % self.config.log.every:
                    self._log()  # the last steps, which the log lacks
                if feed.used_up:
                    self.progress.say(f"after step {position.step}: {USED_UP}")
                break
            factor = learning_rate(self.config.schedule, self.config.budget, position.step, position.seconds)
            set_learning_rate(self.optimizer, factor)
            self.step(step, self.checkpointer.used)
            position.step += 1
            update_states(position.packer_shards, step.batches)
            if (average := self.checkpointer.training.average) is not None:
                average.update(position.step)
            self._end_step()
            stopped = step.stop or (stop.number if self.group.world == 1 else 0)
            if not stopped:
                if self.checkpointer.is_due:
                    self.checkpointer.save(beside=self.checkpointer.used < 1)
                stopped = self.validation.if_due(stop)
        for observer in reversed(self.observers):
            observer.on_steps_end()
        self.checkpointer.save()
        exported = None
        if not stopped:
            stopped, exported = self._finish(stop)
        assert self.checkpointer.saved is not None
        outcome = Outcome(position.step, stopped, self.checkpointer.saved, exported, position.figures)
        for observer in reversed(self.observers):
            observer.on_end(outcome)
        return outcome

    def _end_step(self) -> None:
        step, figures = self.position.step, Figures()
        if step % self.config.log.every == 0 or self.checkpointer.used >= 1:
            figures = self._log()
        self.group.phase = "callbacks"
        with self._saved_if_refused():
            for observer in reversed(self.observers):
                observer.on_step(step, figures)

    def _log(self) -> Figures:
        """Has the row of the present step made and written."""
        self.group.phase = "exchange of losses"
        figures = Figures()
        with self.usage.idle():
            for observer in self.observers:
                observer.on_log(self.position.step, figures)
        return figures

    @contextmanager
    def _saved_if_refused(self) -> Iterator[None]:
        """A context in which broken data end the run, after the state is saved."""
        try:
            yield
        except UserError:
            if self.position.step:
                self.checkpointer.save()
                self.progress.say(f"the state after step {self.position.step} is in {self.checkpointer.saved}")
            raise

    # --- validation and the end ---------------------------------------------------------------------------------------

    def _finish(self, stop: Stop) -> tuple[int, Path | None]:
        """Ends a run whose budget is spent: last validation, exported model; the signal that has broken off the validation,
        or 0, and the model. UserError where this start has left out all steps."""
        steps, meter = self.position.step - self.health.first_step + 1, self.health.meter
        if steps and not self.health.scaled and int(meter.skipped_in_a_row) >= steps:
            self.checkpointer.check_finite(f"gradients' norm of all {steps} steps", math.nan)
        if self.position.validated[0] < self.position.step:
            stopped = self.validation.run(stop)
            if stopped:
                return stopped, None
        stop.phase = "end"
        self.group.phase = "export of the model"
        return 0, self.validation.export()
