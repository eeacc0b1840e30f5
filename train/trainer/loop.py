"""The training loop: a list of steps over parts that it knows by their interfaces only."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from omni.checkpoint.tensors import NotFinite
from omni.errors import UserError
from train.checkpoint.checkpointer import Checkpointer
from train.config.run import FitConfig
from train.console.progress import TrainProgress, counted, figures_line
from train.data.batching.packer import update_states
from train.distributed.fabric import full_state, with_whole_state
from train.distributed.process_group import ProcessGroup, is_lost
from train.optim.optimizer import Average, Optimizers, set_learning_rate
from train.optim.schedule import due, learning_rate, used
from train.trainer.announce import end_lines, expectation, lost_line
from train.trainer.balanced_step import Balancing
from train.trainer.feed import Feed
from train.trainer.logs import DataCounts, HighestLosses, Logs
from train.trainer.metrics import StepMetrics
from train.trainer.parts import Callbacks, Figures, Outcome, Parts
from train.trainer.profiler import StepProfiler
from train.trainer.signals import BrokenOff, Stop, break_off
from train.trainer.step import Step
from train.trainer.usage import OutOfMemory, StepTimes, Usage, out_of_memory
from train.trainer.validation import held_out_loss

GIVE_UP = 10
"""Consecutive steps that may be left out because their gradients are not finite."""
USED_UP = "data.sources have given all rows that max_epochs and max_rows allow; the run ends before its budget is spent"
SHOWN_LOSSES = ("loss/text", "loss/audio", "loss/distill")
"""Parts of a held-out loss that the screen shows."""
PACED = (4, 12)
"""Steps of a start whose pace says when an open-ended run is expected to end."""
FIRST_STEPS, LINE_SECONDS = 3, 30.0
"""Steps of a start that the screen shows whatever `log.every` is, and the most seconds between two of its later lines."""


@dataclass
class Loop:
    """One start of a run: `run` to its end or to a signal. `train.trainer.build.build_loop` builds its parts.

    Attributes:
        folder: where everything of the run is written.
        module: the objective as Fabric wraps it.
        trainable: parameters by the model's names.
        step: takes a step of the training.
        open_feed: makes the feed of the steps from the position on, given the signals and a clock.
        average: the running average of the weights, and `balance` that of the tasks, where the configuration has one.
        logs: None in all processes but the first.
    """

    config: FitConfig
    parts: Parts
    folder: Path
    fabric: Fabric
    group: ProcessGroup
    module: Any
    trainable: list[tuple[str, nn.Parameter]]
    optimizer: Optimizers
    step: Step
    open_feed: Callable[[Stop, Callable[[], float]], Feed]
    average: Average | None
    balance: Balancing | None
    meter: StepMetrics
    checkpointer: Checkpointer
    logs: Logs | None
    progress: TrainProgress
    data_counts: DataCounts
    callbacks: Callbacks
    usage: Usage
    highest: HighestLosses
    profiler: StepProfiler

    def __post_init__(self) -> None:
        self.objective, self.position = self.parts.objective, self.checkpointer.position
        self.scaled = bool(self.fabric.strategy.precision.state_dict())  # 16-mixed finds its scale by steps that fail
        self.exported: Path | None = None
        self.before, self.since = self.position.seconds, time.perf_counter()
        self.first_step, self.shown, self.times = self.position.step + 1, self.before, StepTimes()
        self.stop, self.tell_skipped = Stop(self.progress.say_apart if self.group.first else None), 1
        self.begun: Callable[[], None] | None = None
        self.used_up, self.paced = False, self.before

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Trains until the budget is spent or a signal comes (also while the end is written); the state is saved either way."""
        position, stopped = self.position, 0
        try:
            with self.stop as stop:
                feed, factor = self.feed(stop), 0.0
                if position.step:
                    stopped = self._validate_if_due()  # a signal came before this validation
                while not stopped and self._used() < 1:
                    self.group.step = position.step + 1
                    self.profiler.begin(position.step + 1)
                    self.highest.step = position.step + 1
                    self.times.begin()
                    self.meter.start()
                    with self._data(), self.usage.idle:
                        step = feed.next()
                    position.seconds = step.seconds
                    self.used_up = feed.used_up
                    if self._used() >= 1 or self.used_up:  # minutes or rows are spent: the log lacks the last steps
                        if position.step >= self.first_step and position.step % self.config.log.every:
                            self._report(factor)
                        if self.used_up:
                            self.progress.say(f"after step {position.step}: {USED_UP}")
                        break
                    factor = learning_rate(self.config.schedule, self.config.budget, position.step, position.seconds)
                    set_learning_rate(self.optimizer, factor)
                    self.times.of_kind(frozenset(map(id, self.parts.idle(self._used()))))
                    self.step(step, self._used())
                    position.step += 1
                    self.settle()
                    update_states(position.packer_shards, step.batches)
                    if self.average is not None:
                        self.average.update(position.step)
                    self.usage.waited += feed.waited
                    self.times.add("waiting for data", feed.waited)
                    self.times.add("waiting for another process", feed.held_up)
                    slow = self.times.end(position.step)
                    with self.usage.idle:
                        self._say_skipped()
                        self._say_expectation()
                        figures = self._report(factor)
                    self.meter.pause()
                    self.profiler.end(position.step)
                    self.group.phase = "callbacks"
                    self.callbacks.call("on_step", position.step, figures)
                    if slow is not None:
                        self.progress.say(slow)
                    stopped = step.stop or (stop.number if self.group.world == 1 else 0)
                    if not stopped:
                        if self.checkpointer.is_due:
                            self._save(beside=self._used() < 1)
                        stopped = self._validate_if_due()
                self.profiler.close()
                self._save()
                if not stopped:
                    stopped = self._finish()
                self.settle()
                assert self.saved is not None
                outcome = Outcome(position.step, stopped, self.saved, self.exported, position.figures)
                self.callbacks.call("on_end", outcome)
                self.callbacks.check()
            self.group.phase = "upload"
            self.checkpointer.tell_uploads(wait=True)
            trained = self.data_counts.trained(self.checkpointer.own_shards().values())
            self.progress.close()
            if self.group.first:
                adapted = self.config.lora is not None
                for line in end_lines(position, stopped, self.saved, self.exported, self.folder, adapted, trained):
                    self.progress.say(line)
        except KeyboardInterrupt:  # the second Ctrl-C
            self.checkpointer.close(wait=False)
            self.progress.close()
            self.progress.say_apart(lost_line(position.step, self.checkpointer.parent))
            raise
        finally:
            self.profiler.stop()
            self.checkpointer.close(wait=not is_lost(sys.exc_info()[1]))
            self.progress.close()
            if self.logs is not None:
                self.logs.close()
        return replace(outcome, signal=stopped or stop.number)

    def settle(self) -> None:
        """Calls `begun` once: when a step of this start is done, or none is left."""
        begun, self.begun = self.begun, None
        if begun is not None:
            begun()

    def feed(self, stop: Stop) -> Feed:
        """Opens the feed of the steps from the position on."""
        return self.open_feed(stop, self._clock)

    @contextmanager
    def _data(self) -> Iterator[None]:
        """A context in which broken data end the run, after the state is saved."""
        try:
            yield
        except UserError:
            if self.position.step:
                self._save()
                self.progress.say(f"the state after step {self.position.step} is in {self.saved}")
            raise

    def _used(self) -> float:
        position = self.position
        return used(self.config.budget, position.step, position.seconds, self.config.reached(position.figures))

    def _save(self, beside: bool = False) -> None:
        """Saves the state; `beside` the steps that follow, unless a callback is to be told when it is written."""
        before = self.saved
        self.group.phase = "writing checkpoint"
        self.checkpointer.save(self._clock(), beside and not self.callbacks.listen("on_save"))
        if self.saved != before:
            self.callbacks.call("on_save", self.position.step, self.saved)

    @property
    def saved(self) -> Path | None:
        """The last checkpoint."""
        return self.checkpointer.saved

    def out_of_memory(self, error: BaseException) -> OutOfMemory:
        """The error that explains one of memory that ended the run."""
        step = self.position.step + 1 if self.meter.running else None
        return out_of_memory(error, self.fabric.device, self.usage, self.saved, step)

    def _clock(self) -> float:
        return self.before + time.perf_counter() - self.since

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self, factor: float) -> Figures:
        """Shows the step, and writes and returns its row of the log; empty where it has none."""
        self.group.phase = "exchange of losses"
        position, share = self.position, self._used()
        lr = factor * max(group["base_lr"] for group in self.optimizer.param_groups)
        if position.step % self.config.log.every and share < 1 and not self.used_up:
            if self._line_is_due():
                self._show({**self.meter.look(), "lr": lr})
            else:
                self.progress.show(position.step, share, position.seconds)
            return {}
        figures = self.meter.figures()
        self.highest.write()
        self.checkpointer.check_finite("loss", figures["loss"])
        if not self.scaled and self.meter.skipped_in_a_row >= GIVE_UP:
            name = f"gradients' norm of {GIVE_UP} steps one after another"
            self.checkpointer.check_finite(name, float(self.meter.norm))
        figures |= {"lr": lr, "seconds": position.seconds, "gradient_norm": float(self.meter.norm)}
        figures |= self.data_counts.figures(self.checkpointer.own_shards().values())
        figures |= self.usage.figures(self.meter.measured)
        self._show(figures)
        balance = self.balance.tally.figures() if self.balance is not None else {}
        if self.logs is not None:
            self.logs.metrics(position.step, figures)
            if balance:
                self.logs.balance(position.step, balance)
        with self._data():
            self.data_counts.check()
        return figures

    def _say_skipped(self) -> None:
        """Says that steps are left out: at the first, and when they are twice as many. On a GPU it asks at rows of the log."""
        row = self.position.step % self.config.log.every == 0
        if self.scaled or not (row or self.fabric.device.type == "cpu"):
            return
        skipped = round(float(self.meter.skipped))
        if skipped >= self.tell_skipped:
            self.tell_skipped = 2 * skipped
            number = "" if skipped == 1 else f" ({skipped} steps so far)"
            self.progress.say(
                f"step {self.position.step}: left out, because its gradients are not finite{number}; {GIVE_UP} one after "
                "another end the run"
                if float(self.meter.skipped_in_a_row)
                else f"step {self.position.step}: {counted(skipped, 'step')} left out so far: gradients not finite"
            )

    def _say_expectation(self) -> None:
        """Says after the first steps of an open-ended run, from their pace, when it should end."""
        position, (first, last) = self.position, (self.first_step + n - 1 for n in PACED)
        if position.step == first:
            self.paced = position.seconds
        elif position.step == last and None not in (self.config.budget.until, self.config.budget.expected):
            self.progress.say(expectation(self.config, last, (position.seconds - self.paced) / (last - first)))

    def _line_is_due(self) -> bool:
        """True where the screen shows this step although the log has no row of it; the same in all processes."""
        first = self.position.step < self.first_step + FIRST_STEPS
        return self.config.log.progress != "off" and (first or self.position.seconds - self.shown >= LINE_SECONDS)

    def _show(self, figures: Figures) -> None:
        position, self.shown = self.position, self.position.seconds
        self.progress.row(position.step, self._used(), position.seconds, figures)

    # --- validation ---------------------------------------------------------------------------------------------------

    def _validate_if_due(self) -> int:
        """Validates where that is due; the signal that has broken it off, or 0."""
        plan, position = self.config.validation, self.position
        if due(position.step, position.seconds, *position.validated, plan.every_steps, plan.every_minutes):
            return self._validate()
        return 0

    def _validate(self) -> int:
        """Validates; one that a signal breaks off is not made. Returns that signal's number, or 0."""
        before, self.stop.phase = self.position.validated, "validation"
        try:
            if self._measure():
                return 0
        finally:
            self.stop.phase = "step"
        self.position.validated = before
        return self.group.broadcast(self.stop.number)

    def _measure(self) -> bool:
        """Measures the loss of held-out rows in all processes, and free-running generation in the first one (others wait).
        False where a signal has broken it off, which of several processes only the answers heed."""
        position, keep, parts = self.position, self.config.checkpoint, self.parts
        position.validated = (position.step, position.seconds)
        asked = self.group.broadcast(parts.validate is not None)
        batches = parts.held_out.batches
        if not asked and not batches:
            return True
        self.group.phase = "held-out loss"
        try:
            losses = held_out_loss(
                self.module, self.objective, self._breakable(batches), parts.tasks, parts.streams, self.fabric.device,
                self.average, self.group,
            )  # fmt: skip
        except BrokenOff:
            return False
        self.group.phase = "validation answers"
        device = self.fabric.device if self.config.lora is None else "cpu"  # adapters are merged into copies
        weights, validate = self._weights(device) if asked else {}, parts.validate

        def answers() -> Figures | None:
            try:
                return validate(weights, position.step) if validate is not None else {}
            except BrokenOff:
                return None

        figures = self.group.broadcast(self.group.run_on_first(answers))
        if figures is None:
            return False
        position.figures = self.group.broadcast({**figures, **losses})
        self.group.run_on_first(self._show_validation)
        self.callbacks.call("on_validation", position.step, position.figures)
        value = position.figures.get(keep.metric)
        useless = value is None and keep.keep_best > 0 and self._used() < 1
        if self.checkpointer.is_best(value) or useless:
            self._save(beside=not useless and self._used() < 1)
        self.checkpointer.add_figures()
        if useless:
            raise UserError(
                f"checkpoint.metric {keep.metric!r} is not measured here; the validation's figures are "
                f"{', '.join(position.figures)}: name one of them, or set checkpoint.keep_best to 0; the state is in "
                f"{self.saved}"
            )
        return True

    def _breakable(self, batches: Sequence[Any]) -> Iterator[Any]:
        """The batches; before each one a signal ends the validation, where no other process has to agree to that."""
        for batch in batches:
            if self.group.world == 1:
                break_off()
            yield batch

    def _show_validation(self) -> None:
        position = self.position
        if self.logs is not None:
            self.logs.validation(position.step, {**position.figures, "seconds": position.seconds})
        shown = {k: v for k, v in position.figures.items() if not k.startswith("loss/") or k in SHOWN_LOSSES}
        self.progress.say(f"validation at step {position.step}: {figures_line(shown)}")
        self._draw()

    def _weights(self, device: torch.device | str) -> dict[str, Tensor]:
        """The model's weights, or their running average, whole, in the first process; see `full_state`."""
        return full_state(self.objective, self.average.values if self.average else None, self.group, "model.", device)

    def _draw(self) -> None:
        if self.parts.draw is not None and self.logs is not None:
            for name, file in self.parts.draw().items():
                self.logs.image(name, file, self.position.step)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> int:
        """Ends a run whose budget is spent: last validation, exported model, curves; UserError where it left out all steps.
        Returns the signal that has broken off the validation, or 0."""
        steps = self.position.step - self.first_step + 1
        if steps and not self.scaled and int(self.meter.skipped_in_a_row) >= steps:
            self.checkpointer.check_finite(f"gradients' norm of all {steps} steps", math.nan)
        if self.config.validation.at_end and self.position.validated[0] < self.position.step:
            stopped = self._validate()
            if stopped:
                return stopped
        self.stop.phase = "end"
        self.group.phase = "export of the model"
        average, export = self.average.values if self.average else None, self.parts.export

        def work(weights: Mapping[str, Tensor]) -> Path | None:
            try:
                return export(weights) if export is not None else None
            except NotFinite as error:
                raise self.checkpointer.refused(error) from error

        self.exported = with_whole_state(self.objective, average, self.group, work, "model.")
        if self.checkpointer.uploads is not None and self.exported is not None:
            self.checkpointer.uploads.add(self.exported)
        self.group.run_on_first(self._draw)
        return 0
