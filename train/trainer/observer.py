"""What a run tells those that watch it: times, meter, logs, screen, profiler and the user's callbacks, as one list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """Watches a run; a subclass overrides the methods that it needs.

    The loop calls its observers in every process alike, in the order of its list.
    """

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
