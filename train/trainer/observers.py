"""Observers of a run: what the screen shows of it, what its logs get, and when it is refused to go on.

A step's row of the log is made by observers one after another: losses and speed (`StepMetrics`), then what follows here,
`DataCounts` and `Usage`; `StepLines` and `LogWriter` come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from train.checkpoint.checkpointer import Checkpointer
from train.config.run import FitConfig
from train.console.progress import TrainProgress, counted, figures_line
from train.distributed.process_group import ProcessGroup
from train.optim.optimizer import Optimizers
from train.trainer.announce import expectation
from train.trainer.logs import BALANCE, METRICS, VALIDATION, Logs
from train.trainer.metrics import BalanceTally, StepMetrics
from train.trainer.parts import Figures, Observer, Outcome
from train.trainer.usage import IdleTime

GIVE_UP = 10
"""Consecutive steps that may be left out because their gradients are not finite."""
SHOWN_LOSSES = ("loss/text", "loss/audio", "loss/distill")
"""Parts of a held-out loss that the screen shows."""
PACED = (4, 12)
"""Steps of a start whose pace says when an open-ended run is expected to end."""
FIRST_STEPS, LINE_SECONDS = 3, 30.0
"""Steps of a start that the screen shows whatever `log.every` is, and the most seconds between two of its later lines."""


def base_rate(optimizer: Optimizers) -> float:
    """The largest learning rate of any parameter, now."""
    return float(max(group["lr"] for group in optimizer.param_groups))


@dataclass
class StepHealth(Observer):
    """Adds learning rate, time and the gradients' norm to the log; says which steps are left out, and refuses to go on
    (UserError) where losses are not finite, or the gradients of `GIVE_UP` steps one after another.

    Attributes:
        on_cpu: elsewhere the steps that were left out are asked for at rows of the log only.
        scaled: 16-mixed finds its scale by steps that fail, which are neither counted nor said.
        first_step: of this start.
        said_from: how many steps are left out when that is said again.
    """

    checkpointer: Checkpointer
    meter: StepMetrics
    optimizer: Optimizers
    on_cpu: bool
    scaled: bool
    first_step: int
    say: Callable[[str], None]
    said_from: int = 1

    def on_log(self, step: int, figures: Figures) -> None:
        self._say_skipped(step)
        self.checkpointer.check_finite("loss", figures["loss"])
        norm = float(self.meter.norm)
        if not self.scaled and self.meter.skipped_in_a_row >= GIVE_UP:
            self.checkpointer.check_finite(f"gradients' norm of {GIVE_UP} steps one after another", norm)
        position = self.checkpointer.position
        figures.update(lr=base_rate(self.optimizer), seconds=position.seconds, gradient_norm=norm)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if not figures and self.on_cpu:
            self._say_skipped(step)

    def _say_skipped(self, step: int) -> None:
        """Says that steps are left out: at the first, and when they are twice as many."""
        skipped = 0 if self.scaled else round(float(self.meter.skipped))
        if skipped < self.said_from:
            return
        self.said_from = 2 * skipped
        number = "" if skipped == 1 else f" ({skipped} steps so far)"
        self.say(
            f"step {step}: left out, because its gradients are not finite{number}; {GIVE_UP} one after another end the run"
            if float(self.meter.skipped_in_a_row)
            else f"step {step}: {counted(skipped, 'step')} left out so far: gradients not finite"
        )

    def check_any(self) -> None:
        """Refuses (UserError) to finish a run whose start has left out all of its steps."""
        steps = self.checkpointer.position.step - self.first_step + 1
        if steps and not self.scaled and int(self.meter.skipped_in_a_row) >= steps:
            self.checkpointer.check_finite(f"gradients' norm of all {steps} steps", math.nan)


class StepLines(Observer):
    """Shows a run on the screen: rows of the log, and lines between them, of which the log knows nothing.

    Attributes:
        shown, paced: seconds of the run at the last line, and after the first of the `PACED` steps.
    """

    def __init__(
        self,
        config: FitConfig,
        checkpointer: Checkpointer,
        meter: StepMetrics,
        optimizer: Optimizers,
        idle: IdleTime,
        progress: TrainProgress,
    ) -> None:
        self.config, self.checkpointer, self.meter, self.optimizer = config, checkpointer, meter, optimizer
        self.position = checkpointer.position
        self.idle, self.progress = idle, progress
        self.first_step = self.position.step + 1
        self.shown = self.paced = self.position.seconds

    def on_log(self, step: int, figures: Figures) -> None:
        self._say_expectation(step)
        self._show(step, figures)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if figures:
            return
        self._say_expectation(step)
        if self._line_is_due(step):
            with self.idle:
                self._show(step, {**self.meter.look(), "lr": base_rate(self.optimizer)})
        else:
            self.progress.show(step, self.checkpointer.used, self.position.seconds)

    def _say_expectation(self, step: int) -> None:
        """Says after the first steps of an open-ended run, from their pace, when it should end."""
        first, last = (self.first_step + n - 1 for n in PACED)
        if step == first:
            self.paced = self.position.seconds
        elif step == last and None not in (self.config.budget.until, self.config.budget.expected):
            pace = (self.position.seconds - self.paced) / (last - first)
            self.progress.say(expectation(self.config, last, pace))

    def _line_is_due(self, step: int) -> bool:
        """True where the screen shows this step although the log has no row of it; the same in all processes."""
        first = step < self.first_step + FIRST_STEPS
        return self.config.log.progress != "off" and (first or self.position.seconds - self.shown >= LINE_SECONDS)

    def _show(self, step: int, figures: Figures) -> None:
        self.shown = self.position.seconds
        self.progress.row(step, self.checkpointer.used, self.position.seconds, figures)

    def close(self) -> None:
        self.progress.close()


@dataclass
class LogWriter(Observer):
    """Writes rows, validations and pictures to the run's logs.

    Attributes:
        logs: None in all processes but the first.
        tally: of the balance of the tasks, where there is one.
        draw: refreshes the pictures in the run folder; names and files.
    """

    logs: Logs | None
    group: ProcessGroup
    checkpointer: Checkpointer
    tally: BalanceTally | None
    draw: Callable[[], dict[str, Path]] | None
    say: Callable[[str], None]

    def on_log(self, step: int, figures: Figures) -> None:
        balance = self.tally.figures() if self.tally is not None else {}
        if self.logs is not None:
            self.logs.write(METRICS, step, figures)
            if balance:
                self.logs.write(BALANCE, step, balance)

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        def work() -> None:
            if self.logs is not None:
                self.logs.write(VALIDATION, step, {**figures, "seconds": self.checkpointer.position.seconds})
            shown = {k: v for k, v in figures.items() if not k.startswith("loss/") or k in SHOWN_LOSSES}
            self.say(f"validation at step {step}: {figures_line(shown)}")
            self._draw(step)

        self.group.run_on_first(work)

    def on_end(self, outcome: Outcome) -> None:
        if not outcome.signal:
            self.group.run_on_first(lambda: self._draw(outcome.step))

    def _draw(self, step: int) -> None:
        if self.draw is not None and self.logs is not None:
            for name, file in self.draw().items():
                self.logs.image(name, file, step)

    def close(self) -> None:
        if self.logs is not None:
            self.logs.close()


@dataclass
class Begun(Observer):
    """Calls `work` once: when a step of this start is done, or none is left."""

    work: Callable[[], object] | None

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self.on_steps_end()

    def on_steps_end(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work()
