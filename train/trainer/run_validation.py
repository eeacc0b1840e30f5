"""Validates a run when that is due, keeps its best state, and exports its model at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni.checkpoint.tensors import NotFinite
from omni.errors import UserError
from train.checkpoint.checkpointer import Checkpointer
from train.config.run import FitConfig
from train.distributed.fabric import full_state, with_whole_state
from train.distributed.process_group import ProcessGroup
from train.optim.optimizer import Average
from train.optim.schedule import due
from train.trainer.observer import Observer
from train.trainer.parts import Parts
from train.trainer.signals import BrokenOff, Stop, break_off
from train.trainer.validation import held_out_loss


@dataclass(eq=False)
class RunValidation:
    """Measures the model of a run, or its running average: the loss of held-out rows in all processes, and answers in the
    first one, for which the others wait. Keeps the best, and exports the last.

    Attributes:
        observers: told of validations, the last one first.
        module: the objective as Fabric wraps it.
        answering: device that whole weights are given on.
    """

    config: FitConfig
    parts: Parts
    checkpointer: Checkpointer
    observers: Sequence[Observer]
    module: Any
    average: Average | None
    device: torch.device
    answering: torch.device | str
    group: ProcessGroup

    def if_due(self, stop: Stop) -> int:
        """Runs a validation where that is due; the signal that has broken it off, or 0."""
        plan, position = self.config.validation, self.checkpointer.position
        if due(position.step, position.seconds, *position.validated, plan.every_steps, plan.every_minutes):
            return self.run(stop)
        return 0

    def run(self, stop: Stop) -> int:
        """Runs a validation; one that a signal breaks off is not made. Returns that signal's number, or 0."""
        position, stop.phase = self.checkpointer.position, "validation"
        try:
            figures = self._measure(position.step)
            if figures is None:
                return self.group.broadcast(stop.number)
            position.validated = (position.step, position.seconds)
            if figures:
                position.figures = figures
                for observer in reversed(self.observers):
                    observer.on_validation(position.step, figures)
                self._keep_best(figures.get(self.config.checkpoint.metric))
        finally:
            stop.phase = "step"
        return 0

    def _keep_best(self, value: float | None) -> None:
        """Saves a state that is among the best; UserError, after that, where the metric that says so is not measured."""
        keep, saver = self.config.checkpoint, self.checkpointer
        useless = value is None and keep.keep_best > 0 and saver.used < 1
        if saver.is_best(value) or useless:
            saver.save(beside=not useless and saver.used < 1)
        saver.add_figures()
        if useless:
            raise UserError(
                f"checkpoint.metric {keep.metric!r} is not measured here; the validation's figures are "
                f"{', '.join(saver.position.figures)}: name one of them, or set checkpoint.keep_best to 0; the state is in "
                f"{saver.saved}"
            )

    def export(self) -> Path | None:
        """Writes the finished model; says where it is."""
        parts, values = self.parts, self.average.values if self.average else None

        def work(weights: Mapping[str, Tensor]) -> Path | None:
            try:
                return parts.export(weights) if parts.export is not None else None
            except NotFinite as error:
                raise self.checkpointer.refused(error) from error

        exported = with_whole_state(parts.objective, values, self.group, work, "model.")
        if self.checkpointer.uploads is not None and exported is not None:
            self.checkpointer.uploads.add(exported)
        return exported

    def _measure(self, step: int) -> dict[str, float] | None:
        """The figures after so many steps, none where nothing is measured; None where a signal has broken it off, which of
        several processes only the answers heed."""
        parts, group = self.parts, self.group
        asked = group.broadcast(parts.validate is not None)
        if not asked and not parts.held_out.batches:
            return {}
        group.phase = "held-out loss"
        try:
            losses = held_out_loss(
                self.module, parts.objective, self._breakable(), parts.tasks, parts.streams, self.device, self.average, group
            )
        except BrokenOff:
            return None
        group.phase = "validation answers"
        values = self.average.values if self.average else None
        weights = full_state(parts.objective, values, group, "model.", self.answering) if asked else {}

        def answers() -> dict[str, float] | None:
            try:
                return parts.validate(weights, step) if parts.validate is not None else {}
            except BrokenOff:
                return None

        figures = group.broadcast(group.run_on_first(answers))
        return None if figures is None else group.broadcast({**figures, **losses})

    def _breakable(self) -> Iterator[Any]:
        """The held-out batches; before each one a signal ends the validation, where no other process has to agree to that."""
        for batch in self.parts.held_out.batches:
            if self.group.world == 1:
                break_off()
            yield batch
