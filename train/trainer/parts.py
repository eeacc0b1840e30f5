"""The parts of a training loop, its outcome, and what watches it: observers, and callbacks, own code registered by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from omni.errors import UserError, closest
from omni.plugins import Registry
from train.distributed.process_group import ProcessGroup

Batch = Any
Figures = dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one start of a run: steps done, the signal that stopped it (0 where the budget is spent), the last
    checkpoint, the exported model where the run is finished, and the figures of the last validation."""

    step: int
    signal: int
    checkpoint: Path
    model: Path | None
    figures: Figures


class Observer:
    """Watches a run, in every process alike; a subclass overrides the methods that it needs."""

    def on_step_begin(self, step: int) -> None:
        """Called before the data of a step are fetched."""

    def on_log(self, step: int, figures: Figures) -> None:
        """Called where the log has a row of a step: adds figures to the row, or writes those that others have added."""

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Called after every step; `figures` are those of its row in the log, empty for a step without a row."""

    def on_steps_end(self) -> None:
        """Called after the last step of a start, before its state is saved."""

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Called after a validation, with its figures."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Called after a checkpoint is written, or has begun to be, with its folder."""

    def on_end(self, outcome: Outcome) -> None:
        """Called when a start of the run ends: finished, with its model exported, or stopped by a signal."""

    def close(self) -> None:
        """Called at last, also where an error has ended the run."""


@dataclass
class Parts:
    """The parts of a run: its objective, data, validation and export.

    Attributes:
        objective: module with `forward(batch, denominators, progress) -> Losses`; its `model` is validated and exported.
        steps: from this process's shards, the first step and the shards' states: the micro-batches of each step, without end.
        targets: number of targets of a batch by stream, and of heads on the encoder, [K + HEADS].
        streams, tasks: names, in the order of `Losses.sums`.
        idle: parameters that are not trained at that share of the budget.
        balanced: names of the balanced tasks, where there are some; `outer`: held-out batches, for the methods of two levels;
            each step takes the next one for each process.
        rows: sizes of the stored sources, and the checksum of the weights below adapters, by their names in messages: a run
            resumes with the same ones only.
        held_out: the batches that a validation measures the loss on, equally many in every process.
        validate: figures of the model with these weights after so many steps; they may be those in training: only read them.
        export: writes the finished model, whose weights are gathered as they are read, and says where it is. These two are
            called in the first process only.
    """

    objective: nn.Module
    steps: Callable[[range, int, Mapping[str, Any]], Iterator[Sequence[Batch]]]
    targets: Callable[[Batch], Tensor]
    streams: Sequence[str]
    tasks: Sequence[str]
    idle: Callable[[float], Iterable[nn.Parameter]] = lambda progress: ()
    balanced: Sequence[str] | None = None
    outer: Sequence[Batch] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    held_out: Sequence[Batch] = ()
    validate: Callable[[dict[str, Tensor], int], Figures] | None = None
    export: Callable[[Mapping[str, Tensor]], Path] | None = None


@dataclass(frozen=True)
class StepBatches:
    """This process's micro-batches of one step, with the counts of the whole step.

    Attributes:
        denominators: targets of the whole step by stream, and of heads on the encoder, [K + HEADS] int64 (the precisions that
            Fabric casts floating-point inputs to cannot count).
        positions, flops: of the whole step.
        seconds: of the run, by the first process's clock.
        stop: number of a signal that any process has received, or 0.
        cells: targets of the whole step by task and stream, [T, K], where tasks are balanced.
        waited, held_up: seconds that this process waited for the step's data, and then for the other processes.
    """

    batches: Sequence[Any]
    denominators: Tensor
    positions: float
    flops: float
    seconds: float
    stop: int
    cells: Tensor | None = None
    waited: float = 0.0
    held_up: float = 0.0


EVENTS = ("on_step", "on_validation", "on_save", "on_end")


class Callback(Observer):
    """Does nothing; a subclass overrides the methods that it needs: `on_step`, `on_validation`, `on_save`, `on_end`.

    Methods are called in the first process only, while the others go on: they must not exchange anything between processes.
    An exception in one ends the run, after the state is saved, with an error that names the callback. A run with an `on_save`
    does not train on while a checkpoint is written.

    Args:
        folder: of the run.
    """

    name = ""
    """Its registered name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


CallbackClass = TypeVar("CallbackClass", bound=type[Callback])

CALLBACKS: Registry[type[Callback]] = Registry("callback")
"""Callbacks by name."""


def register_callback(name: str) -> Callable[[CallbackClass], CallbackClass]:
    """A decorator for a subclass of `Callback`; a run takes it by `callbacks: [name]`."""

    def register(callback_class: CallbackClass) -> CallbackClass:
        CALLBACKS.add(name, callback_class)
        unknown = [method for method in vars(callback_class) if method.startswith("on_") and method not in EVENTS]
        if unknown:
            raise UserError(f"callback {name}: {unknown[0]} is never called; {closest(unknown[0], EVENTS)}")
        callback_class.name = name
        return callback_class

    return register


class Callbacks(Observer):
    """Calls the callbacks of a run in order, in its first process.

    What one raises is kept until the processes next exchange anyway, in `Feed.next` or at the end: steps exchange nothing more.
    """

    def __init__(self, callbacks: Sequence[Callback], group: ProcessGroup) -> None:
        self.callbacks, self.group = callbacks if group.first else (), group
        self.failure: UserError | None = None

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self._call("on_step", lambda callback: callback.on_step(step, figures))

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        self._call("on_validation", lambda callback: callback.on_validation(step, figures))

    def on_save(self, step: int, checkpoint: Path) -> None:
        self._call("on_save", lambda callback: callback.on_save(step, checkpoint))

    def on_end(self, outcome: Outcome) -> None:
        """Raises a callback's failure in all processes."""
        self._call("on_end", lambda callback: callback.on_end(outcome))
        self.group.raise_if_any_failed(self.failure)

    def _call(self, event: str, call: Callable[[Callback], None]) -> None:
        """Calls each; none after one has failed."""
        for callback in self.callbacks if self.failure is None else ():
            try:
                call(callback)
            except (Exception, SystemExit) as error:
                name = callback.name or type(callback).__name__
                self.failure = UserError(f"callback {name}: {event} failed with {type(error).__name__}: {error}")
                self.failure.__cause__ = error
                return

    def checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches of steps; a callback's failure is raised in place of the next."""
        for batch in batches:
            if self.failure is not None:
                raise self.failure
            yield batch
