"""The parts of a training loop, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from train.trainer.balanced_step import Balanced
from train.trainer.feed import Batch
from train.trainer.held_out_loss import HeldOut

Figures = dict[str, float]


@dataclass
class Parts:
    """The parts of a run: its objective, data, validation and export.

    Attributes:
        objective: module with `forward(batch, denominators, progress) -> Losses`, progress being the share of the budget that
            is used; its `model` is what is validated and exported.
        micro_batches: of one step, over all processes.
        steps: from this process's shards, the first step and the shards' states: the micro-batches of each step, without end.
        targets: number of targets of a batch by stream, and of heads on the encoder, [K + HEADS].
        streams, tasks: names, in the order of `Losses.sums`.
        idle: parameters that are not trained at that share of the budget.
        balanced: what the balance of the tasks needs, where the configuration has one.
        flops: FLOPs of a batch with its numbers of targets.
        rows: sizes of the stored sources, and the checksum of the weights below adapters, by their names in messages: a run
            resumes with the same ones only.
        held_out: the batches that a validation measures the loss on.
        validate: figures of the model with these weights after so many steps; they may be those in training: only read them.
        export: writes the finished model, whose weights are gathered as they are read, and says where it is.
        draw: refreshes the pictures in the run folder; their names and files. These three are needed and called in the
            first process only.
        broken_limit: share of a source's draws for a task that may be broken.
        named: batches have the names of their examples, and the objective takes `ExampleLosses` as a last argument.
        sources: name of each source of examples, and its number of rows, None where they are made without end.
        draws: of rows that the sources give in all; None for any number.
    """

    objective: nn.Module
    micro_batches: int
    steps: Callable[[range, int, Mapping[str, Any]], Iterator[Sequence[Batch]]]
    targets: Callable[[Batch], Tensor]
    streams: Sequence[str]
    tasks: Sequence[str]
    idle: Callable[[float], Iterable[nn.Parameter]] = lambda progress: ()
    balanced: Balanced | None = None
    flops: Callable[[Batch, Tensor], float] | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    held_out: HeldOut = field(default_factory=HeldOut)
    validate: Callable[[dict[str, Tensor], int], Figures] | None = None
    export: Callable[[Mapping[str, Tensor]], Path] | None = None
    draw: Callable[[], dict[str, Path]] | None = None
    broken_limit: float = 1.0
    named: bool = False
    sources: Sequence[tuple[str, int | None]] = ()
    draws: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of one start of a run.

    Attributes:
        step: optimizer steps done.
        signal: number of the signal that stopped it, 0 where the budget is spent.
        checkpoint: the last one.
        model: the exported folder, where the run is finished.
        figures: of the last validation.
    """

    step: int
    signal: int
    checkpoint: Path
    model: Path | None
    figures: Figures
